"""The index in Redis, read by the picker once a request. Exported by `kv_indexer.api`; writes nothing.

A lookup is plain commands in one round trip: the registry's version, one MGET, the version again. Plain commands cost
Redis a third of what a script does, and no more on this side (`docs/decisions/0001-redis-lookup.md`). Equal versions
before and after make the answer consistent without MULTI, which Redis refuses even for reads when its memory is full.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kv_indexer.adapters.redis_address import RedisAccess
from kv_indexer.adapters.redis_link import RedisLink, checked, pack
from kv_indexer.adapters.redis_snapshot import READ_AT_ONCE, read_registry_of, read_snapshot
from kv_indexer.core.block_keys import KEY_BYTES, TOKEN_BYTES, BlockExtras, block_keys
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
from kv_indexer.core.source import IndexStatus, SourceStatus
from kv_indexer.errors import IndexUnavailableError
from kv_indexer.wire.redis_keys import REGISTRY, pack_mget, parse_version

SNAPSHOT_MAX_AGE_SECONDS = 1.0  # counts and the indexer's heartbeat may be this old; slots and states never are
CONFLICT_LIMIT = 4  # a registry that changes between all round trips is not worth waiting for

_VERSION = pack("HMGET", REGISTRY, "nonce", "version")


class PrefixIndexReader:
    """Answers who holds a prompt's beginning; any number of lookups may run at a time. Raise RedisUrlError."""

    def __init__(self, *, url: RedisAccess | str, hash_seed: str) -> None:
        self.hash_seed = hash_seed
        self._link = RedisLink(url, reads_only=True)
        self._known = KnownBlockKeys()
        self._hints = DepthHints()
        self._table: MatchTable | None = None
        self._snapshot: tuple[list[Any], bool] | None = None  # that the table was made of
        self._read_at = 0.0  # loop time
        self._refreshing: asyncio.Task[MatchTable] | None = None

    async def lookup(
        self,
        tokens: bytes,
        *,
        root: bytes,
        extra: BlockExtras | None = None,
        also: bytes = b"",
        also_replies: int = 0,
        also_told: Callable[[Sequence[Any]], None] | None = None,
    ) -> PrefixLookup:
        """Return each endpoint's longest cached prefix of a prompt.

        `tokens` is a buffer of little-endian uint32, `root` comes from `root_key`. A match never covers the last token:
        vLLM computes at least that one anew. One round trip for a prompt that is cold or was seen before, two
        or more for one that only others have seen. Set a deadline: cancelling leaves the reader usable.
        `also` are packed commands of the caller that go along in the first round trip, on keys with our hash tag; what
        Redis answers to them (`also_replies` values) is in the result as it is, and told to `also_told` as soon as it
        is there: they have been carried out, whatever becomes of the lookup.
        Raise IndexUnavailableError.
        """
        usable = tokens[: usable_tokens(tokens) * TOKEN_BYTES]
        passed = _PassedThrough(commands=also, replies=also_replies, told=also_told)
        for _ in range(CONFLICT_LIMIT):
            table = await self._current_table()
            keys = {size: self._keys(usable, size, root, extra) for size in table.masks}
            walks = await self._walk(keys, table, passed)
            if walks is not None:
                return prefix_lookup(table, walks, keys=_WholeKeys(keys), also=passed.got)
            self._table = None
        raise IndexUnavailableError("the sources changed during each of several attempts")

    def block_keys(self, tokens: bytes, *, root: bytes, block_size: int) -> bytes:
        """Return the packed keys of a prompt's usable blocks, for whoever must go on without an answer."""
        usable = tokens[: usable_tokens(tokens) * TOKEN_BYTES]
        return self._known.keys(usable, block_size=block_size, parent=root)

    async def sources(self) -> list[SourceStatus]:
        """Return the state of every source, freshly read. Raise IndexUnavailableError."""
        return (await self._refresh()).registry.sources()

    async def status(self) -> IndexStatus:
        """Return the sources, whether an indexer is alive, and what could not be read. Raise IndexUnavailableError."""
        return (await self._refresh()).registry.status()

    async def close(self) -> None:
        """Close the connection."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])
        await self._link.close()

    async def _current_table(self) -> MatchTable:
        now = asyncio.get_running_loop().time()
        table, has_failed = self._table, _has_failed(self._refreshing)
        if table is not None:
            if now - self._read_at <= SNAPSHOT_MAX_AGE_SECONDS:
                return table
            self._read_at = now  # lookups that run meanwhile keep the old one instead of asking too
        # with thousands of streams it takes longer than a lookup may: who comes after the deadline finds it done
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh(), name="index-registry")
            self._refreshing.add_done_callback(_mark_seen)
        if table is not None and not has_failed and _is_large(table):
            return table  # that its slots and states are as they were is compared in any case
        return await asyncio.shield(self._refreshing)

    async def _refresh(self) -> MatchTable:
        snapshot = await read_snapshot(self._ask)
        if self._table is None or snapshot != self._snapshot:
            registry = read_registry_of(snapshot)
            if self._table is None or self._table.registry != registry:
                self._table = match_table(registry)
            self._snapshot = snapshot
        self._read_at = asyncio.get_running_loop().time()
        return self._table

    async def _ask(self, commands: bytes, replies: int) -> list[Any]:
        return await self._link.request(commands, replies=replies)

    def _keys(
        self, tokens: bytes, block_size: int, root: bytes, extra: BlockExtras | None
    ) -> "PromptKeys | _ComputedKeys":
        more = extra(block_size) if extra is not None else None
        if more is None:
            return PromptKeys(self._known, tokens, block_size=block_size, parent=root)
        # what is remembered goes by tokens alone
        return _ComputedKeys(block_keys(tokens, block_size=block_size, parent=root, extra=more))

    async def _walk(
        self, keys: "_KeysBySize", table: MatchTable, passed: "_PassedThrough"
    ) -> dict[int, PrefixWalk] | None:
        """Walk each block size in growing chunks, while anyone holds every block; None if the registry has changed."""
        walks = {size: PrefixWalk(streams, width=table.width) for size, streams in table.masks.items()}
        wanted = {size: self._first_keys(prompt) for size, prompt in keys.items() if prompt.blocks}
        asked = dict.fromkeys(keys, 0)  # blocks
        while True:  # at least once: with no source yet, the version tells whether there are any now
            version, answers = await self._read(list(wanted.values()), passed)
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

    def _first_keys(self, prompt: "PromptKeys | _ComputedKeys") -> bytes:
        # who has asked deeper before has computed the keys up to there, so what was never seen needs no hint
        count = self._hints.first_chunk(prompt.reach_unknown(), blocks=prompt.blocks)
        return prompt.reach(count)[: count * KEY_BYTES]

    async def _read(self, chunks: list[bytes], passed: "_PassedThrough") -> tuple[bytes | None, list[list[Run]]]:
        """Read the chunks' values and the version that holds for all of them; None if it changed in between."""
        more, more_replies = passed.pending()
        commands = b"".join([_VERSION, *map(pack_mget, chunks), _VERSION, more])
        counts = [len(chunk) // KEY_BYTES for chunk in chunks]
        replies = await self._link.request(commands, replies=len(chunks) + 2 + more_replies)
        if more_replies:
            passed.took(replies[-more_replies:])
            del replies[-more_replies:]
        before, after = _array(replies[0], 2), _array(replies[-1], 2)
        runs = [runs_of(_array(reply, count)) for reply, count in zip(replies[1:-1], counts, strict=True)]
        return parse_version(before) if before == after else None, runs


@dataclass(frozen=True, slots=True)
class _ComputedKeys:
    """The keys of one prompt, all at hand; beside `PromptKeys`, whose methods see there."""

    packed: bytes

    @property
    def blocks(self) -> int:
        return len(self.packed) // KEY_BYTES

    def reach(self, _: int) -> bytes:
        return self.packed

    def reach_unknown(self) -> bytes:
        return self.packed


_KeysBySize = Mapping[int, PromptKeys | _ComputedKeys]


class _WholeKeys(Mapping[int, bytes]):
    """The packed keys of whole prompts, computed when somebody looks: few callers do."""

    def __init__(self, keys: _KeysBySize) -> None:
        self._keys = keys

    def __getitem__(self, block_size: int) -> bytes:
        prompt = self._keys[block_size]
        return prompt.reach(prompt.blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


@dataclass(slots=True, kw_only=True)
class _PassedThrough:
    """A caller's own commands, until they have been answered."""

    commands: bytes
    replies: int
    told: Callable[[Sequence[Any]], None] | None
    got: Sequence[Any] = ()

    def took(self, replies: Sequence[Any]) -> None:
        self.got = replies
        if self.told is not None:
            self.told(replies)

    def pending(self) -> tuple[bytes, int]:
        return (b"", 0) if self.got else (self.commands, self.replies)


def _mark_seen(task: "asyncio.Task[MatchTable]") -> None:
    # one that failed after its callers have given up is no news to anyone
    if not task.cancelled():
        task.exception()


def _has_failed(task: "asyncio.Task[MatchTable] | None") -> bool:
    return task is not None and task.done() and (task.cancelled() or task.exception() is not None)


def _is_large(table: MatchTable) -> bool:
    return len(table.registry.streams) + len(table.registry.slots) > READ_AT_ONCE


def _array(reply: Any, length: int) -> list[Any]:
    array = checked(reply)
    if not isinstance(array, list) or len(array) != length:
        raise IndexUnavailableError("Redis answers something else than was asked; perhaps it is a proxy or no Redis")
    return array
