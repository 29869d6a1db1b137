"""Resources shared by all pools of one picker: Redis connections, bookings for other replicas, tokenizers, tracing.

Each pool registers its books here.
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
from extproc.ledger.ledger import DegradationLog, RequestWatch
from extproc.models.models import ServedModel, TokensFrom
from extproc.pods.scrape_pace import ScrapePace
from extproc.pools.picker_books import PickerBooks
from extproc.pools.plan_response import Pace
from extproc.prompts.prompt_tokens import TokenSettings
from extproc.prompts.tokenizer_cache import TokenizerCache
from extproc.requests.long_work import LongWork
from extproc.settings.config import PickerSettings
from extproc.shared.shared_load import EndpointBookings, add_bookings
from extproc.shared.shared_state import PoolShare, SharedState, SharedStateSettings
from kvmesh.documents.pools import pool_seed
from kvmesh.errors import IndexUnavailableError, RedisUrlError
from kvmesh.index.redis_reader import PrefixIndexReader
from kvmesh.pods.page_turns import PageTurns
from kvmesh.pods.pod_key import open_key
from kvmesh.redis.link import RedisLink

if TYPE_CHECKING:
    from extproc.ledger.tracing import ExchangeTraces
    from extproc.ledger.write_records import RequestRecords

log = logging.getLogger(__name__)

INDEX_SECONDS = 0.3  # for the first look at the index; a start waits for it
READS_PER_SECOND = 5.0  # of responses without streaming; reading one costs a fifth of a pick
READS_BURST_SECONDS = 20.0  # a burst may use the reads of this time


class SharedResources:
    """The shared resources. The constructor raises ConfigError for an invalid Redis address."""

    def __init__(self, settings: PickerSettings) -> None:
        self.settings = settings
        self.books: dict[str, PickerBooks] = {}  # pool -> its books
        self.degradations = DegradationLog()
        self.token_settings = TokenSettings()
        self.long_work = LongWork()
        self.waiting_bodies = WaitingBodies(most_bytes=settings.max_held_body_bytes)
        self.tell_scalers: Callable[[], None] = lambda: None  # called when the desired pods have changed
        self.tokenizers = TokenizerCache()
        self.scrape_pace = ScrapePace(rests=settings.follows_mesh)
        self.page_turns = PageTurns()
        self.pod_key = open_key(settings.pod_access)
        self.watch = RequestWatch()
        self.observers = self.watch.observers  # of requests; they add and remove themselves
        self.watch.traces = self.tracing = _tracing(settings.otlp_endpoint, share=settings.observation.trace_share)
        self.records = _records(settings)
        if self.records is not None:
            self.observers.append(self.records.log)
        self.reads = Pace(per_second=READS_PER_SECOND, burst_seconds=READS_BURST_SECONDS)
        try:
            self.reader = PrefixIndexReader(url=settings.redis_url, hash_seed=settings.hash_seed, tracks=True)
            self.quota_link = RedisLink(settings.redis_url)  # always to a master, whereas the reader may use a replica
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
        """The picker's name among the replicas and on its pages."""
        return self.shared.replica if self.shared is not None else f"{socket.gethostname()}:{os.getpid()}"

    def share_of(self, pool: str, *, session_ttl_seconds: float) -> PoolShare | None:
        """Return the pool's part of the state shared by the replicas, or None without sharing."""
        if self.shared is None:
            return None
        seed = pool_seed(self.settings.hash_seed, pool)
        return PoolShare(self.shared, hash_seed=seed, session_ttl_seconds=session_ttl_seconds)

    def load_tokenizers(self, models: Iterable[ServedModel]) -> None:
        """Load the tokenizers named by flags, before requests arrive. Raise ConfigError if one cannot be used."""
        for model in models:
            if model.tokens_from is TokensFrom.TOKENIZER:
                try:
                    self.tokenizers.get(model)
                except PromptTokensError as error:
                    raise ConfigError(str(error)) from error

    async def look_at_index(self) -> None:
        """Connect to the index and read its sources, for which the first pick has no time; give up if it is slow."""
        with suppress(IndexUnavailableError, TimeoutError):
            async with asyncio.timeout(INDEX_SECONDS):
                await self.reader.sources()

    def other_replicas(self) -> int:
        """Return the number of other replicas, as last heard."""
        return self.shared.replicas if self.shared is not None else 0

    def others(self) -> Mapping[str, EndpointBookings] | None:
        """Return the other replicas' bookings, as last heard, or None without sharing."""
        return self.shared.others if self.shared is not None else None

    def own_bookings(self) -> Mapping[str, EndpointBookings]:
        """Return this picker's open bookings of all pools, by endpoint."""
        return add_bookings(books.own_bookings() for books in self.books.values() if books.open_requests)

    async def close(self) -> None:
        """Close the shared resources; call it after all pools are closed."""
        await asyncio.sleep(0)  # for the facts of the last requests
        if self.records is not None:
            await self.records.close()
        await self.quota_link.close()
        await self.reader.close()
        if self.shared is not None:
            await self.shared.close()
        self.long_work.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)  # the last export may take a while

    def _heard(self) -> None:
        for books in self.books.values():
            books.changed()


def _records(settings: PickerSettings) -> "RequestRecords | None":
    if not settings.observation.writes:
        return None
    from extproc.ledger.write_records import RequestRecords  # noqa: PLC0415 - only needed if records are on

    return RequestRecords(settings.observation, redis_url=settings.redis_url)


def _tracing(otlp_endpoint: str | None, *, share: float) -> "ExchangeTraces | None":
    if otlp_endpoint is None:
        return None
    try:
        from extproc.ledger.tracing import ExchangeTraces  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise ConfigError(f"--otlp-endpoint needs: pip install 'kvmesh[otel]' ({error})") from error
    return ExchangeTraces(otlp_endpoint=otlp_endpoint, share=share)
