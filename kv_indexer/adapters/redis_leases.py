"""The lease book in Redis: implements `ports.LeaseBook` with one script a beat. Used by the indexer alone.

Who takes what is decided in `lua/tick.lua`, atomically and by Redis' clock; `docs/redis.md` states the rule.
"""

import secrets
from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

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
        self._asked = _Asked()
        self._answer: list[Any] | None = None
        self._claims: Mapping[Stream, Claim] = {}  # that the answer gives

    def list_endpoints(self, endpoints: Collection[str]) -> None:
        """Take other endpoints from the next tick on; streams of those that no indexer lists any more are dropped."""
        self._endpoints = frozenset(endpoints)

    async def tick(self, candidates: AbstractSet[Stream]) -> Mapping[Stream, Claim]:
        """See `ports.LeaseBook`."""
        if self._asked.endpoints is not self._endpoints or self._asked.candidates != candidates:
            self._asked, self._answer = _asked(self._endpoints, candidates), None
        answer = await self._redis.run(
            TICK,
            self._indexer,
            round(self._lease_seconds * self._slowdown() * 1000),
            self._forget_ms,
            secrets.token_hex(8),
            round(HEARTBEAT_SECONDS * self._slowdown()),
            self._asked.endpoints_json,
            self._asked.candidates_json,
        )
        if answer != self._answer:
            streams, self._answer = self._asked.streams, answer
            held = {streams[name]: int(fence) for name, fence in zip(answer[::2], answer[1::2], strict=True)}
            self._claims = {stream: Claim(stream=stream, fence=fence) for stream, fence in held.items()}
        return self._claims

    async def drop(self, claim: Claim) -> None:
        """See `ports.LeaseBook`."""
        await self._redis.run_claimed(DROP_STREAM, claim)

    async def release(self) -> None:
        """See `ports.LeaseBook`."""
        await self._redis.run(RELEASE, self._indexer)

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a beat asks for, made once while it stays the same: there may be thousands of streams."""

    endpoints: frozenset[str] | None = None
    candidates: AbstractSet[Stream] = frozenset()
    streams: Mapping[bytes, Stream] = field(default_factory=dict)  # the candidates by name
    endpoints_json: bytes = b""
    candidates_json: bytes = b""


def _asked(endpoints: frozenset[str], candidates: AbstractSet[Stream]) -> _Asked:
    return _Asked(
        endpoints=endpoints,
        candidates=frozenset(candidates),
        streams={stream.name.encode(): stream for stream in candidates},
        endpoints_json=msgspec.json.encode(sorted(endpoints.union(stream.endpoint for stream in candidates))),
        candidates_json=msgspec.json.encode([(each.name, each.endpoint, each.dp_rank) for each in candidates]),
    )
