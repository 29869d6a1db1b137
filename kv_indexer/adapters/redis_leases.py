"""The lease book in Redis: implements `ports.LeaseBook` with one script a beat. Used by the indexer alone.

Who takes what is decided in `lua/tick.lua`, atomically and by Redis' clock; `docs/redis.md` states the rule.
"""

import secrets
from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet

import msgspec

from kv_indexer.adapters.redis_address import RedisAccess
from kv_indexer.adapters.redis_calls import RedisCalls
from kv_indexer.adapters.redis_scripts import DROP_STREAM, RELEASE, TICK
from kv_indexer.core.source import Claim, Stream

HEARTBEAT_SECONDS = 5  # without one for so long, readers take the indexer for dead


class RedisLeaseBook:
    """One indexer's leases. Raise RedisUrlError."""

    def __init__(
        self,
        *,
        url: RedisAccess | str,
        indexer: str,
        endpoints: Collection[str],
        lease_seconds: float = 2.0,
        forget_seconds: float = 5.0,
        timeout_seconds: float = 1.0,
        slowdown: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """Take the `endpoints` that this indexer is responsible for, found or not.

        A stream whose endpoint no indexer has listed for `forget_seconds` after its lease is dropped. The timeout is
        shorter than the lease, so that one lost answer does not cost it. `slowdown` says how much longer a lease lasts
        than `lease_seconds`: renewing thousands holds Redis up.
        """
        self._redis = RedisCalls(url=url, timeout_seconds=timeout_seconds)
        self._indexer = indexer
        self._endpoints = frozenset(endpoints)
        self._lease_seconds = lease_seconds
        self._slowdown = slowdown
        self._forget_ms = round(forget_seconds * 1000)

    def list_endpoints(self, endpoints: Collection[str]) -> None:
        """Take other endpoints from the next tick on; streams of those that no indexer lists any more are dropped."""
        self._endpoints = frozenset(endpoints)

    async def tick(self, candidates: AbstractSet[Stream]) -> Mapping[Stream, Claim]:
        """See `ports.LeaseBook`."""
        streams = {stream.name.encode(): stream for stream in candidates}
        endpoints = sorted(self._endpoints.union(stream.endpoint for stream in candidates))
        answer = await self._redis.run(
            TICK,
            self._indexer,
            round(self._lease_seconds * self._slowdown() * 1000),
            self._forget_ms,
            secrets.token_hex(8),
            round(HEARTBEAT_SECONDS * self._slowdown()),
            msgspec.json.encode(endpoints),
            msgspec.json.encode([(stream.name, stream.endpoint, stream.dp_rank) for stream in candidates]),
        )
        held = {streams[name]: int(fence) for name, fence in zip(answer[::2], answer[1::2], strict=True)}
        return {stream: Claim(stream=stream, fence=fence) for stream, fence in held.items()}

    async def drop(self, claim: Claim) -> None:
        """See `ports.LeaseBook`."""
        await self._redis.run_claimed(DROP_STREAM, claim)

    async def release(self) -> None:
        """See `ports.LeaseBook`."""
        await self._redis.run(RELEASE, self._indexer)

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.close()
