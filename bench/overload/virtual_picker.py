"""The picker itself in virtual time: `admit_request` with all it decides by, on inputs that are never late.

Called by `virtual`. Put together as `extproc.service` does, without gRPC, Redis and HTTP.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bench.overload.load import PATH, TENANT_HEADER, body_of
from bench.overload.refusable_http import Answer
from bench.overload.script import Request
from bench.overload.virtual_pods import MODEL, Texts, VirtualPods
from bench.routing.one_cache import BLOCK_TOKENS, block_keys
from extproc.admission.admission_queue import AdmissionQueue
from extproc.admission.degradation import Degradation
from extproc.admission.flow_queue import FlowQueue
from extproc.admission.pool_pressure import PoolPressure
from extproc.choosing.hotspot import HotPrefixes
from extproc.choosing.round_robin import RoundRobin
from extproc.errors import PickError
from extproc.ext_proc.exchange import RequestFacts
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.pick import EndpointPicker, Picked
from extproc.policy.values import PickPolicy
from extproc.pools.admit_request import RequestAdmission
from extproc.pools.booked_exchange import BookedExchange
from extproc.pools.picker_books import PickerBooks
from extproc.prefixes.prompt_match import LIVE, IndexHits, PromptKeys
from extproc.prompts.token_ids import PromptTokens, TokenizedPrompt
from extproc.quotas.quota import QuotaAsk, QuotaKey
from extproc.requests.request import InferenceRequest
from extproc.telemetry.degradation_log import DegradationLog
from extproc.telemetry.overload_telemetry import OverloadTelemetry
from extproc.telemetry.picker_telemetry import PickerTelemetry

REQUEST_NUMBER = "x-request-number"
TOKEN_BYTES = 4


class _Booked(msgspec.Struct, frozen=True, kw_only=True):
    exchange: BookedExchange


class VirtualPicker:
    """One replica of the picker."""

    def __init__(self, pods: VirtualPods, policy: PickPolicy, *, seed: int) -> None:
        telemetry, priorities = PickerTelemetry(), policy.priorities
        overload = OverloadTelemetry(telemetry.registry, classes=priorities.classes)
        clock, draw = pods.clock, random.Random(seed).random
        self._pods = pods
        self.books = PickerBooks(
            list(pods.pods),
            policy=policy,
            telemetry=telemetry,
            overload=overload,
            degradations=DegradationLog(),
            clock=clock,
        )
        order = FlowQueue(priorities)
        self.queue = AdmissionQueue(order, clock=clock, telemetry=overload)
        self.books.freed = self.queue.wake
        self.pressure = PoolPressure(
            policy=priorities,
            estimates=self.books.estimates,
            degradation=Degradation(priorities, on_change=overload.step_changed),
            waiting=order,
            clock=clock,
            random=draw,
        )
        picker = EndpointPicker(
            endpoints=pods,
            bookings=self.books.bookings,
            index=_Caches(pods),
            prompts=_Tokens(pods.texts),
            models=ModelTable(served=(ServedModel(name=MODEL, tokens_from=TokensFrom.RENDER),)),
            known_models=frozenset(),
            policy=policy,
            pressure=self.pressure,
            quotas=_NoQuotas(),
            health=self.books.health,
            memory=self.books.memory,
            hot=HotPrefixes(policy.hotspot),
            telemetry=telemetry,
            clock=clock,
            random=draw,
            turns=RoundRobin(),
            max_body_bytes=1 << 22,
        )
        self.admission = RequestAdmission(
            picker=picker,
            policy=priorities,
            pressure=self.pressure,
            estimates=self.books.estimates,
            health=self.books.health,
            queue=self.queue,
            book=self._booked,
            unbook=lambda booked: booked.exchange.finish(),
            others=lambda: None,
            telemetry=overload,
            clock=clock,
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
            exchange = (await self.admission.admit(facts, body_of(MODEL, request))).exchange
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

    def _booked(self, picked: Picked) -> _Booked:
        booking = self.books.book(picked)
        self.books.remember(picked)
        exchange = BookedExchange(
            books=self.books,
            endpoints=picked.decision.endpoints,
            booking=booking,
            response_headers=picked.prepared.told,
        )
        return _Booked(exchange=exchange)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hits:
    matched_blocks: Mapping[str, int]
    block_size: Mapping[str, int]
    tiers: Mapping[str, Mapping[str, int]]


class _Caches:
    """The index: it looks into the pods' caches, and is never late."""

    def __init__(self, pods: VirtualPods) -> None:
        self._pods = pods
        self._states = dict.fromkeys(pods.pods, LIVE)

    async def lookup(self, prompts: Sequence[TokenizedPrompt], **_: Any) -> IndexHits:
        (prompt,) = prompts
        tokens = list(memoryview(prompt.tokens).cast("I"))
        held, keys = self._pods.cached_blocks(tokens), block_keys(tokens)
        hits = _Hits(
            matched_blocks=held,
            block_size=dict.fromkeys(held, BLOCK_TOKENS),
            tiers={address: {"GPU": blocks} for address, blocks in held.items()},
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


class _NoQuotas:
    def match(self, tenant: str, model: str | None) -> QuotaKey | None: ...

    def ask(self, key: QuotaKey, **_: Any) -> QuotaAsk:
        raise AssertionError(f"nobody has a quota, {key} neither")

    def cancel(self, ask: QuotaAsk) -> None: ...
