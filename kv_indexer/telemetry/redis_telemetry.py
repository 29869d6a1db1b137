"""What Redis says of itself: memory, keys, evictions, clients. Asked every few seconds, for the indexer's metrics.

INFO is asked over a connection of its own, which managed servers allow. The answer is of the server that holds the
index: all its keys are in one place, also in a cluster.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from kv_indexer.telemetry import metrics
from kvmesh.errors import IndexUnavailableError
from kvmesh.metrics.metric import Metric
from kvmesh.redis.address import RedisAccess
from kvmesh.redis.link import RedisLink

log = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
# metric -> field of the answer, https://redis.io/docs/latest/commands/info/
FIELDS: Mapping[Metric, str] = {
    metrics.REDIS_MEMORY: "used_memory",
    metrics.REDIS_MEMORY_PEAK: "used_memory_peak",
    metrics.REDIS_MEMORY_LIMIT: "maxmemory",
    metrics.REDIS_FRAGMENTATION: "mem_fragmentation_ratio",
    metrics.REDIS_EVICTED: "evicted_keys",
    metrics.REDIS_OPERATIONS: "total_commands_processed",
    metrics.REDIS_CLIENTS: "connected_clients",
    metrics.REDIS_TRACKED_KEYS: "tracking_total_keys",
    metrics.REDIS_REPLICAS: "connected_slaves",
}
REDIS_METRICS = (metrics.REDIS_KEYS, *FIELDS)

RedisFacts = Mapping[Metric, float]  # without those that this server does not show


def redis_facts(info: str) -> RedisFacts:
    """Read the answer to INFO; what is not there, or no number, is left out."""
    lines = dict(line.partition(":")[::2] for line in info.splitlines())
    facts = {metric: _number(lines.get(field)) for metric, field in FIELDS.items()}
    if "# Keyspace" in lines:
        databases = [text for name, text in lines.items() if name[:2] == "db" and name[2:].isdigit()]
        facts[metrics.REDIS_KEYS] = sum(map(_database_keys, databases))
    return {metric: value for metric, value in facts.items() if value is not None}


def _database_keys(text: str) -> float:
    fields = dict(part.partition("=")[::2] for part in text.split(","))
    return _number(fields.get("keys")) or 0.0


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


class RedisWatch:
    """Asks again and again. Raise RedisUrlError."""

    def __init__(
        self,
        *,
        url: RedisAccess | str,
        show: Callable[[RedisFacts | None, float], None],
        timeout_seconds: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`show` is called at every look with the facts (None: no answer) and the seconds that it took."""
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
            log.debug("Redis does not answer INFO: %s", error)
        self._show(facts, self._clock() - began)
        return LOOK_SECONDS

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()
