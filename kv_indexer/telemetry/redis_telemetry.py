"""Redis in the indexer's metrics: memory, keys, evictions, clients, and how long an answer takes. Run by the service.

Asks the server for INFO every few seconds over a connection of its own, which managed servers allow. What it says is of
the server that holds the index: all its keys are in one place, also in a cluster.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmesh.errors import IndexUnavailableError
from kvmesh.redis.address import RedisAccess
from kvmesh.redis.link import RedisLink

log = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
ROUND_TRIP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5)
NAME = "kvmesh_indexer_redis"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisFacts:
    """What Redis says of itself (https://redis.io/docs/latest/commands/info/); None: this server does not tell."""

    memory_bytes: float | None = None
    memory_peak_bytes: float | None = None
    memory_limit_bytes: float | None = None  # 0: none
    fragmentation_ratio: float | None = None
    keys: float | None = None  # of all its databases
    evicted_keys: float | None = None  # since it started, as the next one
    operations: float | None = None
    clients: float | None = None
    tracked_keys: float | None = None
    replicas: float | None = None


FIELDS: Mapping[str, str] = {
    "memory_bytes": "used_memory",
    "memory_peak_bytes": "used_memory_peak",
    "memory_limit_bytes": "maxmemory",
    "fragmentation_ratio": "mem_fragmentation_ratio",
    "evicted_keys": "evicted_keys",
    "operations": "total_commands_processed",
    "clients": "connected_clients",
    "tracked_keys": "tracking_total_keys",
    "replicas": "connected_slaves",
}


def redis_facts(info: str) -> RedisFacts:
    """Read the answer to INFO; what is not there, or no number, is None."""
    lines = dict(line.partition(":")[::2] for line in info.splitlines())
    databases = [_database_keys(text) for name, text in lines.items() if name[:2] == "db" and name[2:].isdigit()]
    keys = sum(databases) if "# Keyspace" in lines else None
    return RedisFacts(keys=keys, **{name: _number(lines.get(field)) for name, field in FIELDS.items()})


def _database_keys(text: str) -> float:
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name == "keys":
            return _number(number) or 0.0
    return 0.0


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


class FactDisplay(Protocol):
    """Who is told; see `RedisTelemetry.show`."""

    def __call__(self, facts: RedisFacts | None, *, seconds: float) -> None:
        """Show them; None: no answer."""


class RedisWatch:
    """Asks again and again. Raise RedisUrlError."""

    def __init__(
        self,
        *,
        url: RedisAccess | str,
        show: FactDisplay,
        timeout_seconds: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`show` is told at every look."""
        self._link = RedisLink(url, reads_only=True)
        self._show = show
        self._timeout_seconds = timeout_seconds
        self._clock = clock

    async def look(self) -> float:
        """Look once; return the seconds until the next time. Raises nothing that a Redis can cause."""
        facts, began = None, self._clock()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                answer = await self._link.call("INFO")
            facts = redis_facts(answer.decode("utf-8", "replace") if isinstance(answer, bytes) else "")
        except (IndexUnavailableError, TimeoutError) as error:
            log.debug("Redis does not tell of itself: %s", error)
        self._show(facts, seconds=self._clock() - began)
        return LOOK_SECONDS

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()


class RedisTelemetry(Collector):
    """Shows the last facts; nothing while there are none."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._facts: RedisFacts | None = None
        self._round_trips = Histogram(
            f"{NAME}_round_trip_seconds",
            "Time until Redis had answered INFO, from the indexer.",
            buckets=ROUND_TRIP_SECONDS,
            registry=registry,
        )
        self._failures = Counter(
            f"{NAME}_probe_failures", "Times that Redis did not answer INFO, or not in time.", registry=registry
        )
        registry.register(self)

    def show(self, facts: RedisFacts | None, *, seconds: float) -> None:
        """Take the facts, or note that none came; old ones are no facts."""
        self._facts = facts
        if facts is None:
            self._failures.inc()
        else:
            self._round_trips.observe(seconds)

    def describe(self) -> Iterator[Metric]:
        """Yield the names."""
        yield from _families().values()

    def collect(self) -> Iterator[Metric]:
        """Yield what is known."""
        families = _families()
        for field in fields(RedisFacts):
            value = getattr(self._facts, field.name) if self._facts is not None else None
            if value is not None:
                families[field.name].add_metric((), value)
        yield from families.values()


def _families() -> Mapping[str, GaugeMetricFamily | CounterMetricFamily]:
    def gauge(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{NAME}_{name}", text, labels=())

    def counter(name: str, text: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"{NAME}_{name}", text, labels=())

    return {
        "memory_bytes": gauge("memory_bytes", "Memory that Redis uses for data and itself (used_memory)."),
        "memory_peak_bytes": gauge("memory_peak_bytes", "The most memory that Redis has used."),
        "memory_limit_bytes": gauge("memory_limit_bytes", "Memory that Redis may use (maxmemory); 0: no limit."),
        "fragmentation_ratio": gauge(
            "fragmentation_ratio", "Memory that the system gave Redis, divided by what it uses."
        ),
        "keys": gauge("keys", "Keys in all of Redis' databases, ours and others'."),
        "evicted_keys": counter("evicted_keys", "Keys that Redis has evicted; any makes the index lie."),
        "operations": counter("operations", "Commands that Redis has processed, whoever sent them."),
        "clients": gauge("clients", "Connections to Redis."),
        "tracked_keys": gauge("tracked_keys", "Keys that Redis remembers to tell pickers of, some 140 bytes each."),
        "replicas": gauge("replicas", "Replicas that follow Redis."),
    }
