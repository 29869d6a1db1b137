"""The picker itself in virtual time: the path of `extproc.pick`, on inputs that are never late.

Put together as a `Pool` does it, without gRPC, Redis and HTTP.
"""

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

from bench.overload.load import PATH, TENANT_HEADER, body_of
from bench.overload.refusable_http import Answer
from bench.overload.script import Request
from bench.overload.virtual_pods import MODEL, Texts, VirtualPods
from bench.routing.one_cache import BLOCK_TOKENS, block_keys
from extproc.admission.admission_queue import AdmissionQueue
from extproc.admission.admit_request import RequestAdmission
from extproc.admission.asked_request import RequestReader
from extproc.admission.degradation import Degradation
from extproc.admission.flow_queue import FlowQueue
from extproc.admission.pool_pressure import PoolPressure
from extproc.choosing.choose import PoolView, RoundRobin
from extproc.choosing.hot_prefixes import HotPrefixes
from extproc.errors import PickError
from extproc.ext_proc.exchange import RequestFacts
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.pick import pick
from extproc.policy.values import PickPolicy
from extproc.pools.picker_books import PickerBooks
from extproc.pools.plan_response import Pace
from extproc.pools.pool_runtime import PoolRuntime
from extproc.pools.request_watch import RequestWatch
from extproc.prefixes.prompt_match import LIVE, IndexHits, PromptKeys
from extproc.prompts.token_ids import PromptTokens, TokenizedPrompt
from extproc.requests.request import InferenceRequest
from extproc.slo.stream_promises import stream_promises
from extproc.telemetry.degradation_log import DegradationLog
from extproc.telemetry.overload_telemetry import OverloadTelemetry
from extproc.telemetry.picker_telemetry import PickerTelemetry
from kvmesh.blocks.source import Registry
from kvmesh.index.prefix_match import PrefixLookup

REQUEST_NUMBER = "x-request-number"
TOKEN_BYTES = 4
MAX_BODY_BYTES = 1 << 22


class VirtualPicker:
    """One replica of the picker."""

    def __init__(self, pods: VirtualPods, policy: PickPolicy, *, seed: int) -> None:
        telemetry, priorities = PickerTelemetry(), policy.priorities
        overload = OverloadTelemetry(telemetry.registry, classes=priorities.classes)
        clock, draw = pods.clock, random.Random(seed).random
        self._pods = pods
        self.books = books = PickerBooks(
            list(pods.pods),
            policy=policy,
            telemetry=telemetry,
            overload=overload,
            degradations=DegradationLog(),
            clock=clock,
        )
        order = FlowQueue(priorities)
        self.queue = AdmissionQueue(order, clock=clock, telemetry=overload)
        books.freed = self.queue.wake
        self.pressure = PoolPressure(
            policy=priorities,
            estimates=books.estimates,
            degradation=Degradation(priorities, on_change=overload.step_changed),
            waiting=order,
            clock=clock,
            random=draw,
        )
        models = ModelTable(served=(ServedModel(name=MODEL, tokens_from=TokensFrom.RENDER),))
        self.pool = PoolRuntime(
            name="",
            reader=RequestReader(
                models=models, known_models=frozenset(), policy=priorities, max_body_bytes=MAX_BODY_BYTES
            ),
            view=PoolView(
                endpoints=pods,
                bookings=books.bookings,
                memory=books.memory,
                health=books.health,
                estimates=books.estimates,
                links=books.links,
                hot=HotPrefixes(policy.hotspot),
                turns=RoundRobin(),
                policy=policy,
                random=draw,
                promises=stream_promises(priorities),
            ),
            prompts=_Tokens(pods.texts),
            index=_Caches(pods),
            pressure=self.pressure,
            admission=RequestAdmission(policy=priorities, pressure=self.pressure, queue=self.queue, clock=clock),
            books=books,
            telemetry=telemetry,
            overload=overload,
            watch=RequestWatch(clock=clock),
            degradations=DegradationLog(),
            reads=Pace(per_second=0.0, burst_seconds=0.0),
            full=self.queue.wake_at,
            clock=clock,
            recent=deque(maxlen=1),
        )

    async def ask(self, request: Request, answer: Answer) -> None:
        """One request from its arrival at the gateway to its last token."""
        facts = RequestFacts(
            method="POST",
            path=PATH,
            objective=request.class_name,
            request_id=str(request.number),
            headers={TENANT_HEADER: request.tenant, "content-type": "application/json"},
        )
        try:
            exchange = await pick(facts, body_of(MODEL, request), self.pool)
        except PickError as refusal:
            answer.status = refusal.status
            answer.headers = {"x-kvmesh-reason": refusal.reason, **refusal.headers}
            if refusal.retry_after_seconds is not None:
                answer.headers = {"retry-after": str(refusal.retry_after_seconds), **answer.headers}
            return
        address = exchange.endpoints[0]
        answer.headers = exchange.response_headers

        def responded() -> None:
            exchange.responded(status=200, served_by=address, from_pod=True)

        try:
            await self._pods.answer(address, request, answer, responded=responded)
        finally:
            exchange.finish()


class _Caches:
    """The index: it looks into the pods' caches, and is never late."""

    def __init__(self, pods: VirtualPods) -> None:
        self._pods = pods
        self._states = dict.fromkeys(pods.pods, LIVE)

    async def lookup(self, prompts: Sequence[TokenizedPrompt], **_: Any) -> IndexHits:
        (prompt,) = prompts
        tokens = list(memoryview(prompt.tokens).cast("I"))
        held, keys = self._pods.cached_blocks(tokens), block_keys(tokens)
        hits = PrefixLookup(
            matched_blocks=held,
            block_size=dict.fromkeys(held, BLOCK_TOKENS),
            tiers={address: {"GPU": blocks} for address, blocks in held.items()},
            endpoints={},
            registry=Registry(version=b""),
            indexer_alive=True,
        )
        packed = b"".join(key.to_bytes(8, "little") for key in keys)
        return IndexHits(
            prompts=(hits,), keys=(PromptKeys(keys=packed, tokens_each=BLOCK_TOKENS),), states=self._states
        )


class _Tokens:
    """The tokenizer."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    async def prompts(self, request: InferenceRequest, body: bytes | None, **_: Any) -> PromptTokens:  # noqa: ARG002
        (text,) = request.prompts
        tokens = self._texts.tokens(text.text)  # type: ignore[union-attr]
        packed = b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in tokens)
        return PromptTokens(prompts=(TokenizedPrompt(tokens=packed),), estimated_tokens=len(tokens))
