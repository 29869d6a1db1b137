"""What a picker depends on, as plain values, for tests of the use case."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from extproc.admission.degradation import NO_MEASURES, Measures
from extproc.choosing.health import EndpointHealth
from extproc.choosing.hotspot import HotPrefixes
from extproc.choosing.round_robin import RoundRobin
from extproc.ext_proc.exchange import RequestFacts
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.pages.pool_pages import NoQuotas
from extproc.pick import EndpointPicker
from extproc.pods.endpoint import EndpointModels, EndpointStatus, Reachability
from extproc.pods.inflight import Bookings
from extproc.policy.request_class import RequestClass
from extproc.policy.values import PickPolicy
from extproc.prefixes.prompt_match import IndexHits
from extproc.prefixes.routing_memory import RoutingMemory
from extproc.prompts.token_ids import PromptTokens, TokenizedPrompt
from extproc.requests.request import InferenceRequest
from tests.unit.extproc_choosing.pick_candidates import load

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

    async def prompts(
        self,
        request: InferenceRequest,
        body: bytes | None,
        *,
        model: ServedModel,
        limit: int,
        adapter: str | None = None,
    ) -> PromptTokens:
        self.asked.append({"body": body, "model": model.name, "adapter": adapter})
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@dataclass
class Phases:
    names: list[str] = field(default_factory=list)

    def phase(self, name: str, seconds: float) -> None:
        self.names.append(name)


class NoPressure:
    def measures(self, request_class: RequestClass, *, pool: str) -> Measures:
        return NO_MEASURES


@dataclass(frozen=True)
class Hits:
    matched_blocks: dict[str, int]
    block_size: dict[str, int] = field(default_factory=lambda: {"a": 16, "b": 16, "c": 16})
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)


def pod(address: str, *models: str, reachability: Reachability = Reachability.READY, **reported: Any) -> EndpointStatus:
    served = EndpointModels(models=frozenset(models), adapters={}) if models else None
    return EndpointStatus(address=address, reachability=reachability, load=load(**reported), models=served)


def tokens(count_: int) -> PromptTokens:
    return PromptTokens(prompts=(TokenizedPrompt(tokens=bytes(4 * count_)),), estimated_tokens=count_)


def picker(
    *statuses: EndpointStatus,
    index: FakeIndex | None = None,
    prompts: FakePrompts | None = None,
    models: ModelTable = ONE_MODEL,
    known_models: frozenset[str] = frozenset(),
    policy: PickPolicy = POLICY,
    learned: Mapping[str, str] | None = None,
    phases: Phases | None = None,
) -> EndpointPicker:
    return EndpointPicker(
        endpoints=FakeEndpoints(list(statuses), learned or {}),
        bookings=Bookings(),
        index=index or FakeIndex(),
        prompts=prompts or FakePrompts(),
        models=models,
        known_models=known_models,
        policy=policy,
        pressure=NoPressure(),
        quotas=NoQuotas(),
        health=EndpointHealth(policy.health),
        memory=RoutingMemory(policy),
        hot=HotPrefixes(policy.hotspot),
        telemetry=phases or Phases(),
        clock=lambda: 1.0,
        random=lambda: 0.0,
        turns=RoundRobin(),
        max_body_bytes=1 << 20,
    )


def facts(**values: Any) -> RequestFacts:
    return RequestFacts(**({"method": "POST", "path": CHAT, "objective": None, "request_id": "r"} | values))


def chat(model: str | None = "tiny", **more: Any) -> bytes:
    named = {} if model is None else {"model": model}
    return json.dumps(named | {"messages": [{"role": "user", "content": "hi"}]} | more).encode()
