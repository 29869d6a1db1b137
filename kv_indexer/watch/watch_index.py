"""Watches the shared index: does Redis answer, is every record readable, does voided content wait for the sweep?

Every indexer watches, whatever it follows. It also warns if Redis may evict keys when its memory is full, which would
make the index wrong; for this it reads `INFO memory`, which managed servers allow, unlike CONFIG.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from math import inf

from kv_indexer.ports import IndexWriter
from kvmesh.blocks.source import Registry, Stream, StreamRecord
from kvmesh.errors import IndexUnavailableError
from kvmesh.redis.link import RedisCalls

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.5
SWEEP_FIELDS = 150  # per slice: about a millisecond of Redis
SWEEP_PAUSE = 4  # times the duration of the slice: lookups come first
LEAST_PAUSE_SECONDS = 0.004
NAMED_RECORDS = 5  # unreadable records that one log line names
CHECKED_AT_ONCE = 250  # streams whose records are compared without a pause; takes less than a millisecond

EVICTION_LOOK_SECONDS = 30.0
EVICTION_RETRY_SECONDS = 1.0
NO_EVICTION = "noeviction"
# https://redis.io/docs/latest/develop/reference/eviction/
EVICTION_POLICIES = frozenset(
    {
        NO_EVICTION,
        *(f"{keys}-{how}" for keys in ("allkeys", "volatile") for how in ("lru", "lfu", "random")),
        "volatile-ttl",
    }
)
UNKNOWN_POLICY = "unknown"

# (a stream's record, when it was requested) -> whether it is as expected
RecordCheck = Callable[[StreamRecord | None, float], bool]


class IndexWatch:
    """The state of the index as a whole."""

    def __init__(
        self,
        *,
        writer: IndexWriter,
        seen: Callable[[Collection[Stream]], None],
        clock: Callable[[], float] = time.monotonic,
        slowdown: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """`seen` is called with the streams of each new registry; `slowdown` returns a factor on the interval."""
        self.trouble = "not asked yet"  # why the index cannot be used, or ""
        self.registry = Registry(version=b"")  # the last one read
        self._writer = writer
        self._seen = seen
        self._clock = clock
        self._slowdown = slowdown
        self._records: dict[Stream, StreamRecord] = {}
        self._asked_at = -inf  # when the current registry was requested
        self._checks: dict[Stream, RecordCheck] = {}
        self._differing: set[Stream] = set()  # streams whose record differed from their follower's last write

    async def look(self) -> float:
        """Read the registry once; return the seconds until the next time."""
        asked_at = self._clock()
        try:
            registry = await self._writer.read_registry()
        except IndexUnavailableError as error:
            if self.trouble != str(error):
                log.error("Redis is unavailable, the index stands still: %s", error)
            self.trouble = str(error)
            return WATCH_SECONDS
        if self.trouble:
            log.info("Redis answers")
        self.trouble = ""
        self._log_unreadable(registry)
        self._asked_at = asked_at
        if registry is not self.registry:  # an unchanged registry is the same object
            self._records = {record.stream: record for record in registry.streams}
            self._seen(list(self._records))
            self.registry = registry
            await self._check_followers(tuple(self._checks))
        elif self._differing:  # they were busy then, and may sleep by now
            await self._check_followers(tuple(self._differing))
        return WATCH_SECONDS * self._slowdown()

    def owner(self, stream: Stream) -> str:
        """Return the indexer that followed the stream at the last read of the registry, or ''."""
        record = self._records.get(stream)
        return record.owner if record else ""

    def record(self, stream: Stream, max_age_seconds: float) -> StreamRecord | None:
        """Return the registry's record of a stream; None without one, or if the registry was read longer ago."""
        is_recent = self._clock() - self._asked_at <= max_age_seconds
        return self._records.get(stream) if is_recent else None

    @contextmanager
    def subscribe(self, stream: Stream, check: RecordCheck) -> Iterator[None]:
        """Call `check` with each new registry, so that thousands of quiet followers need not read it.

        As long as `check` reports a difference, it is called at each read.
        """
        self._checks[stream] = check
        try:
            yield
        finally:
            if self._checks.get(stream) is check:
                del self._checks[stream]
                self._differing.discard(stream)

    async def sweep(self) -> float:
        """Clean one slice of voided content; return the seconds until the next."""
        began = self._clock()
        try:
            if not await self._writer.sweep(fields=SWEEP_FIELDS):
                return WATCH_SECONDS
            return max((self._clock() - began) * SWEEP_PAUSE, LEAST_PAUSE_SECONDS)
        except IndexUnavailableError as error:
            log.debug("sweep waits: %s", error)
            return WATCH_SECONDS

    async def _check_followers(self, streams: Collection[Stream]) -> None:
        for number, stream in enumerate(streams, 1):
            check = self._checks.get(stream)
            if check is None or check(self._records.get(stream), self._asked_at):
                self._differing.discard(stream)
            else:
                self._differing.add(stream)
            if number % CHECKED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _log_unreadable(self, registry: Registry) -> None:
        before, now = frozenset(self.registry.unreadable), frozenset(registry.unreadable)
        fresh = sorted(now - before)
        if fresh:
            named = "; ".join(fresh[:NAMED_RECORDS])
            log.error("%d records in Redis cannot be read and are not believed: %s", len(fresh), named)
        if before and not now:
            log.info("all records in Redis can be read again")


def eviction_policy(info: str) -> str:
    """Return the policy in the answer to INFO memory; `unknown` for a strange one, so that a metric stays small."""
    lines = dict(line.partition(":")[::2] for line in info.splitlines())
    policy = lines.get("maxmemory_policy", UNKNOWN_POLICY)
    return policy if policy in EVICTION_POLICIES else UNKNOWN_POLICY


class EvictionWatch:
    """Warns once if the policy is not `noeviction`, and logs when it is again. Raise RedisUrlError."""

    def __init__(self, *, url: str, show: Callable[[str], None], timeout_seconds: float = 2.0) -> None:
        """`show` is called with the policy, or `unknown`, after each request."""
        self._redis = RedisCalls(url=url, timeout_seconds=timeout_seconds, reads_only=True)
        self._show = show
        self._said = NO_EVICTION

    async def look(self) -> float:
        """Ask once; return the seconds until the next time. Never raises because of Redis."""
        try:
            info = await self._redis.call("INFO", "memory")
        except IndexUnavailableError as error:
            log.debug("the eviction policy cannot be read: %s", error)
            self._show(UNKNOWN_POLICY)
            return EVICTION_RETRY_SECONDS
        policy = eviction_policy(info.decode("utf-8", "replace") if isinstance(info, bytes) else "")
        self._show(policy)
        if policy != self._said:
            self._say(policy)
        return EVICTION_LOOK_SECONDS

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.close()

    def _say(self, policy: str) -> None:
        self._said = policy
        if policy == NO_EVICTION:
            log.info("Redis evicts no keys any more")
        elif policy == UNKNOWN_POLICY:
            log.warning("Redis does not tell its eviction policy; see that it is %s", NO_EVICTION)
        else:
            log.warning(
                "Redis evicts keys when its memory is full (maxmemory-policy %s), which would make the index wrong: "
                "CONFIG SET maxmemory-policy %s, and give it enough memory (docs/reference/redis.md says how much)",
                policy,
                NO_EVICTION,
            )
