"""One index, Redis or its in-memory twin, with short ways to say things; shared by the index's test files."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kv_indexer.apply.redis_writer import RedisIndexWriter
from kv_indexer.share.redis_leases import RedisLeaseBook
from kvmesh.blocks.block_keys import KEY_BYTES, block_keys, root_key
from kvmesh.blocks.index_changes import IndexChange, Operation, Remove, Store, pack_hashes
from kvmesh.blocks.source import Claim, SourceState, Stream, StreamPosition
from kvmesh.index.prefix_match import PrefixLookup
from kvmesh.index.redis_reader import PrefixIndexReader
from tests.integration.kv_redis import RedisServer
from tests.unit.kv_indexer_follow.kv_fakes import BLOCK, prompt
from tests.unit.kvmesh_index.kv_memory_index import MemoryPrefixIndex
from tests.unit.kvmesh_index.kv_memory_leases import MemoryLeaseBook

P = "{kv2}"
ROOT = root_key(hash_seed="kvmesh", model="tiny")
A, B = Stream(endpoint="10.0.0.1:8000"), Stream(endpoint="10.0.0.2:8000")
A1 = Stream(endpoint="10.0.0.1:8000", dp_rank=1)
ALL_DAY = 86_400.0


class Clock:
    """What stands for Redis' clock in the twin."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Index:
    """Writer, reader and an indexer's leases, which last all day, of one index."""

    writer: Any
    reader: Any
    redis: RedisServer | None = None  # None: the twin
    clock: Clock = field(default_factory=Clock)
    claims: dict[Stream, Claim] = field(default_factory=dict)
    endpoints: set[str] = field(default_factory=set)  # listed for good: none is dropped for want of an indexer

    def lease_book(self, indexer: str, *, lease_seconds: float = 2.0, endpoints: tuple[str, ...] = ()) -> Any:
        """Another indexer's leases."""
        more: dict[str, Any] = {"indexer": indexer, "lease_seconds": lease_seconds, "endpoints": endpoints}
        if self.redis is None:
            return MemoryLeaseBook(index=self.writer, **more)
        return RedisLeaseBook(url=self.redis.url, **more)

    async def pass_time(self, seconds: float) -> None:
        """Let so much time pass as far as leases and generations can tell; nobody sleeps."""
        self.clock.now += seconds
        if self.redis is not None:
            shift_times(self.redis, seconds)

    async def claim(self, stream: Stream) -> Claim:
        """Take the stream for a day, beside those that this index has taken, and believe in it."""
        if stream not in self.claims:
            self.endpoints.add(stream.endpoint)
            book = self.lease_book("test", lease_seconds=ALL_DAY, endpoints=tuple(self.endpoints))
            self.claims = dict(await book.tick({*self.claims, stream}))
            if self.redis is not None:
                await book.close()
            for claim in self.claims.values():  # others may have been taken anew
                await self.believe(claim)
        return self.claims[stream]

    async def believe(self, claim: Claim) -> None:
        """Say that what the stream claims is so, as who follows it does once it has caught up."""
        epoch = (await self.writer.read_position(claim.stream)).epoch
        await self.writer.set_state(claim, epoch=epoch, state=SourceState.LIVE)

    async def position(self, stream: Stream) -> StreamPosition:
        """Return where the stream stands, registered if it is new."""
        await self.claim(stream)
        position: StreamPosition = await self.writer.read_position(stream)
        return position

    async def drop(self, stream: Stream) -> None:
        """Forget the stream."""
        claim = await self.claim(stream)
        book = self.lease_book("test")
        await book.drop(claim)
        del self.claims[stream]
        if self.redis is not None:
            await book.close()

    async def lookup(self, blocks: int) -> PrefixLookup:
        lookup: PrefixLookup = await self.reader.lookup(prompt(blocks), root=ROOT)
        return lookup

    async def matched(self, blocks: int = 5) -> dict[str, int]:
        return dict((await self.lookup(blocks)).matched_blocks)

    async def apply(self, stream: Stream, *operations: Operation) -> int:
        """Apply one batch where the stream stands; return its epoch."""
        claim = await self.claim(stream)
        applied = await self.writer.apply(claim, change(await self.position(stream), *operations))
        assert applied is not None
        epoch: int = applied.epoch
        return epoch

    async def sweep(self, fields: int = 1000) -> int:
        slices = 0
        while await self.writer.sweep(fields=fields):
            slices += 1
        return slices


@asynccontextmanager
async def memory_index(**policy: Any) -> AsyncIterator[Index]:
    """The twin."""
    clock = Clock()
    memory = MemoryPrefixIndex(hash_seed="kvmesh", clock=clock, **policy)
    yield Index(writer=memory, reader=memory, clock=clock)


@asynccontextmanager
async def redis_index(server: RedisServer, **policy: Any) -> AsyncIterator[Index]:
    """The index in a real Redis."""
    writer = RedisIndexWriter(url=server.url, **{"timeout_seconds": 1.0, **policy})
    reader = PrefixIndexReader(url=server.url, hash_seed="kvmesh")
    try:
        yield Index(writer=writer, reader=reader, redis=server)
    finally:
        await writer.close()
        await reader.close()


def shift_times(server: RedisServer, seconds: float) -> None:
    """Move all that Redis has of its own times into the past."""
    client: Any = server.client()
    for name in client.smembers(f"{P}streams"):
        key = f"{P}stream:".encode() + name
        if client.type(key) != b"hash":
            continue  # a stranger's
        for time, value in client.hgetall(key).items():
            if time == b"lease_until":
                client.hset(key, time, b"%.0f" % (float(value) - seconds * 1000))
            elif time.startswith(b"since:"):
                client.hset(key, time, b"%.3f" % (float(value) - seconds))
    for indexer, record in client.hgetall(f"{P}indexers").items():
        told = json.loads(record)
        told["until_ms"] -= round(seconds * 1000)
        client.hset(f"{P}indexers", indexer, json.dumps(told))
    for indexer, until in client.hgetall(f"{P}pulses").items():
        client.hset(f"{P}pulses", indexer, b"%.0f" % (float(until) - seconds * 1000))
    client.hset(f"{P}registry", "aged_at", 0)


def change(position: StreamPosition, *operations: Operation, **more: Any) -> IndexChange:
    fields = {"epoch": position.epoch, "previous_seq": position.last_seq, "last_seq": position.last_seq + 1}
    return IndexChange(operations=operations, **{**fields, "last_ts": 1.25, "last_crc": 7, "events": 1, **more})


def blocks(first: int, last: int, *, block_size: int = BLOCK, **more: Any) -> Store:
    """Store blocks first … last (from 1) of the prompt; the engine hash of a block is its place."""
    keys = block_keys(prompt(last * block_size // BLOCK), block_size=block_size, parent=ROOT)
    fields = {"tier": "GPU", "group": 0, **more}
    return Store(
        hashes=pack_hashes(range(first, last + 1)),
        keys=keys[(first - 1) * KEY_BYTES : last * KEY_BYTES],
        block_size=block_size,
        **fields,
    )


def without(*hashes: int, **more: Any) -> Remove:
    return Remove(hashes=pack_hashes(hashes), **{"tier": "GPU", "group": 0, **more})
