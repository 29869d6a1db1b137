"""Reads the index for pages: its sources, the indexers' findings, and the pods that hold given blocks.

It has its own connections, opened on demand, so that no lookup waits behind a page.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from kvmesh.blocks.block_keys import KEY_BYTES
from kvmesh.blocks.index_changes import tier_weight
from kvmesh.blocks.source import IndexStatus
from kvmesh.errors import IndexUnavailableError
from kvmesh.index.prefix_match import MatchTable, held_mask, match_table
from kvmesh.index.redis_findings import RedisFindings
from kvmesh.redis.keys import pack_mget, parse_registry
from kvmesh.redis.link import RedisLink
from kvmesh.redis.protocol import array_of
from kvmesh.redis.snapshot import read_snapshot

MOST_KEYS = 8192  # looked up for one page: about 5 ms of Redis
TURN_SECONDS = 0.002  # of the event loop
KEYS_AT_ONCE = 512  # in one MGET: a lookup waits behind no more than that
NO_HOLDERS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexLook:
    """A recent state of the index."""

    status: IndexStatus  # including the findings
    holders: Sequence[Mapping[str, str]] = ()  # for each key: endpoint -> its best tier with the block


class IndexView:
    """Reads for pages; any number of looks may run concurrently. Raise RedisUrlError."""

    def __init__(self, *, url: str, timeout_seconds: float = 1.0) -> None:
        self._link = RedisLink(url, reads_only=True)
        self._findings = RedisFindings(url=url, timeout_seconds=timeout_seconds)
        self._timeout_seconds = timeout_seconds
        self._table: MatchTable | None = None

    async def look(self, keys: bytes = b"", *, findings: bool = True) -> IndexLook:
        """Return the index's state, and the holders of these blocks (packed 8-byte keys; only the first `MOST_KEYS`).

        Sources and blocks are read one after the other: a pod that restarts in between may be shown without its blocks.
        Raise IndexUnavailableError.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                table = self._read(await read_snapshot(self._link.request))
                holders = await self._holders(keys[: MOST_KEYS * KEY_BYTES], table)
        except TimeoutError:
            raise IndexUnavailableError(f"Redis did not answer within {self._timeout_seconds:g} s") from None
        status = table.registry.status()
        if findings:
            status = await self._with_findings(status)
        return IndexLook(status=status, holders=holders)

    async def close(self) -> None:
        """Close the connections."""
        await self._link.close()
        await self._findings.close()

    async def _with_findings(self, status: IndexStatus) -> IndexStatus:
        """Add the indexers' findings; if only they cannot be read, report that among the unreadable records."""
        try:
            return replace(status, findings=await self._findings.read())
        except IndexUnavailableError as error:
            return replace(status, unreadable=(*status.unreadable, f"findings: {error}"))

    def _read(self, snapshot: tuple[list[Any], bool]) -> MatchTable:
        registry = parse_registry(*snapshot)
        if self._table is None or self._table.registry != registry:
            self._table = match_table(registry)
        return self._table

    async def _holders(self, keys: bytes, table: MatchTable) -> Sequence[Mapping[str, str]]:
        read = lru_cache(maxsize=1024)(lambda value: _holders_of(value, table))  # neighbours share holders
        found: list[Mapping[str, str]] = []
        began = time.monotonic()
        for at in range(0, len(keys), KEYS_AT_ONCE * KEY_BYTES):
            part = keys[at : at + KEYS_AT_ONCE * KEY_BYTES]
            (reply,) = await self._link.request(pack_mget(part), replies=1)
            for value in array_of(reply, len(part) // KEY_BYTES):
                found.append(NO_HOLDERS if value is None else read(value))
                if time.monotonic() - began >= TURN_SECONDS:  # a tenth of a millisecond each with 64 pods
                    await asyncio.sleep(0)
                    began = time.monotonic()
        return found


def _holders_of(value: bytes, table: MatchTable) -> Mapping[str, str]:
    held = held_mask(value, width=table.width)
    holders: dict[str, str] = {}
    for streams in table.masks.values():
        for stream in streams:
            tier = next((tier for tier, slots in stream.tiers if slots & held), None)
            if tier is not None:
                before = holders.get(stream.endpoint)
                holders[stream.endpoint] = tier if before is None else max(before, tier, key=tier_weight)
    return holders
