"""The index in Redis, read by the picker once a request. Exported by `kv_indexer.api`; writes nothing.

A lookup is plain commands in one round trip: the registry's version, one MGET, the version again. Plain commands cost
Redis a third of what a script does, and no more on this side (`docs/decisions/0001-redis-lookup.md`). Equal versions
before and after make the answer consistent without MULTI, which Redis refuses even for reads when its memory is full.
"""

import asyncio
from typing import Any

from kv_indexer.adapters.redis_address import RedisAccess
from kv_indexer.adapters.redis_link import RedisLink, checked, pack
from kv_indexer.adapters.redis_scripts import SNAPSHOT
from kv_indexer.core.block_keys import KEY_BYTES, TOKEN_BYTES
from kv_indexer.core.known_keys import KnownBlockKeys, PromptKeys
from kv_indexer.core.prefix_depth import DepthHints, next_chunk
from kv_indexer.core.prefix_match import (
    MatchTable,
    PrefixLookup,
    PrefixWalk,
    Run,
    match_table,
    prefix_lookup,
    runs_of,
    usable_tokens,
)
from kv_indexer.core.source import IndexStatus, Registry, SourceStatus
from kv_indexer.errors import IndexUnavailableError
from kv_indexer.wire.redis_keys import PREFIX, REGISTRY, SNAPSHOT_PARTS, pack_mget, parse_registry, parse_version

SNAPSHOT_MAX_AGE_SECONDS = 1.0  # counts and the indexer's heartbeat may be this old; slots and states never are
CONFLICT_LIMIT = 4  # a registry that changes between all round trips is not worth waiting for

_VERSION = pack("HMGET", REGISTRY, "nonce", "version")
_SNAPSHOT = pack("EVAL", SNAPSHOT.source, 1, PREFIX)


class PrefixIndexReader:
    """Answers who holds a prompt's beginning; any number of lookups may run at a time. Raise RedisUrlError."""

    def __init__(self, *, url: RedisAccess | str, hash_seed: str) -> None:
        self.hash_seed = hash_seed
        self._link = RedisLink(url, reads_only=True)
        self._known = KnownBlockKeys()
        self._hints = DepthHints()
        self._table: MatchTable | None = None
        self._read_at = 0.0  # loop time

    async def lookup(self, tokens: bytes, *, root: bytes) -> PrefixLookup:
        """Return each endpoint's longest cached prefix of a prompt.

        `tokens` is a buffer of little-endian uint32, `root` comes from `root_key`. A match never covers the last token:
        vLLM computes at least that one anew. One round trip for a prompt that is cold or was seen before, two
        or more for one that only others have seen. Set a deadline: cancelling leaves the reader usable.
        Raise IndexUnavailableError.
        """
        usable = tokens[: usable_tokens(tokens) * TOKEN_BYTES]
        for _ in range(CONFLICT_LIMIT):
            table = await self._current_table()
            keys = {size: PromptKeys(self._known, usable, block_size=size, parent=root) for size in table.masks}
            walks = await self._walk(keys, table)
            if walks is not None:
                return prefix_lookup(table, walks)
            self._table = None
        raise IndexUnavailableError("the sources changed during each of several attempts")

    async def sources(self) -> list[SourceStatus]:
        """Return the state of every source, freshly read. Raise IndexUnavailableError."""
        return (await self._refresh()).registry.sources()

    async def status(self) -> IndexStatus:
        """Return the sources, whether an indexer is alive, and what could not be read. Raise IndexUnavailableError."""
        return (await self._refresh()).registry.status()

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()

    async def _current_table(self) -> MatchTable:
        now = asyncio.get_running_loop().time()
        if self._table is not None:
            if now - self._read_at <= SNAPSHOT_MAX_AGE_SECONDS:
                return self._table
            self._read_at = now  # lookups that run meanwhile keep the old one instead of asking too
        return await self._refresh()

    async def _refresh(self) -> MatchTable:
        (reply,) = await self._link.request(_SNAPSHOT, replies=1)
        registry: Registry = parse_registry(_array(reply, SNAPSHOT_PARTS))
        if self._table is None or self._table.registry != registry:
            self._table = match_table(registry)
        self._read_at = asyncio.get_running_loop().time()
        return self._table

    async def _walk(self, keys: dict[int, PromptKeys], table: MatchTable) -> dict[int, PrefixWalk] | None:
        """Walk each block size in growing chunks, while anyone holds every block; None if the registry has changed."""
        walks = {size: PrefixWalk(streams, width=table.width) for size, streams in table.masks.items()}
        wanted = {size: self._first_keys(prompt) for size, prompt in keys.items() if prompt.blocks}
        asked = dict.fromkeys(keys, 0)  # blocks
        while True:  # at least once: with no source yet, the version tells whether there are any now
            version, answers = await self._read(list(wanted.values()))
            if version != table.registry.version:
                return None
            following: dict[int, bytes] = {}
            for size, runs in zip(wanted, answers, strict=True):
                count = len(wanted[size]) // KEY_BYTES
                asked[size] += count
                if walks[size].feed(runs) and asked[size] < keys[size].blocks:
                    end = asked[size] + next_chunk(count)
                    following[size] = keys[size].reach(end)[asked[size] * KEY_BYTES : end * KEY_BYTES]
            if not following:
                break
            wanted = following
        for size, walk in walks.items():
            if walk.blocks:  # of a cold prompt, nothing more is computed than was asked for
                self._hints.learn(keys[size].reach(keys[size].blocks), matched=walk.blocks)
        return walks

    def _first_keys(self, prompt: PromptKeys) -> bytes:
        # who has asked deeper before has computed the keys up to there, so what was never seen needs no hint
        count = self._hints.first_chunk(prompt.reach_unknown(), blocks=prompt.blocks)
        return prompt.reach(count)[: count * KEY_BYTES]

    async def _read(self, chunks: list[bytes]) -> tuple[bytes | None, list[list[Run]]]:
        """Read the chunks' values and the version that holds for all of them; None if it changed in between."""
        commands = b"".join([_VERSION, *map(pack_mget, chunks), _VERSION])
        counts = [len(chunk) // KEY_BYTES for chunk in chunks]
        replies = await self._link.request(commands, replies=len(chunks) + 2)
        before, after = _array(replies[0], 2), _array(replies[-1], 2)
        runs = [runs_of(_array(reply, count)) for reply, count in zip(replies[1:-1], counts, strict=True)]
        return parse_version(before) if before == after else None, runs


def _array(reply: Any, length: int) -> list[Any]:
    array = checked(reply)
    if not isinstance(array, list) or len(array) != length:
        raise IndexUnavailableError("Redis answers something else than was asked; perhaps it is a proxy or no Redis")
    return array
