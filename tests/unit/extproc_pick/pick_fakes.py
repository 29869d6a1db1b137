"""What a pick goes through, over fakes of all that is outside of the process."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from extproc.admission.admission_queue import AdmissionQueue
from extproc.admission.admit_request import RequestAdmission
from extproc.admission.asked_request import RequestReader
from extproc.admission.degradation import Degradation
from extproc.admission.first_pod import FirstPodWaits
from extproc.admission.flow_queue import FlowQueue
from extproc.admission.pool_pressure import PoolPressure
from extproc.admission.prepared_request import Picked
from extproc.admission.waiting_bodies import WaitingBodies
from extproc.answers.stream_promises import stream_promises
from extproc.choosing.choose import PoolView, RoundRobin
from extproc.choosing.decision import Decision
from extproc.choosing.hot_prefixes import HotPrefixes
from extproc.ext_proc.exchange import RequestFacts
from extproc.ledger.facts import DecisionRecord
from extproc.ledger.feature_telemetry import OverloadTelemetry
from extproc.ledger.ledger import DegradationLog, RequestWatch
from extproc.ledger.picker_telemetry import PickerTelemetry
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.pick import explain, pick
from extproc.pods.endpoint import EndpointModels, EndpointStatus, Reachability
from extproc.policy.values import PickPolicy
from extproc.pools.picker_books import PickerBooks
from extproc.pools.plan_response import Pace
from extproc.pools.pool_ledger import listeners_of
from extproc.pools.pool_runtime import PoolRuntime
from extproc.pools.prefill_legs import PrefillLegs
from extproc.prefixes.prompt_match import IndexHits
from extproc.prompts.tokenized_prompt import PromptTokens, TokenizedPrompt
from extproc.requests.request import InferenceRequest
from kvmesh.blocks.source import Registry
from kvmesh.index.prefix_match import PrefixLookup
from kvmesh.pods.pod_http import PodPages
from tests.unit.extproc_choosing.pick_candidates import load
from tests.unit.extproc_ledger.told_facts import AtOnce

TINY = ServedModel(name="tiny", adapters=frozenset({"lora"}), tokens_from=TokensFrom.RENDER)
ONE_MODEL = ModelTable(served=(TINY,))
POLICY = PickPolicy()
CHAT = "/v1/chat/completions"


@dataclass
class FakeEndpoints:
    statuses: list[EndpointStatus]
    learned_adapters: Mapping[str, str] = field(default_factory=dict)

    def snapshot(self, *, now: float) -> Sequence[EndpointStatus]:
        return self.statuses


@dataclass
class FakeIndex:
    answer: IndexHits = field(default_factory=IndexHits)
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def lookup(self, prompts: Sequence[TokenizedPrompt], **what: Any) -> IndexHits:
        self.asked.append({"prompts": len(prompts)} | what)
        return self.answer


@dataclass
class FakePrompts:
    answer: PromptTokens | Exception = field(default_factory=PromptTokens)
    asked: list[dict[str, Any]] = field(default_factory=list)
    tenants: list[str] = field(default_factory=list)

    async def prompts(
        self,
        request: InferenceRequest,
        body: bytes | None,
        *,
        model: ServedModel,
        limit: int,
        adapter: str | None = None,
        tenant: str = "",
    ) -> PromptTokens:
        self.asked.append({"body": body, "model": model.name, "adapter": adapter})
        self.tenants.append(tenant)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def Hits(  # noqa: N802 - reads as the value that it makes
    matched_blocks: dict[str, int], *, tiers: dict[str, dict[str, int]] | None = None
) -> PrefixLookup:
    return PrefixLookup(
        matched_blocks=matched_blocks,
        block_size=dict.fromkeys(("a", "b", "c", *matched_blocks), 16),
        tiers=tiers or {},
        endpoints={},
        registry=Registry(version=b""),
        indexer_alive=True,
    )


def pod(address: str, *models: str, reachability: Reachability = Reachability.READY, **reported: Any) -> EndpointStatus:
    served = EndpointModels(models=frozenset(models), adapters={}) if models else None
    return EndpointStatus(address=address, reachability=reachability, load=load(**reported), models=served)


def tokens(count_: int) -> PromptTokens:
    return PromptTokens(prompts=(TokenizedPrompt(tokens=bytes(4 * count_)),), estimated_tokens=count_)


@dataclass(slots=True, kw_only=True)
class ShownPool(PoolRuntime):
    """A pool with its counters at hand."""

    telemetry: PickerTelemetry
    overload: OverloadTelemetry

    @property
    def recent(self) -> Sequence[DecisionRecord]:
        return self.telemetry.recent


def runtime(
    *statuses: EndpointStatus,
    index: FakeIndex | None = None,
    prompts: FakePrompts | None = None,
    models: ModelTable = ONE_MODEL,
    policy: PickPolicy = POLICY,
    learned: Mapping[str, str] | None = None,
    clock: Callable[[], float] = lambda: 1.0,
    prefill_pods: PodPages | None = None,
    first_pod: FirstPodWaits | None = None,
    most_bytes: int = 1 << 30,
) -> ShownPool:
    """Return the parts of a pool over fakes of all that is outside of the process."""
    priorities = policy.priorities
    telemetry = PickerTelemetry()
    overload = OverloadTelemetry(telemetry.registry, classes=priorities.classes)
    books = PickerBooks(
        [status.address for status in statuses],
        policy=policy,
        clock=clock,
    )
    watch = RequestWatch()
    listeners = listeners_of(
        "", books=books, telemetry=telemetry, overload=overload, degradations=DegradationLog(), watch=watch
    )
    books.ledger = AtOnce(watch, listeners)
    order = FlowQueue(priorities)
    queue = AdmissionQueue(order, bodies=WaitingBodies(most_bytes=most_bytes), clock=clock, telemetry=overload)
    books.freed = queue.wake
    pressure = PoolPressure(
        estimates=books.estimates,
        degradation=Degradation(priorities),
        waiting=order,
        clock=clock,
        random=lambda: 0.0,
    )
    return ShownPool(
        telemetry=telemetry,
        overload=overload,
        name="",
        reader=RequestReader(models=models, policy=priorities, max_body_bytes=1 << 20),
        view=PoolView(
            endpoints=FakeEndpoints(list(statuses), learned or {}),
            bookings=books.bookings,
            memory=books.memory,
            health=books.health,
            estimates=books.estimates,
            links=books.links,
            hot=HotPrefixes(),
            turns=RoundRobin(),
            policy=policy,
            random=lambda: 0.0,
            promises=stream_promises(priorities),
        ),
        prompts=prompts or FakePrompts(),
        index=index or FakeIndex(),
        pressure=pressure,
        admission=RequestAdmission(policy=priorities, pressure=pressure, queue=queue, clock=clock),
        books=books,
        promise_of=telemetry.slo.promise_of,
        watch=watch,
        reads=Pace(per_second=0.0, burst_seconds=0.0),
        full=queue.wake_at,
        first_pod=first_pod,
        clock=clock,
        legs=PrefillLegs(
            books=books,
            pages=prefill_pods or PodPages(),
            clock=clock,
        ),
    )


async def explained(pool: PoolRuntime, facts: RequestFacts, body: bytes | None) -> Picked:
    """Return what would be picked; nothing is booked, so that the next one sees the same pool."""
    picked, _ = await explain(facts, body, pool)
    return picked


async def decided(pool: ShownPool, facts: RequestFacts, body: bytes | None) -> Decision:
    """Pick, end the exchange, and return the decision."""
    exchange = await pick(facts, body, pool)
    exchange.finish()
    await asyncio.sleep(0)  # it is remembered behind the answer
    outcome = pool.recent[0].outcome
    assert isinstance(outcome, Decision)
    return outcome


def facts(**values: Any) -> RequestFacts:
    return RequestFacts(**({"method": "POST", "path": CHAT, "objective": None, "request_id": "r"} | values))


def chat(model: str | None = "tiny", **more: Any) -> bytes:
    named = {} if model is None else {"model": model}
    return json.dumps(named | {"messages": [{"role": "user", "content": "hi"}]} | more).encode()
