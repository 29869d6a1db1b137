"""One stream's frames become ordered, exactly-once index changes."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from kv_indexer.adapters.memory_index import MemoryPrefixIndex
from kv_indexer.apply_events import EventApplier, Halt, root_keys
from kv_indexer.core.block_keys import root_key
from kv_indexer.core.sequence import Verdict
from kv_indexer.core.source import SourceState, Stream
from kv_indexer.errors import StreamForgottenError
from kv_indexer.wire.zmq_frames import Frame
from tests.unit.kv_indexer_apply.kv_fakes import CountingTelemetry, frame, prompt, removed, stored

POD = Stream(endpoint="10.0.0.1:8000")
ROOT = root_key(hash_seed="kvmesh", model="tiny")


class Bench:
    """An applier over the in-memory index."""

    def __init__(self) -> None:
        self.index = MemoryPrefixIndex()
        self.telemetry = CountingTelemetry()
        self.applier = self.another()

    def another(self) -> EventApplier:
        roots = root_keys(hash_seed="kvmesh", model="tiny")
        return EventApplier(stream=POD, roots=roots, writer=self.index, telemetry=self.telemetry)

    async def matched(self, blocks: int) -> int:
        hits = await self.index.lookup(prompt(blocks), root=ROOT)
        return hits.matched_blocks.get(POD.endpoint, 0)


@pytest.fixture
async def bench() -> Bench:
    bench = Bench()
    await bench.applier.resume()
    return bench


async def test_batches_in_order_are_applied_and_counted(bench: Bench) -> None:
    assert await bench.applier.apply([frame(0, stored(1)), frame(1, stored(2, parent=1), removed(9))]) is None

    assert await bench.matched(2) == 2
    assert (bench.applier.position.last_seq, bench.applier.position.last_ts) == (1, 1.0)
    assert bench.telemetry.events == Counter({"BlockStored": 2, "BlockRemoved": 1})


async def test_a_batch_seen_before_is_dropped(bench: Bench) -> None:
    frames = [frame(0, stored(1)), frame(1, stored(1))]
    await bench.applier.apply(frames)
    await bench.applier.apply(frames)  # as after a replay
    await bench.applier.apply([frame(2, removed(1, 1))])

    assert await bench.matched(1) == 0


async def test_what_precedes_a_gap_is_applied_and_the_rest_handed_back(bench: Bench) -> None:
    late = frame(2, stored(3, parent=2))

    assert await bench.applier.apply([frame(0, stored(1)), late]) == Halt(verdict=Verdict.GAP, frames=[late])
    assert await bench.matched(3) == 1


async def test_an_old_number_with_a_later_time_is_a_restart(bench: Bench) -> None:
    await bench.applier.apply([frame(0, stored(1)), frame(1)])
    reborn = frame(0, stored(5), ts=99.0)

    assert await bench.applier.apply([reborn]) == Halt(verdict=Verdict.RESTART, frames=[reborn])


async def test_a_new_epoch_hides_what_the_old_one_claimed(bench: Bench) -> None:
    await bench.applier.apply([frame(0, stored(1))])
    await bench.applier.begin_epoch()

    assert await bench.matched(1) == 0
    assert bench.applier.position.last_seq == -1


async def test_another_process_goes_on_where_this_one_ended_and_knows_its_parents(bench: Bench) -> None:
    await bench.applier.apply([frame(0, stored(1))])
    successor = bench.another()
    await successor.resume()
    await successor.apply([frame(0, stored(1)), frame(1, stored(2, parent=1))])

    assert await bench.matched(2) == 2
    assert successor.position.last_seq == 1


async def test_two_indexers_of_one_stream_apply_each_batch_once(bench: Bench) -> None:
    rival = bench.another()
    await rival.resume()
    for number in range(4):
        await bench.applier.apply([frame(number, stored(1))])
        await rival.apply([frame(number, stored(1))])
    await rival.apply([frame(4, removed(1, 1, 1, 1))])

    assert await bench.matched(1) == 0
    assert bench.telemetry.batches == 5


async def test_an_undecodable_batch_uses_its_number_up_and_marks_the_source(bench: Bench) -> None:
    await bench.applier.apply([frame(0, stored(1)), Frame(seq=1, payload=b"garbage"), frame(2, stored(2, parent=1))])

    assert await bench.matched(2) == 2
    assert bench.telemetry.decode_errors == Counter({"undecodable-batch": 1})
    assert [(line.state, line.reason) for line in await bench.index.sources()] == [
        (SourceState.DEGRADED, "undecodable-batch")
    ]


async def test_a_clear_begins_an_epoch_that_is_exact_again(bench: Bench) -> None:
    await bench.applier.apply([Frame(seq=0, payload=b"garbage"), frame(1, stored(1))])
    epoch = bench.applier.position.epoch
    await bench.applier.apply([frame(2, {"type": "AllBlocksCleared"}, stored(1))])
    await bench.applier.apply([frame(3, removed(1))])  # counts began anew with the clear

    assert await bench.matched(1) == 0
    assert bench.applier.position.epoch > epoch
    assert bench.applier.position.degraded == ""


async def test_events_of_no_use_here_are_counted_apart_from_those_that_nobody_understands(bench: Bench) -> None:
    window: Mapping[str, Any] = {**stored(1), "kv_cache_spec_kind": "sliding_window"}
    placeholder = stored(1, token_ids=[], block_size=0)
    odd = stored(1, extra_keys=[[{"a": 1}]])
    events = (window, placeholder, stored(2, parent=77), odd, stored(1, extra_keys=[]), {"type": "New"})
    await bench.applier.apply([frame(0, *events)])

    assert bench.telemetry.unindexed == Counter({"not-full-attention": 1, "placeholder": 1, "unknown-parent": 1})
    assert bench.telemetry.decode_errors == Counter(
        {"unknown-extra-key": 1, "extra-keys-mismatch": 1, "unknown-event-type": 1}
    )


async def test_a_stream_that_the_index_has_lost_is_an_error(bench: Bench) -> None:
    await bench.index.drop_stream(POD)

    with pytest.raises(StreamForgottenError):
        await bench.applier.apply([frame(0, stored(1))])
    with pytest.raises(StreamForgottenError):
        await bench.applier.is_in_step()


async def test_positional_and_map_forms_give_the_same_keys(bench: Bench) -> None:
    map_form = stored(1)
    positional = ["BlockStored", map_form["block_hashes"], None, map_form["token_ids"], 4, None, "GPU"]
    payload = msgspec.msgpack.encode([0.0, [positional], 0])
    await bench.applier.apply([Frame(seq=0, payload=payload), frame(1, removed(1))])

    assert await bench.matched(1) == 0
