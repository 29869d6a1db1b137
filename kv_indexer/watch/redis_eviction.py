"""Watches how Redis behaves when its memory is full: evicted keys would make the index lie. Run by the service.

Reads `INFO memory`, which managed servers allow, unlike CONFIG.
"""

import asyncio
import logging
from collections.abc import Callable

from kvmesh.errors import IndexUnavailableError
from kvmesh.redis.address import RedisAccess
from kvmesh.redis.link import RedisLink

log = logging.getLogger(__name__)

LOOK_SECONDS = 30.0
RETRY_SECONDS = 1.0
GOOD = "noeviction"
# https://redis.io/docs/latest/develop/reference/eviction/
KNOWN = frozenset(
    {GOOD, *(f"{keys}-{how}" for keys in ("allkeys", "volatile") for how in ("lru", "lfu", "random")), "volatile-ttl"}
)
UNKNOWN = "unknown"


def eviction_policy(info: str) -> str:
    """Return the policy in the answer to INFO memory; a strange one is `unknown`, so that a metric stays small."""
    lines = dict(line.partition(":")[::2] for line in info.splitlines())
    policy = lines.get("maxmemory_policy", UNKNOWN)
    return policy if policy in KNOWN else UNKNOWN


class EvictionWatch:
    """Warns once of a policy that is not `noeviction`, and says when it has been mended. Raise RedisUrlError."""

    def __init__(self, *, url: RedisAccess | str, show: Callable[[str], None], timeout_seconds: float = 2.0) -> None:
        """Take `show` to be told the policy at every look, or `unknown`."""
        self._link = RedisLink(url, reads_only=True)
        self._show = show
        self._timeout = timeout_seconds
        self._said = GOOD

    async def look(self) -> float:
        """Look once; return the seconds until the next time. Raises nothing that a Redis can cause."""
        try:
            async with asyncio.timeout(self._timeout):
                info = await self._link.call("INFO", "memory")
        except (IndexUnavailableError, TimeoutError) as error:
            log.debug("the eviction policy cannot be read: %s", error)
            self._show(UNKNOWN)
            return RETRY_SECONDS
        policy = eviction_policy(info.decode("utf-8", "replace") if isinstance(info, bytes) else "")
        self._show(policy)
        if policy != self._said:
            self._say(policy)
        return LOOK_SECONDS

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()

    def _say(self, policy: str) -> None:
        self._said = policy
        if policy == GOOD:
            log.info("Redis evicts no keys any more")
        elif policy == UNKNOWN:
            log.warning("Redis does not tell its eviction policy; see that it is %s", GOOD)
        else:
            log.warning(
                "Redis evicts keys when its memory is full (maxmemory-policy %s), which would make the index wrong: "
                "CONFIG SET maxmemory-policy %s, and give it enough memory (docs/redis.md says how much)",
                policy,
                GOOD,
            )
