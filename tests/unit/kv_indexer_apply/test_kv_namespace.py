"""What a stream holds under the keys of another pool is voided before anything is added to it."""

from kv_indexer.apply.apply_events import EventApplier, root_keys
from kvmesh.blocks.block_keys import root_key
from kvmesh.blocks.source import Stream, StreamPosition
from tests.unit.kv_indexer_follow.kv_fakes import CountingTelemetry, frame, prompt, stored
from tests.unit.kvmesh_index.kv_memory_index import MemoryPrefixIndex

POD = Stream(endpoint="10.0.0.1:8000")


class Bench:
    """One stream in the in-memory index."""

    def __init__(self) -> None:
        self.index = MemoryPrefixIndex()

    async def take_up(self, seed: str, *, namespace: str) -> EventApplier:
        applier = EventApplier(
            claim=await self.index.claim(POD),
            roots=root_keys(hash_seed=seed, model="tiny"),
            writer=self.index,
            telemetry=CountingTelemetry(),
            namespace=namespace,
        )
        await applier.resume()
        return applier

    async def position(self) -> StreamPosition:
        position = await self.index.read_position(POD)
        assert position is not None
        return position

    async def matched(self, seed: str) -> int:
        hits = await self.index.lookup(prompt(9), root=root_key(hash_seed=seed, model="tiny"))
        return hits.matched_blocks.get(POD.endpoint, 0)


async def test_the_same_pool_goes_on_where_it_was() -> None:
    bench = Bench()
    first = await bench.take_up("kvmesh/red", namespace="red")
    await first.apply([frame(0, stored(1))])
    second = await bench.take_up("kvmesh/red", namespace="red")
    assert (second.position.last_seq, second.position.epoch) == (0, first.position.epoch)
    await second.apply([frame(1, stored(2, parent=1))])
    assert await bench.matched("kvmesh/red") == 2


async def test_another_pool_begins_anew_and_finds_nothing_of_before() -> None:
    bench = Bench()
    red = await bench.take_up("kvmesh/red", namespace="red")
    await red.apply([frame(0, stored(1, 2))])
    blue = await bench.take_up("kvmesh/blue", namespace="blue")
    assert (blue.position.last_seq, blue.position.namespace) == (-1, "blue")
    assert await bench.matched("kvmesh/red") == 0
    await blue.apply([frame(0, stored(1, 2)), frame(1, stored(3, parent=2))])
    assert (await bench.matched("kvmesh/blue"), await bench.matched("kvmesh/red")) == (3, 0)
    assert (await bench.position()).namespace == "blue"


async def test_a_stream_without_pool_is_left_as_it_was_and_unmarked() -> None:
    bench = Bench()
    first = await bench.take_up("kvmesh", namespace="")
    await first.apply([frame(0, stored(1))])
    assert (await bench.take_up("kvmesh", namespace="")).position == await bench.position()
    assert (await bench.position()).namespace == ""
    assert await bench.matched("kvmesh") == 1


async def test_a_new_stream_is_marked_without_beginning_another_epoch() -> None:
    bench = Bench()
    before = (await bench.index.claim(POD), await bench.position())[1]
    applier = await bench.take_up("kvmesh/red", namespace="red")
    assert (applier.position.epoch, applier.position.namespace) == (before.epoch, "red")
