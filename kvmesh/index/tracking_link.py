"""Client-side caching: keeps the holders of recurring prefixes, while Redis reports changes.

RESP3 and CLIENT TRACKING, as in https://redis.io/docs/latest/develop/reference/client-side-caching/. The connection is
separate: lookups neither wait for its requests nor read pushed messages, and if Redis does not track they keep asking
for everything. A chunk is 64 blocks of a prompt that end at a multiple of 64 from its beginning; block keys are
chained, so the last one names the chunk.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from kvmesh.blocks.block_keys import KEY_BYTES
from kvmesh.errors import IndexUnavailableError
from kvmesh.index.prefix_match import Run, runs_of
from kvmesh.redis.keys import pack_mget, parse_version
from kvmesh.redis.link import RedisLink, checked, pack
from kvmesh.redis.protocol import RedisProtocol, array_of, run_id
from kvmesh.redis.snapshot import ASK_VERSION

CHUNK_BLOCKS = 64
CHUNK_BYTES = CHUNK_BLOCKS * KEY_BYTES
LIMIT = 1_024  # chunks: a million tokens at 16 per block, about 8 MB here and 9 MB of Redis (docs/reference/redis.md)
SEEN_LIMIT = 16_384  # chunks that were held once
NEW_AT_ONCE = 16  # new chunks per lookup: each costs 20 us
MOST_RUNS = 256  # of a prompt that are kept together; alternating values would take quadratic memory
SECOND_CHANCES = 16  # used chunks spared in a row to make room for a new one
NOTHING_KNOWN: tuple[Sequence[Run], int] = ((), 0)
log = logging.getLogger(__name__)
AT_ONCE = 8  # chunks per MGET: as many blocks as a lookup of 8,000 tokens
ASK_SECONDS = 0.5
# Redis answers only after it has reported every earlier change. After a longer silence the connection may be dead.
BELIEVED_SECONDS = 2.0
RETRY_SECONDS = 5.0
_GREETING = pack("INFO", "server") + pack("HELLO", 3) + pack("CLIENT", "TRACKING", "ON")


class TrackedChunk:
    """64 blocks, and Redis' values for them."""

    __slots__ = ("as_of", "keys", "runs", "so_far", "was_used")

    def __init__(self, keys: bytes) -> None:
        self.keys = keys  # packed
        self.runs: Sequence[Run] | None = None  # None if not answered yet
        self.was_used = False  # since it was last considered for eviction
        self.so_far: Sequence[Run] = ()  # of the prompt from its beginning to here
        self.as_of = -1  # how many chunks had been dropped when `so_far` was computed

    def blocks(self) -> list[bytes]:
        """Return the keys one by one."""
        return [self.keys[at : at + KEY_BYTES] for at in range(0, CHUNK_BYTES, KEY_BYTES)]


class TrackedBlocks:
    """Chunks that were held at two lookups. They are forgotten with the connection that reports their changes."""

    def __init__(self, *, limit: int = LIMIT) -> None:
        self._limit = limit
        self._chunks: OrderedDict[bytes, TrackedChunk] = OrderedDict()  # by their last keys, in order of arrival
        # prompts that diverge within a chunk share blocks; mostly a block is in one chunk, and a set is large
        self._of_block: dict[bytes, TrackedChunk | set[TrackedChunk]] = {}
        self._seen: dict[bytes, None] = {}  # last keys of chunks that were held once, oldest first
        self._wanted: dict[bytes, TrackedChunk] = {}  # by their last keys: not asked for yet
        self._dropped = 0

    def __len__(self) -> int:
        """Return how many blocks are known or about to be."""
        return len(self._of_block)

    def leading(self, keys: bytes) -> tuple[Sequence[Run], int]:
        """Return the known values of a prompt's first blocks, and how many blocks these are.

        `keys`: packed, of the prompt or of its beginning.
        """
        chunks, dropped = self._chunks, self._dropped
        whole = len(keys) // CHUNK_BYTES * CHUNK_BYTES
        for end in range(whole, 0, -CHUNK_BYTES):  # deepest first: nearly always it was the deepest last time
            chunk = chunks.get(keys[end - KEY_BYTES : end])
            if chunk is not None and chunk.runs is not None:
                if chunk.as_of == dropped:
                    return chunk.so_far, end // KEY_BYTES
                break
        return self._put_together(keys, whole)

    def note(self, keys: bytes, *, held: int) -> bool:
        """Note that the first `held` of these blocks are held; tell whether there are chunks to ask for now."""
        new = 0
        for end in range(CHUNK_BYTES, held * KEY_BYTES + 1, CHUNK_BYTES):
            last = keys[end - KEY_BYTES : end]
            chunk = self._chunks.get(last)
            if chunk is not None:
                chunk.was_used = True
            elif last not in self._seen:
                self._seen[last] = None
            elif new < NEW_AT_ONCE:
                new += 1
                del self._seen[last]
                self._want(TrackedChunk(keys[end - CHUNK_BYTES : end]), last)
        while len(self._seen) > SEEN_LIMIT:
            del self._seen[next(iter(self._seen))]
        return bool(self._wanted)

    def take_wanted(self, most: int) -> Sequence[TrackedChunk]:
        """Return chunks to ask for now; changes that Redis reports from now on drop them."""
        return [self._wanted.pop(last) for last in list(islice(self._wanted, most))]

    def fill(self, chunk: TrackedChunk, values: Sequence[bytes | None]) -> None:
        """Store Redis' answer. A chunk that has changed meanwhile was dropped, so its answer is not used."""
        chunk.runs = runs_of(values)

    def changed(self, keys: Iterable[bytes]) -> None:
        """Forget the chunks of these blocks: their holders have changed."""
        for key in keys:
            there = self._of_block.get(key)
            if there is not None:
                for chunk in (there,) if isinstance(there, TrackedChunk) else tuple(there):
                    last = chunk.keys[-KEY_BYTES:]
                    del self._chunks[last]
                    self._drop(chunk, last)

    def clear(self) -> None:
        """Forget everything: changes are no longer reported, or everything has changed."""
        self._chunks.clear()
        self._of_block.clear()
        self._wanted.clear()

    def _put_together(self, keys: bytes, whole: int) -> tuple[Sequence[Run], int]:
        """Return the result of `leading`, and keep it with its last chunk."""
        runs: list[Run] = []
        deepest = None
        known = 0
        for end in range(CHUNK_BYTES, whole + 1, CHUNK_BYTES):
            chunk = self._chunks.get(keys[end - KEY_BYTES : end])
            if chunk is None or chunk.runs is None:
                break
            for value, count in chunk.runs:
                if runs and runs[-1][0] == value:
                    runs[-1] = value, runs[-1][1] + count
                else:
                    runs.append((value, count))
            deepest, known = chunk, end // KEY_BYTES
        if deepest is None:
            return NOTHING_KNOWN
        if len(runs) <= MOST_RUNS:
            deepest.so_far, deepest.as_of = runs, self._dropped
        return runs, known

    def _want(self, chunk: TrackedChunk, last: bytes) -> None:
        self._chunks[last] = self._wanted[last] = chunk
        for key in chunk.blocks():
            there = self._of_block.setdefault(key, chunk)
            if isinstance(there, set):
                there.add(chunk)
            elif there is not chunk:
                self._of_block[key] = {there, chunk}
        chances = SECOND_CHANCES
        while len(self._chunks) > self._limit:
            name, oldest = self._chunks.popitem(last=False)
            if oldest.was_used and chances:
                chances -= 1
                oldest.was_used = False
                self._chunks[name] = oldest
            else:
                self._drop(oldest, name)

    def _drop(self, chunk: TrackedChunk, last: bytes) -> None:
        self._wanted.pop(last, None)
        for key in chunk.blocks():
            there = self._of_block[key]
            if isinstance(there, set):
                there.discard(chunk)
            if not there or there is chunk:
                del self._of_block[key]
        self._dropped += 1


class TrackingLink:
    """Fills `TrackedBlocks` and keeps them current. Raise RedisUrlError."""

    def __init__(self, url: str) -> None:
        self._blocks = TrackedBlocks()
        self._link = RedisLink(url, reads_only=True, stall_seconds=BELIEVED_SECONDS, greet=self._greet)
        self._protocol: RedisProtocol | None = None
        self._server = self._server_of_lookups = b""  # their run ids
        self._version = b""  # of the registry; all changes up to it have been reported
        self._believed_until = 0.0  # loop time
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._trouble = ""

    def leading(self, keys: bytes, *, version: bytes, now: float) -> tuple[Sequence[Run], int]:
        """Return the known values of the first blocks of these packed keys at `now` (loop time), and their number.

        `version`: of the registry that reads the values. Values that were read before a slot changed its
        meaning must not be used.
        """
        if now >= self._believed_until:
            return NOTHING_KNOWN
        if version != self._version:
            self._wake.set()
            return NOTHING_KNOWN
        return self._blocks.leading(keys)

    @property
    def tracked_blocks(self) -> int:
        """Return how many blocks are known here or about to be."""
        return len(self._blocks)

    def note(self, keys: bytes, *, held: int) -> None:
        """Note a lookup: the first `held` blocks of these packed keys are held."""
        if self._trouble or self._is_closed or not self._blocks.note(keys, held=held):
            return
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="redis-tracking")
        self._wake.set()

    def begin_anew(self, server: bytes) -> None:
        """Forget everything: lookups have a new connection, perhaps to another server (its run id)."""
        self._server_of_lookups = server
        self._forget()
        if self._protocol is not None:
            self._protocol.abort()  # the next one goes to the same server as the lookups

    async def close(self) -> None:
        """Close the connection."""
        self._is_closed = True
        try:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task])
        finally:
            await self._link.close()

    def _pushed(self, message: Sequence[Any]) -> None:
        """Handle a pushed message: the keys that have changed, or None for all keys."""
        if message[0] != b"invalidate":
            return
        if message[1] is None:
            self._blocks.clear()
        else:
            self._blocks.changed([key[-KEY_BYTES:] for key in message[1]])

    def _forget(self) -> None:
        """Forget everything: changes are no longer reported."""
        self._believed_until = 0.0
        self._blocks.clear()

    async def _greet(self, protocol: RedisProtocol) -> None:
        info, hello, tracking = await protocol.request(_GREETING, 3)
        greeting = checked(hello)
        if not isinstance(greeting, dict) or greeting.get(b"proto") != 3:  # RESP2 has no pushed messages
            raise IndexUnavailableError("it does not speak RESP3")
        checked(tracking)
        if self._protocol is not None and self._protocol is not protocol:
            self._protocol.on_lost = lambda: None  # its end does not matter any more
            self._forget()
        self._protocol, protocol.on_push, protocol.on_lost = protocol, self._pushed, self._forget
        self._server = run_id(info)

    async def _run(self) -> None:
        while True:
            try:
                await self._ask()
                self._note_trouble("")
                with suppress(TimeoutError):
                    async with asyncio.timeout(ASK_SECONDS if len(self._blocks) else None):
                        await self._wake.wait()
                self._wake.clear()
                continue
            except IndexUnavailableError as error:
                self._note_trouble(str(error))
            except Exception:
                log.exception("what Redis reported of known prefixes could not be read")
                self._note_trouble("a defect")
            self._forget()  # including the requested chunks
            if self._protocol is not None:
                self._protocol.abort()
            await asyncio.sleep(RETRY_SECONDS)

    async def _ask(self) -> None:
        """Ask for all wanted chunks, and for the version of the last reported change."""
        loop = asyncio.get_running_loop()
        while True:
            chunks = self._blocks.take_wanted(AT_ONCE)
            keys = b"".join([chunk.keys for chunk in chunks])
            began = loop.time()
            replies = await self._link.request(
                ASK_VERSION + pack_mget(keys) if keys else ASK_VERSION, replies=1 + bool(keys)
            )
            if not self._server or self._server != self._server_of_lookups:
                raise IndexUnavailableError("this is not the server that answers lookups, or it does not say (+info)")
            version = parse_version(array_of(replies[0], 2))
            values = array_of(replies[1], len(chunks) * CHUNK_BLOCKS) if keys else []
            for number, chunk in enumerate(chunks):
                self._blocks.fill(chunk, values[number * CHUNK_BLOCKS : (number + 1) * CHUNK_BLOCKS])
            self._version, self._believed_until = version, began + BELIEVED_SECONDS
            if not chunks:
                return

    def _note_trouble(self, trouble: str) -> None:
        """Log when the trouble begins and ends, not each attempt."""
        if trouble and not self._trouble:
            log.warning("known prefixes are asked for with every request, too: %s", trouble)
        elif self._trouble and not trouble:
            log.info("known prefixes are kept here again")
        self._trouble = trouble
