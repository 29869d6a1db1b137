"""The same random history to the index in Redis, to its twin and to a plain model: all three agree after every step."""

import asyncio
import json
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kv_indexer.apply.redis_writer import RedisIndexWriter
from kvmesh.blocks.block_keys import block_keys
from kvmesh.blocks.index_changes import Clear, Operation, Remove, Store, pack_hashes
from kvmesh.blocks.source import Claim, Stream
from kvmesh.errors import IndexUnavailableError, LeaseLostError
from kvmesh.index.redis_reader import PrefixIndexReader
from tests.integration.kv_index import ROOT, Clock, Index, P, change
from tests.integration.kv_redis import RedisServer
from tests.integration.kv_reference import Field, Reference, eights
from tests.unit.kv_indexer_follow.kv_fakes import BLOCK, prompt
from tests.unit.kvmesh_index.kv_memory_index import MemoryPrefixIndex

BLOCKS = 10
NEVER = 1e9  # days pass in these histories, and generations are not in the model
KEYS = eights(block_keys(prompt(BLOCKS), block_size=BLOCK, parent=ROOT))
STREAMS = [
    Stream(endpoint="10.0.0.1:8000"),
    Stream(endpoint="10.0.0.1:8000", dp_rank=1),
    *(Stream(endpoint=f"10.0.0.{number}:8000") for number in range(2, 12)),  # beyond one byte of bitmap
]
numbers = st.integers(1, BLOCKS)
where = st.fixed_dictionaries({"tier": st.sampled_from(["GPU", "GPU", "CPU"]), "group": st.sampled_from([0, 0, 0, 1])})


def as_store(first: int, count: int, lie: int, set_only: bool, tier_and_group: dict[str, Any]) -> Store:
    """Blocks in a row; `lie` gives their hashes to other blocks."""
    places = [(first + step - 1) % BLOCKS for step in range(count)]
    return Store(
        block_size=BLOCK,
        hashes=pack_hashes(place + 1 for place in places),
        keys=b"".join(KEYS[(place + lie) % BLOCKS] for place in places),
        set_only=set_only,
        **tier_and_group,
    )


stores = st.builds(as_store, numbers, st.integers(1, 14), st.sampled_from([0, 0, 0, 0, 3]), st.booleans(), where)
removes = st.builds(
    lambda hashes, place: Remove(hashes=pack_hashes(hashes), **place), st.lists(numbers, min_size=1, max_size=12), where
)
operations_ = st.lists(st.one_of(stores, stores, removes, removes, st.just(Clear())), max_size=4)
streams = st.sampled_from(STREAMS) | st.sampled_from(STREAMS[:3])


class IndexMachine(RuleBasedStateMachine):
    """A history of one index; `server` is set by the test."""

    server: RedisServer

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        client: Any = self.server.client()
        client.flushall()
        clock = Clock()
        memory = MemoryPrefixIndex(clock=clock, tier_ttl_seconds=NEVER)
        self.twin = Index(writer=memory, reader=memory, clock=clock)
        self.model = Reference()
        self.claims: dict[str, dict[Stream, Claim]] = {"redis": {}, "twin": {}}

    @initialize()
    def connect(self) -> None:
        self.redis = self.run(self.open())

    async def open(self) -> Index:
        writer = RedisIndexWriter(url=self.server.url, tier_ttl_seconds=NEVER)
        reader = PrefixIndexReader(url=self.server.url, hash_seed="kvmesh")
        return Index(writer=writer, reader=reader, redis=self.server)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(coroutine)

    def both(self) -> tuple[Index, Index]:
        return self.redis, self.twin

    async def ready(self, stream: Stream) -> None:
        for index in self.both():
            await index.claim(stream)
        self.model.register(stream)

    @rule(stream=streams, operations=operations_)
    def apply(self, stream: Stream, operations: list[Operation]) -> None:
        async def act() -> None:
            await self.ready(stream)
            for index in self.both():
                await index.apply(stream, *operations)
            self.model.apply(stream, operations)

        self.run(act())

    @rule(stream=streams, operations=operations_)
    def the_answer_is_lost_and_the_change_is_tried_again(self, stream: Stream, operations: list[Operation]) -> None:
        async def act() -> None:
            await self.ready(stream)
            for index in self.both():
                wanted = change(await index.position(stream), *operations)
                claim = await index.claim(stream)
                first = asyncio.ensure_future(index.writer.apply(claim, wanted))
                await asyncio.sleep(0)  # it is on its way
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                again = await index.writer.apply(claim, wanted)
                assert again is None or index is self.twin or first.cancelled()
            self.model.apply(stream, operations)

        self.run(act())

    @rule(stream=streams, operations=operations_, after=st.booleans())
    def the_indexer_dies(self, stream: Stream, operations: list[Operation], after: bool) -> None:
        """Its connection breaks before or just after the change was sent; a new one goes on from what is stored."""

        async def act() -> None:
            await self.ready(stream)
            await self.twin.apply(stream, *operations)
            wanted, claim = change(await self.redis.position(stream), *operations), await self.redis.claim(stream)
            attempt = asyncio.ensure_future(self.redis.writer.apply(claim, wanted))
            if after:
                await asyncio.sleep(0)
            await self.redis.writer.close()
            await self.redis.reader.close()
            await asyncio.gather(attempt, return_exceptions=True)
            claims, endpoints = self.redis.claims, self.redis.endpoints
            self.redis = await self.open()
            self.redis.claims, self.redis.endpoints = claims, endpoints
            position = await self.redis.writer.read_position(stream)
            assert position is not None
            if position.last_seq == wanted.previous_seq:  # it was not applied, and not half of it
                try:
                    await self.redis.writer.apply(claim, wanted)
                except IndexUnavailableError:
                    await self.redis.writer.apply(claim, wanted)
            self.model.apply(stream, operations)

        self.run(act())

    @rule(stream=streams, seq=st.integers(-1, 50), stale=st.booleans())
    def begin_epoch(self, stream: Stream, seq: int, stale: bool) -> None:
        async def act() -> None:
            await self.ready(stream)
            for index in self.both():
                expected = (await index.position(stream)).epoch - stale
                claim = await index.claim(stream)
                await index.writer.begin_epoch(claim, expected_epoch=expected, last_seq=seq, degraded="why")
            if not stale:
                self.model.begin_epoch(stream, last_seq=seq, degraded="why")

        self.run(act())

    @rule(stream=streams, operations=operations_)
    def another_takes_over_and_the_first_is_late(self, stream: Stream, operations: list[Operation]) -> None:
        async def act() -> None:
            await self.ready(stream)
            for index in self.both():
                late = await index.claim(stream)
                await index.pass_time(100_000)
                del index.claims[stream]  # the others are taken anew with it: none is lost meanwhile
                await index.claim(stream)
                with pytest.raises(LeaseLostError):
                    await index.writer.apply(late, change(await index.position(stream), *operations))

        self.run(act())

    @rule(stream=streams)
    def drop(self, stream: Stream) -> None:
        async def act() -> None:
            await self.ready(stream)
            for index in self.both():
                await index.drop(stream)
            self.model.drop(stream)

        self.run(act())

    @rule(fields=st.integers(1, 20), all_=st.booleans())
    def sweep(self, fields: int, all_: bool) -> None:
        async def act() -> None:
            for index in self.both():
                await index.writer.sweep(fields=fields)
                if all_:
                    await index.sweep(fields)

        self.run(act())

    @invariant()
    def all_find_the_same(self) -> None:
        if not hasattr(self, "redis"):
            return
        for blocks in (1, 4, BLOCKS):
            expected = self.model.matched(KEYS[:blocks])
            assert self.run(self.redis.matched(blocks)) == expected
            assert self.run(self.twin.matched(blocks)) == expected

    @invariant()
    def all_stand_at_the_same_batch(self) -> None:
        for stream in self.model.seqs if hasattr(self, "redis") else ():
            expected = (self.model.seqs[stream], self.model.degraded[stream])
            for index in self.both():
                position = self.run(index.writer.read_position(stream))
                assert (position.last_seq, position.degraded) == expected, (stream.name, index is self.twin)

    @invariant()
    def the_raw_keys_are_those_of_the_model(self) -> None:
        raw = recount(self.server)
        assert (raw.held, raw.marked) == (self.model.held(), self.model.visible())
        for slot, keys in raw.retired_marked.items():
            assert keys <= raw.retired_held.get(slot, set()), "a sweep would not find this block"

    def teardown(self) -> None:
        async def close() -> None:
            self.server.client().hset(f"{P}registry", "sweeper_until", 0)  # of an indexer that has died while it swept
            await self.redis.sweep()
            raw = recount(self.server)
            assert (raw.held, raw.retired_held, raw.retired_marked) == (self.model.held(), {}, {})
            await self.redis.writer.close()
            await self.redis.reader.close()

        if hasattr(self, "redis"):
            self.run(close())
        self.runner.close()


@dataclass
class Raw:
    """What Redis holds, key by key."""

    held: dict[tuple[str, str], dict[Field, tuple[bytes, int]]]  # live (stream, tier) -> as the model has it
    marked: dict[tuple[str, str], set[bytes]]  # live (stream, tier) -> blocks that name its slot
    retired_held: dict[int, set[bytes]]  # slot -> blocks that its sweep will find
    retired_marked: dict[int, set[bytes]]  # slot -> blocks that still name it


def recount(server: RedisServer) -> Raw:
    """Read every key by itself, as `docs/reference/redis.md` describes them."""
    client: Any = server.client()
    records = {int(slot): json.loads(text) for slot, text in client.hgetall(f"{P}slots").items()}
    sources = {
        slot: (f"{record['endpoint']}#{record['rank']}", record["tier"])
        for slot, record in records.items()
        if record["state"] == "live"
    }
    raw = Raw(held={}, marked={name: set() for name in sources.values()}, retired_held={}, retired_marked={})
    for slot in {*records, *range(64)}:
        fields = client.hgetall(f"{P}h{slot}")
        if slot in sources:
            held = {as_field(name): (value[:8], int(value[8:] or 1)) for name, value in fields.items()}
            raw.held[sources[slot]] = held
        elif fields:
            raw.retired_held[slot] = {value[:8] for value in fields.values()}
    for key in KEYS:
        value = client.get(f"{P}b".encode() + key)
        for slot in slots_of(value) if value else ():
            marked = raw.marked[sources[slot]] if slot in sources else raw.retired_marked.setdefault(slot, set())
            marked.add(key)
    return raw


def as_field(name: bytes) -> Field:
    return name[8] if len(name) > 8 else 0, name[:8]


def slots_of(value: bytes) -> list[int]:
    """The slots of a block's value, which has one form only for these slots."""
    if not value.startswith(b"B"):
        return [int(value)]
    bits = "".join(f"{byte:08b}" for byte in value[1:])
    slots = [slot for slot, bit in enumerate(bits) if bit == "1"]
    assert len(slots) > 1
    assert value[-1] != 0
    return slots


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[type[IndexMachine]]:
    server = RedisServer(tmp_path)
    server.start()
    try:
        yield type("Machine", (IndexMachine,), {"server": server})
    finally:
        server.kill()


def test_redis_its_twin_and_a_plain_model_agree_after_every_step(machine: type[IndexMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=20, stateful_step_count=25, suppress_health_check=list(HealthCheck)),
    )
