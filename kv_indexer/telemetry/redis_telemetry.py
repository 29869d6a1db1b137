"""Reads Redis' own statistics every few seconds for the indexer's metrics: memory, keys, evictions.

INFO, which managed servers allow, is asked over a separate connection. The answer comes from the server that holds the
index: all keys are in one place, even in a cluster.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from kv_indexer.telemetry import metrics
from kvmesh.errors import IndexUnavailableError
from kvmesh.metrics.metric import Metric
from kvmesh.redis.link import RedisLink

log = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
# metric -> field of the answer, https://redis.io/docs/latest/commands/info/
FIELDS: Mapping[Metric, str] = {
    metrics.REDIS_MEMORY: "used_memory",
    metrics.REDIS_MEMORY_LIMIT: "maxmemory",
    metrics.REDIS_EVICTED: "evicted_keys",
    metrics.REDIS_TRACKED_KEYS: "tracking_total_keys",
}
REDIS_METRICS = (metrics.REDIS_KEYS, *FIELDS)

RedisFacts = Mapping[Metric, float]  # without the facts that this server does not report


def redis_facts(info: str) -> RedisFacts:
    """Read the answer to INFO; missing and non-numeric fields are left out."""
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
    """Asks repeatedly. Raise RedisUrlError."""

    def __init__(
        self,
        *,
        url: str,
        show: Callable[[RedisFacts | None, float], None],
        timeout_seconds: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`show` gets the facts of each request (None without an answer) and the response time in seconds."""
        self._link = RedisLink(url, reads_only=True)
        self._show = show
        self._timeout_seconds = timeout_seconds
        self._clock = clock

    async def look(self) -> float:
        """Ask once; return the seconds until the next time. Never raises because of Redis."""
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
