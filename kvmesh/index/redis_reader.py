"""The index in Redis, read by the picker once per request. Writes nothing.

A lookup is plain commands in one round trip: the registry's version, one MGET, the version again. Plain commands cost
Redis a third of a script, and no more on our side (`docs/decisions/0001-redis-lookup.md`). Equal versions before and
after make the answer consistent without MULTI, which Redis refuses even for reads when its memory is full. For a prefix
that `tracking_link` knows by that version, only the rest of the prompt is asked for; changes of its holders since
Redis' last report may still be on their way (`docs/decisions/0006-tracked-blocks.md`).
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvmesh.blocks.block_keys import (
    FIRST_BATCH,
    KEY_BYTES,
    LARGEST_BATCH,
    TOKEN_BYTES,
    BlockExtras,
    DepthHints,
    KnownBlockKeys,
    PromptKeys,
    block_keys,
    next_batch,
)
from kvmesh.blocks.source import IndexStatus, SourceStatus
from kvmesh.errors import IndexUnavailableError
from kvmesh.index.group_match import HeldRun
from kvmesh.index.prefix_match import (
    NO_RUNS,
    MatchTable,
    PrefixLookup,
    PrefixWalk,
    Run,
    held_runs,
    match_table,
    prefix_lookup,
    runs_of,
    usable_tokens,
)
from kvmesh.index.tracking_link import TrackingLink
from kvmesh.redis.keys import pack_mget, parse_registry, parse_version
from kvmesh.redis.link import RedisLink, mark_seen, pack
from kvmesh.redis.protocol import RedisProtocol, array_of, run_id
from kvmesh.redis.snapshot import ASK_VERSION, READ_AT_ONCE, read_snapshot

SNAPSHOT_MAX_AGE_SECONDS = 1.0  # counts and the indexer's heartbeat may be this old; slots and states never are
CONFLICT_LIMIT = 4  # attempts before a lookup fails because the registry changes between all round trips
ASKED_BYTES = LARGEST_BATCH * KEY_BYTES  # of one MGET for groups of another block size

_WHO = pack("INFO", "server")


class PrefixIndexReader:
    """Finds the holders of a prompt's beginning; any number of lookups may run concurrently. Raise RedisUrlError."""

    def __init__(self, *, url: str, hash_seed: str, tracks: bool = False) -> None:
        """`tracks`: let Redis report changes to recurring prefixes, and ask only for the rest."""
        self.hash_seed = hash_seed
        self.known_blocks = self.asked_blocks = 0  # in all lookups: known without asking, and asked for
        self._tracking = TrackingLink(url) if tracks else None
        self._link = RedisLink(url, reads_only=True, greet=self._greet if tracks else None)
        self._known = KnownBlockKeys()
        self._hints = DepthHints()
        self._table: MatchTable | None = None
        self._snapshot: tuple[list[Any], bool] | None = None  # the table's source
        self._read_at = 0.0  # loop time
        self._version_reply: list[Any] = []  # the last one, and the version in it
        self._version = b""
        self._learns: list[_Search] = []  # lookups that the hints must learn before the next one
        self._refreshing: asyncio.Task[MatchTable] | None = None

    async def lookup(
        self,
        tokens: bytes,
        *,
        root: bytes,
        extra: BlockExtras | None = None,
        also: bytes = b"",
        also_replies: int = 0,
        on_replies: Callable[[Sequence[Any]], None] | None = None,
    ) -> PrefixLookup:
        """Return each endpoint's longest cached prefix of a prompt.

        `tokens` is a buffer of little-endian uint32, `root` comes from `root_key`. A match never covers the last token:
        vLLM recomputes at least that one. It takes one round trip for a prompt that is cold or was seen before, two or
        more for one that only others have seen. Set a deadline: cancelling leaves the reader usable.

        `also` are packed commands of the caller that are sent with the first round trip, on keys with our hash tag.
        Redis' answers to them (`also_replies` values) are in the result unchanged, and given to `on_replies` as soon as
        they arrive: the commands have been executed, even if the lookup fails. Raise IndexUnavailableError.
        """
        usable = usable_tokens(tokens)
        passed = _PassedThrough(also, also_replies, on_replies) if also_replies else NOTHING_PASSED
        if self._learns:
            self._learn()
        for _ in range(CONFLICT_LIMIT):
            table = self._table
            if table is None or asyncio.get_running_loop().time() - self._read_at > SNAPSHOT_MAX_AGE_SECONDS:
                table = await self._current_table()
            searches = [
                _Search(
                    size,
                    PrefixWalk(streams, width=table.width, has_groups=size in table.grouped),
                    self._keys(tokens, usable, size, root, extra),
                )
                for size, streams in table.masks.items()
            ]
            if await self._walk(searches, table, passed):
                apart: Mapping[int, Sequence[HeldRun]] | None = NO_RUNS
                if table.apart:
                    of_size = {size: self._keys(tokens, usable, size, root, extra) for size in table.apart}
                    apart = await self._read_apart(searches, of_size, table, passed)
                if apart is not None:
                    walks = {search.block_size: search.walk for search in searches}
                    keys = {search.block_size: search.keys.reach(search.keys.blocks) for search in searches}
                    return prefix_lookup(table, walks, keys=keys, apart=apart, also=passed.got)
            self._table = None
        raise IndexUnavailableError("the sources changed during each of several attempts")

    def block_keys(self, tokens: bytes, *, root: bytes, block_size: int) -> bytes:
        """Return the packed keys of a prompt's usable blocks, for a caller that must continue without an answer."""
        usable = tokens[: usable_tokens(tokens) * TOKEN_BYTES]
        return self._known.keys(usable, block_size=block_size, parent=root)

    async def sources(self) -> list[SourceStatus]:
        """Return the state of every source, freshly read. Raise IndexUnavailableError."""
        return (await self._refresh()).registry.sources()

    async def status(self) -> IndexStatus:
        """Return the sources, whether an indexer is alive, and unreadable records. Raise IndexUnavailableError."""
        return (await self._refresh()).registry.status()

    @property
    def tracked_blocks(self) -> int:
        """Return how many blocks Redis reports changes of."""
        return self._tracking.tracked_blocks if self._tracking is not None else 0

    async def close(self) -> None:
        """Close the connections."""
        if self._tracking is not None:
            await self._tracking.close()
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
            self._read_at = now  # concurrent lookups keep the old one instead of asking as well
        # with thousands of streams it takes longer than a lookup may: later lookups find it done
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh(), name="index-registry")
            self._refreshing.add_done_callback(mark_seen)
        if table is not None and not has_failed and _is_large(table):
            return table  # each lookup checks in any case whether its slots and states are current
        return await asyncio.shield(self._refreshing)

    async def _refresh(self) -> MatchTable:
        snapshot = await read_snapshot(self._link.request)
        if self._table is None or snapshot != self._snapshot:
            registry = parse_registry(*snapshot)
            if self._table is None or self._table.registry != registry:
                self._table = match_table(registry)
            self._snapshot = snapshot
        self._read_at = asyncio.get_running_loop().time()
        return self._table

    async def _greet(self, protocol: RedisProtocol) -> None:
        if self._tracking is not None:
            self._tracking.begin_anew(run_id((await protocol.request(_WHO, 1))[0]))

    def _keys(
        self, tokens: bytes, usable: int, block_size: int, root: bytes, extra: BlockExtras | None
    ) -> "PromptKeys | _ComputedKeys":
        more = extra(block_size) if extra is not None else None
        if more is None:
            return PromptKeys(self._known, tokens, block_size=block_size, parent=root, blocks=usable // block_size)
        # remembered keys depend on tokens alone
        keys = block_keys(memoryview(tokens)[: usable * TOKEN_BYTES], block_size=block_size, parent=root, extra=more)
        return _ComputedKeys(keys)

    async def _walk(self, searches: Sequence["_Search"], table: MatchTable, passed: "_PassedThrough") -> bool:
        """Walk each block size in growing batches while a stream holds all; False if the registry has changed."""
        version, now = table.registry.version, asyncio.get_running_loop().time()
        for search in searches:
            # a reader that has asked deeper before has computed the keys up to there; unseen prompts need no hint
            keys = search.keys
            reached = keys.reach_unknown()
            if self._tracking is not None:
                search.known, search.asked = self._tracking.leading(reached, version=version, now=now)
                self.known_blocks += search.asked
            search.want(max(self._hints.first_batch(reached, blocks=keys.blocks) - search.asked, FIRST_BATCH))
        asking = [search for search in searches if search.wanted]
        while True:  # at least once: without sources the version tells whether there are any now
            batches = [search.wanted for search in asking]
            self.asked_blocks += sum(map(len, batches)) // KEY_BYTES
            commands, replies = _commands(batches, passed)
            answer = self._link.begin(commands, replies=replies)
            for search in searches:
                search.work_ahead()
            found, values = self._read(await answer, batches, passed)
            if found != version:
                return False
            asking = [search for search, runs in zip(asking, values, strict=True) if search.goes_on(runs)]
            if not asking:
                break
        for search in searches:
            if search.walk.blocks:  # a cold prompt teaches nothing
                if not self._learns:
                    asyncio.get_running_loop().call_soon(self._learn)
                self._learns.append(search)
        return True

    async def _read_apart(
        self,
        searches: Sequence["_Search"],
        keys: Mapping[int, "PromptKeys | _ComputedKeys"],
        table: MatchTable,
        passed: "_PassedThrough",
    ) -> Mapping[int, Sequence[HeldRun]] | None:
        """Find the holders of blocks of groups whose size is not their stream's; None if the registry has changed.

        This takes a separate round trip, because full attention's matches limit which blocks are worth asking for.
        """
        batches: list[bytes] = []
        sizes: list[int] = []
        for size, of_size in keys.items():
            bound = max(search.walk.longest_with(size) * search.block_size for search in searches) // size
            packed = of_size.reach(bound)[: bound * KEY_BYTES]
            pieces = [packed[at : at + ASKED_BYTES] for at in range(0, len(packed), ASKED_BYTES)]
            batches += pieces
            sizes += [size] * len(pieces)
        if not batches:
            return NO_RUNS
        self.asked_blocks += sum(map(len, batches)) // KEY_BYTES
        commands, replies = _commands(batches, passed)
        found, values = self._read(await self._link.request(commands, replies=replies), batches, passed)
        if found != table.registry.version:
            return None
        apart: dict[int, list[HeldRun]] = {}
        for size, runs in zip(sizes, values, strict=True):
            apart.setdefault(size, []).extend(held_runs(runs, width=table.width))
        return apart

    def _read(
        self, replies: list[Any], batches: Sequence[bytes], passed: "_PassedThrough"
    ) -> tuple[bytes | None, list[list[Run]]]:
        """Return the version (None if it changed in between) and the batches' values."""
        ours = len(batches) + 2
        if len(replies) > ours:
            passed.took(replies[ours:])
        before, after = array_of(replies[0], 2), array_of(replies[ours - 1], 2)
        runs = [
            runs_of(array_of(reply, len(batch) // KEY_BYTES))
            for batch, reply in zip(batches, replies[1:], strict=False)
        ]
        if before != after:
            return None, runs
        if before != self._version_reply:  # nearly always the same as in the last lookup
            self._version_reply, self._version = before, parse_version(before)
        return self._version, runs

    def _learn(self) -> None:
        """Learn how deep to ask for similar prompts, once the callers of these lookups have gone on."""
        for search in self._learns:
            keys, matched = search.keys.reach(search.keys.blocks), search.walk.blocks
            self._hints.learn(keys, matched=matched)
            if self._tracking is not None:
                self._tracking.note(keys, held=matched)
        self._learns.clear()


def _commands(batches: Sequence[bytes], passed: "_PassedThrough") -> tuple[bytes, int]:
    """Return the commands for the batches' values and the version that holds for all, and the number of replies."""
    more, more_replies = passed.pending()
    return b"".join((ASK_VERSION, *map(pack_mget, batches), ASK_VERSION, more)), len(batches) + 2 + more_replies


@dataclass(frozen=True, slots=True)
class _ComputedKeys:
    """The keys of one prompt, computed already; has the same methods as `PromptKeys`."""

    packed: bytes

    @property
    def blocks(self) -> int:
        return len(self.packed) // KEY_BYTES

    def reach(self, _: int) -> bytes:
        return self.packed

    def reach_unknown(self) -> bytes:
        return self.packed


class _Search:
    """One prompt at one block size: its keys, how far they were asked for, and their holders so far."""

    __slots__ = ("asked", "block_size", "keys", "known", "walk", "wanted")

    def __init__(self, block_size: int, walk: PrefixWalk, keys: PromptKeys | _ComputedKeys) -> None:
        self.block_size = block_size
        self.walk = walk
        self.keys = keys
        self.known: Sequence[Run] = ()  # of the first blocks, which need not be asked for; empty once `walk` has them
        self.asked = 0  # blocks, including `known` and `wanted`
        self.wanted = b""  # packed keys to ask for now

    def want(self, blocks: int) -> None:
        """Ask for up to `blocks` more blocks."""
        end = min(self.asked + blocks, self.keys.blocks)
        self.wanted = self.keys.reach(end)[self.asked * KEY_BYTES : end * KEY_BYTES]
        self.asked = end

    def work_ahead(self) -> None:
        """Do work that needs no answer, while Redis works."""
        if self.known:
            self.walk.feed(self.known)
            self.known = ()
        self.keys.reach(self.keys.blocks)

    def goes_on(self, runs: Iterable[Run]) -> bool:
        """Process the values of the wanted blocks; want more and return True while any stream holds all so far."""
        if not self.walk.feed(runs) or self.asked >= self.keys.blocks:
            return False
        self.want(next_batch(len(self.wanted) // KEY_BYTES))
        return True


class _PassedThrough:
    """A caller's own commands, until they have been answered."""

    __slots__ = ("_commands", "_on_replies", "_replies", "got")

    def __init__(self, commands: bytes, replies: int, on_replies: Callable[[Sequence[Any]], None] | None) -> None:
        self._commands = commands
        self._replies = replies
        self._on_replies = on_replies
        self.got: Sequence[Any] = ()

    def took(self, replies: Sequence[Any]) -> None:
        self.got = replies
        if self._on_replies is not None:
            self._on_replies(replies)

    def pending(self) -> tuple[bytes, int]:
        return (b"", 0) if self.got else (self._commands, self._replies)


NOTHING_PASSED = _PassedThrough(b"", 0, None)


def _has_failed(task: "asyncio.Task[MatchTable] | None") -> bool:
    return task is not None and task.done() and (task.cancelled() or task.exception() is not None)


def _is_large(table: MatchTable) -> bool:
    return len(table.registry.streams) + len(table.registry.slots) > READ_AT_ONCE
