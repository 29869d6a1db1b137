"""What all pools of one picker share: connections to Redis, bookings told to other replicas, tokenizers, tracing.

Each pool enters its books here.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from extproc.admission.waiting_bodies import WaitingBodies
from extproc.errors import ConfigError, PromptTokensError
from extproc.models.models import ServedModel, TokensFrom
from extproc.pods.scrape_pace import ScrapePace
from extproc.pools.picker_books import PickerBooks
from extproc.pools.plan_response import Pace
from extproc.pools.request_watch import RequestWatch
from extproc.prompts.prompt_tokens import TokenSettings
from extproc.prompts.tokenizer_cache import TokenizerCache
from extproc.replicas.shared_load import EndpointBookings, add_bookings
from extproc.replicas.shared_state import PoolShare, SharedState, SharedStateSettings
from extproc.requests.long_work import LongWork
from extproc.settings.config import PickerSettings
from extproc.telemetry.degradation_log import DegradationLog
from kvmesh.documents.pools import pool_seed
from kvmesh.errors import IndexUnavailableError, RedisUrlError
from kvmesh.index.redis_reader import PrefixIndexReader
from kvmesh.pods.page_turns import PageTurns
from kvmesh.pods.pod_key import open_key
from kvmesh.redis.link import RedisLink

if TYPE_CHECKING:
    from extproc.records.tracing import ExchangeTraces
    from extproc.records.write_records import RequestRecords

log = logging.getLogger(__name__)

INDEX_SECONDS = 0.3  # for the first look at the index; a start waits for it
READS_BURST_SECONDS = 20.0  # so many seconds' worth of reads may come at once


class SharedResources:
    """Raise ConfigError for an address of Redis that cannot be read."""

    def __init__(self, settings: PickerSettings) -> None:
        self.settings = settings
        self.books: dict[str, PickerBooks] = {}  # pool -> its books
        self.degradations = DegradationLog()
        self.token_settings = TokenSettings(budget_tokens=settings.token_budget)
        self.long_work = LongWork()
        self.waiting_bodies = WaitingBodies(most_bytes=settings.max_waiting_body_bytes)
        self.tell_scalers: Callable[[], None] = _nobody_scales  # what is wanted has changed
        self.tokenizers = TokenizerCache()
        self.scrape_pace = ScrapePace(rests=settings.follows_mesh)
        self.page_turns = PageTurns()
        self.pod_key = open_key(settings.pod_access)
        self.watch = RequestWatch()
        self.observers = self.watch.observers  # of requests; each enters and leaves
        self.watch.traces = self.tracing = _tracing(settings.otlp_endpoint, share=settings.observation.trace_share)
        self.records = _records(settings)
        if self.records is not None:
            self.observers.append(self.records.log)
        self.reads = Pace(per_second=settings.reads_per_second, burst_seconds=READS_BURST_SECONDS)
        try:
            self.reader = PrefixIndexReader(url=settings.redis_url, hash_seed=settings.hash_seed, tracks=True)
            self.quota_link = RedisLink(settings.redis_url)  # to a master, always: lookups may lead to a replica
        except RedisUrlError as error:
            raise ConfigError(f"--redis: {error}") from error
        self.shared: SharedState | None = None
        if settings.shares_load:
            self.shared = SharedState(
                url=settings.redis_url,
                bookings=self.own_bookings,
                heard=self._heard,
                settings=SharedStateSettings(timeout_seconds=settings.index_timeout_seconds),
            )

    @property
    def name(self) -> str:
        """Return the picker's name among the replicas, and in what it shows."""
        return self.shared.replica if self.shared is not None else f"{socket.gethostname()}:{os.getpid()}"

    def share_of(self, pool: str, *, session_ttl_seconds: float) -> PoolShare | None:
        """Return the pool's part of what the replicas share; None where nothing is shared."""
        if self.shared is None:
            return None
        seed = pool_seed(self.settings.hash_seed, pool)
        return PoolShare(self.shared, hash_seed=seed, session_ttl_seconds=session_ttl_seconds)

    def load_tokenizers(self, models: Iterable[ServedModel]) -> None:
        """Load the tokenizers that flags name, before requests come. Raise ConfigError where one cannot be used."""
        for model in models:
            if model.tokens_from is TokensFrom.TOKENIZER:
                try:
                    self.tokenizers.get(model)
                except PromptTokensError as error:
                    raise ConfigError(str(error)) from error

    async def look_at_index(self) -> None:
        """Connect to the index and read whose it is, which the first pick has no time for; a slow one is left alone."""
        with suppress(IndexUnavailableError, TimeoutError):
            async with asyncio.timeout(INDEX_SECONDS):
                await self.reader.sources()

    def other_replicas(self) -> int:
        """Return how many other replicas were heard last."""
        return self.shared.replicas if self.shared is not None else 0

    def others(self) -> Mapping[str, EndpointBookings] | None:
        """Return what the other replicas have booked, as they last told."""
        return self.shared.others if self.shared is not None else None

    def own_bookings(self) -> Mapping[str, EndpointBookings]:
        """Return what is open here by endpoint, of all pools."""
        return add_bookings(books.own_bookings() for books in self.books.values() if books.open_requests)

    async def close(self) -> None:
        """Close what is shared, once all pools are closed."""
        if self.records is not None:
            await self.records.close()
        await self.quota_link.close()
        await self.reader.close()
        if self.shared is not None:
            await self.shared.close()
        self.long_work.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)  # its last export may take a while

    def _heard(self) -> None:
        for books in self.books.values():
            books.changed()


def _nobody_scales() -> None:
    pass


def _records(settings: PickerSettings) -> "RequestRecords | None":
    if not settings.observation.writes:
        return None
    from extproc.records.write_records import RequestRecords  # noqa: PLC0415 - nothing of it is needed where it is off

    return RequestRecords(settings.observation, redis_url=settings.redis_url)


def _tracing(otlp_endpoint: str | None, *, share: float) -> "ExchangeTraces | None":
    if otlp_endpoint is None:
        return None
    try:
        from extproc.records.tracing import ExchangeTraces  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise ConfigError(f"--otlp-endpoint needs: pip install 'kvmesh[otel]' ({error})") from error
    return ExchangeTraces(otlp_endpoint=otlp_endpoint, share=share)
