"""What the admin pages show: readiness, metrics, the state, explanations. Changes nothing; wired by `service`."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from extproc.adapters.metrics_scraper import MetricsScraper
from extproc.adapters.pod_render import PodRender
from extproc.adapters.prefix_index import NO_INDEXER, RedisPrefixIndex
from extproc.adapters.prompt_tokens import PromptTokenSource
from extproc.adapters.telemetry import NoTelemetry, PickerTelemetry
from extproc.core.candidates import unhealthy_endpoints
from extproc.core.exchange import RequestFacts
from extproc.core.hotspot import HotPrefixes
from extproc.core.policy import HotspotPolicy
from extproc.doctor.findings import Finding
from extproc.errors import PickError, PrefixIndexUnavailableError
from extproc.pick_endpoint import EndpointPicker, Picked
from extproc.picker_books import PickerBooks
from extproc.wire.admin_json import (
    AskedFor,
    DecisionRecord,
    decision_json,
    endpoint_json,
    explanation_json,
    record_json,
    refusal_json,
    state_json,
)
from kv_indexer.api import SourceStatus

RECENT_DECISIONS = 200
SHOWN_DECISIONS = 50  # on the page of the state
LONGEST_NAME = 200  # characters of a model's name that are remembered: clients write what they like
ADMIN_INDEX_TIMEOUT_SECONDS = 1.0


def record_of(picked: Picked, facts: RequestFacts, *, at: float) -> DecisionRecord:
    """Return what is remembered of a pick; `at` is unix seconds."""
    return DecisionRecord(
        at=at, facts=facts, model=_short(picked.request.model), outcome=picked.decision, asked=asked_for(picked)
    )


def asked_for(picked: Picked) -> AskedFor:
    """Return the request's facts without its prompt."""
    request, resolved = picked.request, picked.resolved
    return AskedFor(
        api=request.api.value,
        model=_short(request.model),
        served_model=_short(resolved.model),
        adapter=resolved.adapter,
        arm=resolved.arm,
        prompts=len(request.prompts),
        stream=request.stream,
        max_tokens=request.max_tokens,
        block_tokens=picked.prompts[0].tokens_each if picked.prompts else 0,
    )


def _short(name: str | None) -> str | None:
    return name if name is None else name[:LONGEST_NAME]


class PickerPages:
    """Implements `admin_http.AdminPages`."""

    def __init__(
        self,
        *,
        picker: EndpointPicker,
        books: PickerBooks,
        index: RedisPrefixIndex,
        endpoints: MetricsScraper,
        telemetry: PickerTelemetry,
        recent: deque[DecisionRecord],
        render: PodRender,
        prompts: PromptTokenSource,
    ) -> None:
        self.ready = False
        self.findings: Sequence[Finding] | None = None  # of the checks at start-up; None: not done yet
        self._policy = picker.policy
        # what nobody sent must be neither in the metrics nor in what is remembered
        self._rehearsal = replace(
            picker, telemetry=NoTelemetry(), hot=HotPrefixes(HotspotPolicy(enabled=False)), turns=lambda _: 0
        )
        self._books = books
        self._index = index
        self._endpoints = endpoints
        self._telemetry = telemetry
        self._recent = recent
        self._render = render
        self._prompts = prompts

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Return whether traffic may come. A missing index does not count: the picker serves without it."""
        facts = {
            "endpoint_problems": self._endpoints.problems(),
            "index_problem": self._index.problem,
            "render_problems": self._render.problems(),
            "tokenizers": self._prompts.engines(),
        }
        return self.ready, facts

    def metrics(self) -> bytes:
        """Return Prometheus text."""
        return self._telemetry.exposition()

    async def state(self) -> dict[str, Any]:
        """Return endpoints, index, replicas and recent decisions."""
        sources, index = await self._index_state()
        blocks: dict[str, int] = {}
        for source in sources:
            blocks[source.endpoint] = blocks.get(source.endpoint, 0) + source.cached_blocks
        books, now = self._books, time.monotonic()
        bookings, all_picks = books.bookings.by_endpoint(), sum(books.picks.values())
        statuses = self._endpoints.snapshot(now=now)
        avoided = unhealthy_endpoints(statuses, health=books.health, policy=self._policy, now=now)
        return state_json(
            now=time.time(),
            endpoints=[
                endpoint_json(
                    status,
                    cached_blocks=blocks.get(status.address, 0),
                    bookings=bookings.get(status.address, 0),
                    picks=books.picks[status.address],
                    all_picks=all_picks,
                    avoided=avoided.get(status.address),
                )
                for status in statuses
            ],
            index=index,
            replicas=books.shared.facts() if books.shared is not None else None,
            findings=self.findings,
            decisions=[decision_json(record) for record in islice(self._recent, SHOWN_DECISIONS)],
        )

    def decisions(self, *, limit: int, request_id: str | None) -> list[dict[str, Any]]:
        """Return the last decisions with all that they rest on, newest first."""
        wanted = (record for record in self._recent if request_id is None or record.facts.request_id == request_id)
        return [record_json(record, policy=self._policy) for record in islice(wanted, limit)]

    async def explain(self, facts: RequestFacts, body: bytes) -> dict[str, Any]:
        """Decide without booking, and return what the decision rests on."""
        sources, _ = await self._index_state()
        try:
            picked = await self._rehearsal.pick(facts, body)
        except PickError as refusal:
            candidates = self._rehearsal.candidates(now=time.monotonic())
            return refusal_json(refusal, candidates, policy=self._policy)
        return explanation_json(
            asked_for(picked),
            picked.decision,
            policy=self._policy,
            blocks={source.endpoint: source.block_size for source in sources if source.block_size},
        )

    async def _index_state(self) -> tuple[Sequence[SourceStatus], dict[str, Any]]:
        """Return the index's sources, none where it cannot be read, and its state for the page."""
        try:
            async with asyncio.timeout(ADMIN_INDEX_TIMEOUT_SECONDS):
                status = await self._index.status()
        except (PrefixIndexUnavailableError, TimeoutError) as error:
            return (), {"state": "unavailable", "problem": str(error) or "no answer in time", "sources": 0}
        problem = None if status.indexer_alive else NO_INDEXER
        state = {"state": "stale" if problem else "ok", "problem": problem, "sources": len(status.sources)}
        return status.sources, state
