"""One stream's frames become ordered, exactly-once index changes."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from kv_indexer.apply.apply_events import EventApplier, Halt, root_keys
from kv_indexer.apply.batches import BLOCKS_A_CHANGE
from kv_indexer.apply.change_plan import OPERATION_BLOCKS
from kv_indexer.events.sequence import BatchAction, Frame
from kvmesh.blocks.block_keys import root_key
from kvmesh.blocks.cache_groups import CacheGroup
from kvmesh.blocks.index_changes import IndexChange
from kvmesh.blocks.source import Claim, SourceState, Stream
from kvmesh.errors import IndexUnavailableError, LeaseLostError, StreamForgottenError
from tests.unit.kv_indexer_follow.kv_fakes import CLEARED, CountingTelemetry, frame, prompt, removed, stored
from tests.unit.kvmesh_index.kv_memory_index import MemoryPrefixIndex

POD = Stream(endpoint="10.0.0.1:8000")
ROOT = root_key(hash_seed="kvmesh", model="tiny")


class Bench:
    """An applier over the in-memory index."""

    applier: EventApplier
    claim: Claim  # the last one taken

    def __init__(self) -> None:
        self.index = MemoryPrefixIndex()
        self.telemetry = CountingTelemetry()
        self.roots = root_keys(hash_seed="kvmesh", model="tiny")

    async def take(self, stream: Stream = POD) -> EventApplier:
        """An applier that has just got the claim on a stream."""
        self.claim = await self.index.claim(stream)
        applier = EventApplier(
            claim=self.claim,
            roots=self.roots,
            writer=self.index,
            telemetry=self.telemetry,
        )
        await applier.resume()
        return applier

    async def matched(self, blocks: int) -> int:
        hits = await self.index.lookup(prompt(blocks), root=ROOT)
        return hits.matched_blocks.get(POD.name if POD.endpoint in hits.ranked else POD.endpoint, 0)


@pytest.fixture
async def bench() -> Bench:
    bench = Bench()
    bench.applier = await bench.take()
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

    assert await bench.applier.apply([frame(0, stored(1)), late]) == Halt(action=BatchAction.GAP, frames=[late])
    assert await bench.matched(3) == 1


async def test_an_old_number_with_a_later_time_is_a_restart(bench: Bench) -> None:
    await bench.applier.apply([frame(0, stored(1)), frame(1)])
    reborn = frame(0, stored(5), ts=99.0)

    assert await bench.applier.apply([reborn]) == Halt(
        action=BatchAction.RESTART, frames=[reborn], sign="an old number with a later time"
    )


async def test_a_new_epoch_hides_what_the_old_one_claimed(bench: Bench) -> None:
    await bench.applier.apply([frame(0, stored(1))])
    await bench.applier.begin_epoch()

    assert await bench.matched(1) == 0
    assert bench.applier.position.last_seq == -1


async def test_another_process_goes_on_where_this_one_ended_and_knows_its_parents(bench: Bench) -> None:
    await bench.applier.apply([frame(0, stored(1))])
    successor = await bench.take()
    await successor.apply([frame(0, stored(1)), frame(1, stored(2, parent=1))])

    assert await bench.matched(2) == 2
    assert successor.position.last_seq == 1


async def test_an_indexer_that_has_lost_its_claim_changes_nothing(bench: Bench) -> None:
    await bench.applier.apply([frame(0, stored(1))])
    successor = await bench.take()

    for late in (bench.applier.apply([frame(1, stored(2, parent=1))]), bench.applier.begin_epoch()):
        with pytest.raises(LeaseLostError):
            await late
    await successor.apply([frame(1, removed(9))])
    assert (await bench.matched(2), successor.position.last_seq) == (1, 1)


async def test_an_undecodable_batch_uses_its_number_up_and_marks_the_source(bench: Bench) -> None:
    await bench.index.set_state(bench.claim, epoch=bench.applier.position.epoch, state=SourceState.LIVE)
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
    window: Mapping[str, Any] = {**stored(1), "kv_cache_spec_kind": "sliding_window", "group_idx": 1}
    placeholder = stored(1, token_ids=[], block_size=0)
    odd = stored(1, extra_keys=[[{"a": 1}]])
    events = (placeholder, stored(2, parent=77), odd, stored(1, extra_keys=[]), {"type": "New"}, window)
    await bench.applier.apply([frame(0, *events)])

    assert bench.telemetry.unindexed == Counter({"no-group-rule": 1, "placeholder": 1, "unknown-parent": 1})
    assert bench.telemetry.decode_errors == Counter(
        {"unknown-extra-key": 1, "extra-keys-mismatch": 1, "unknown-event-type": 1}
    )


async def test_a_stream_that_the_index_has_lost_is_an_error(bench: Bench) -> None:
    bench.index.drop(POD)

    with pytest.raises(StreamForgottenError):
        await bench.applier.is_in_step()
    with pytest.raises(StreamForgottenError):
        await bench.applier.resume()


async def test_positional_and_map_forms_give_the_same_keys(bench: Bench) -> None:
    map_form = stored(1)
    positional = ["BlockStored", map_form["block_hashes"], None, map_form["token_ids"], 4, None, "GPU"]
    payload = msgspec.msgpack.encode([0.0, [positional], 0])
    await bench.applier.apply([Frame(seq=0, payload=payload), frame(1, removed(1))])

    assert await bench.matched(1) == 0


OTHER, THIRD = Stream(endpoint="10.0.0.2:8000"), Stream(endpoint="10.0.0.3:8000")
SECOND_PORT, SECOND_RANK = Stream(endpoint="10.0.0.2:8001"), Stream(endpoint="10.0.0.1:8000", dp_rank=1)
# as elsewhere, engine hashes are the blocks' places in the prompt; 101 … is the same prompt under another hash seed


async def orphans_of(bench: Bench) -> EventApplier:
    """A stream that knows how its prompts begin and has a store without its parent."""
    await bench.applier.apply([frame(0, stored(1)), frame(1, stored(4, parent=3))])
    assert bench.applier.orphans == 1
    return bench.applier


async def holds(bench: Bench, stream: Stream, *events: Mapping[str, Any]) -> EventApplier:
    """Another stream that has stored this."""
    other = await bench.take(stream)
    await other.apply([frame(0, *events)])
    return other


@pytest.mark.parametrize("streams", [(OTHER, THIRD), (SECOND_RANK,)], ids=["two-pods", "the-pod-itself"])
async def test_a_lost_parent_is_taken_from_pods_that_agree_or_from_the_pod_itself(
    bench: Bench, streams: tuple[Stream, ...]
) -> None:
    for stream in streams:
        await holds(bench, stream, stored(1, 2, 3))
    applier = await orphans_of(bench)

    assert await applier.adopt_orphans()
    assert applier.orphans == 0
    await applier.apply([frame(2, stored(2, 3, parent=1))])
    assert (await bench.matched(9), applier.position.last_seq) == (4, 2)


@pytest.mark.parametrize("streams", [(OTHER,), (OTHER, SECOND_PORT)], ids=["one", "two-ports-of-one"])
async def test_one_pods_word_is_not_enough_for_another(bench: Bench, streams: tuple[Stream, ...]) -> None:
    for stream in streams:
        await holds(bench, stream, stored(1, 2, 3))
    applier = await orphans_of(bench)

    assert (await applier.adopt_orphans(), applier.orphans) == (False, 1)


@pytest.mark.parametrize("liar", [OTHER, Stream(endpoint="10.0.0.4:8000")])
async def test_a_parent_about_which_pods_disagree_is_not_taken(bench: Bench, liar: Stream) -> None:
    lie = stored(3, first_block=9)  # a block that begins a prompt, under the hash of one that does not
    for stream in (OTHER, THIRD, SECOND_RANK):
        await holds(bench, stream, stored(1, 2), lie if stream is liar else stored(3, parent=2))
    if liar is not OTHER:
        await holds(bench, liar, stored(1, 2), lie)
    applier = await orphans_of(bench)

    assert (await applier.adopt_orphans(), applier.orphans) == (False, 1)


async def test_pods_that_share_none_of_our_blocks_are_not_believed(bench: Bench) -> None:
    for stream in (OTHER, THIRD):
        await holds(bench, stream, stored(11, 2, 3, first_block=1))
    applier = await orphans_of(bench)

    assert (await applier.adopt_orphans(), applier.orphans) == (False, 1)


async def test_a_pod_that_contradicts_us_once_is_not_believed(bench: Bench) -> None:
    await holds(bench, THIRD, stored(1, 2, 3))
    await holds(bench, OTHER, stored(1, 2, 3), stored(50, first_block=7))
    applier = await orphans_of(bench)
    await applier.apply([frame(2, stored(50, first_block=8))])

    assert (await applier.adopt_orphans(), applier.orphans) == (False, 1)


async def test_a_verdict_on_another_pod_holds_until_its_epoch_ends(bench: Bench) -> None:
    await holds(bench, THIRD, stored(1, 2, 3), stored(70, 71, 72, first_block=1))
    other = await holds(bench, OTHER, stored(1, 2, 3))
    applier = await orphans_of(bench)
    assert await applier.adopt_orphans()
    await other.apply([frame(1, removed(1))])  # nothing in common any more
    await applier.apply([frame(2, stored(9, parent=3))])
    assert (applier.orphans, await applier.adopt_orphans()) == (0, False)  # known by now, without asking

    await applier.apply([frame(3, stored(8, parent=2))])
    assert await applier.adopt_orphans()
    await other.begin_epoch()
    await other.apply([frame(0, stored(70, 71, 72, first_block=1))])
    await applier.apply([frame(4, stored(73, parent=72))])
    assert (await applier.adopt_orphans(), applier.orphans) == (False, 1)


async def test_an_orphan_that_was_removed_meanwhile_never_appears(bench: Bench) -> None:
    await holds(bench, SECOND_RANK, stored(1, 2, 3))
    applier = await orphans_of(bench)
    await applier.apply([frame(2, removed(4))])
    await applier.adopt_orphans()

    assert await bench.index.find_block_keys(POD, {(4, 0)}) == {}


async def test_a_new_epoch_forgets_orphans(bench: Bench) -> None:
    applier = await orphans_of(bench)
    await applier.begin_epoch()

    assert applier.orphans == 0


async def test_a_change_that_is_planned_twice_never_has_its_orphans_twice(bench: Bench) -> None:
    await bench.applier.apply([frame(0, stored(1))])
    claim = Claim(stream=POD, fence=bench.index.entries[POD].fence)
    epoch = bench.applier.position.epoch
    # the index is a batch ahead of what the applier knows: the answer was lost
    late = IndexChange(epoch=epoch, previous_seq=0, last_seq=1, last_ts=1.0, last_crc=0)
    await bench.index.apply(claim, late)
    await bench.applier.apply([frame(1), frame(2, stored(3, parent=2))])
    assert bench.applier.orphans == 1

    await bench.applier.apply([frame(3, stored(2, parent=1))])
    assert await bench.matched(9) == 3
    await bench.applier.apply([frame(4, removed(3))])
    assert await bench.matched(9) == 2


async def test_a_report_is_known_as_one_by_an_indexer_that_did_not_see_the_blocks_stored(bench: Bench) -> None:
    await bench.applier.apply([frame(0, stored(1, 2))])
    successor = await bench.take()
    await successor.apply([frame(1, stored(1, 2)), frame(2, removed(2))])

    assert await bench.matched(2) == 1


async def test_the_group_catalogue_outlives_the_indexer(bench: Bench) -> None:
    window: Mapping[str, Any] = {**stored(1), "kv_cache_spec_kind": "sliding_window", "group_idx": 1}
    await bench.applier.apply([frame(0, stored(1), window)])
    successor = await bench.take()

    assert successor.position.groups == {
        0: CacheGroup(kind="full_attention", block_size=4),
        1: CacheGroup(kind="sliding_window", block_size=4),
    }
    await successor.apply([frame(1, removed(1, group_idx=1))])
    assert bench.telemetry.unindexed["removal-of-unindexed"] == 1
    assert await bench.matched(1) == 1


WINDOW: Mapping[str, Any] = {
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 8,
    "group_idx": 1,
}


async def test_another_process_goes_on_with_all_groups(bench: Bench) -> None:
    await bench.applier.apply([frame(0, stored(1, 2), stored(1, 2, **WINDOW))])
    successor = await bench.take()
    assert successor.position.last_seq == 0
    children = [stored(3, parent=2, **more) for more in ({}, WINDOW)]
    await successor.apply([frame(1, removed(1, 2, group_idx=1)), frame(2, *children)])

    assert bench.telemetry.unindexed == Counter()
    assert await bench.matched(3) == 0  # the window needs two blocks
    await successor.apply([frame(3, stored(1, 2, **WINDOW))])
    assert await bench.matched(3) == 3


async def test_a_stream_whose_other_groups_were_left_out_begins_anew(bench: Bench) -> None:
    """An indexer of before groups were indexed has followed it: what the window holds is not known."""
    groups = {
        0: CacheGroup(kind="full_attention", block_size=4),
        1: CacheGroup(kind="sliding_window", block_size=4, sliding_window=8),
    }
    await bench.applier.apply([frame(0, stored(1))])
    at = bench.applier.position
    change = IndexChange(epoch=at.epoch, previous_seq=0, last_seq=1, last_ts=1.0, last_crc=1, groups=groups)
    await bench.index.apply(bench.claim, change)
    successor = await bench.take()

    assert (successor.position.last_seq, successor.position.groups) == (-1, {})
    await successor.apply([frame(0, stored(1), stored(1, **WINDOW)), frame(1)])
    assert (await bench.take()).position.last_seq == 1


async def test_blocks_that_a_window_has_lost_and_that_are_computed_anew_are_counted_twice(bench: Bench) -> None:
    """Full attention held them all the time: a hit of nothing is no report of what is there."""
    both = stored(1, 2), stored(1, 2, **WINDOW)
    await bench.applier.apply([frame(0, *both), frame(1, removed(1, 2, group_idx=1)), frame(2, *both)])
    await bench.applier.apply([frame(3, removed(1, 2))])
    assert await bench.matched(2) == 2


async def test_a_report_of_all_groups_is_not_counted(bench: Bench) -> None:
    both = stored(1, 2), stored(1, 2, **WINDOW)
    await bench.applier.apply([frame(0, *both), frame(1, *both), frame(2, removed(2))])
    assert await bench.matched(2) == 1
    await bench.applier.apply([frame(3, stored(2, parent=1)), frame(4, removed(1, 2, group_idx=1))])
    assert await bench.matched(2) == 0


async def test_an_offloaded_block_is_found_in_the_index_by_another_indexer(bench: Bench) -> None:
    await bench.applier.apply([frame(0, stored(1, 2))])
    successor = await bench.take()
    placeholders = [stored(each, token_ids=[], block_size=0, medium="CPU", group_idx=None) for each in (1, 2)]
    await successor.apply([frame(1, *placeholders), frame(2, removed(1, 2))])

    assert await bench.matched(2) == 2
    await successor.apply([frame(3, removed(2, medium="CPU"))])
    assert await bench.matched(2) == 1


async def test_a_report_of_what_is_there_does_not_add_references(bench: Bench) -> None:
    await bench.applier.apply([frame(0, stored(1, 2)), frame(1, stored(1, 2)), frame(2, removed(2))])
    assert await bench.matched(2) == 1

    await bench.applier.apply([frame(3, stored(1)), frame(4, removed(1))])  # a lone block of a reporting publisher
    assert await bench.matched(2) == 0


async def test_a_report_of_what_the_index_had_missed_is_stored(bench: Bench) -> None:
    await bench.applier.apply([frame(0, stored(1)), frame(1, stored(1, 2, 3))])

    assert await bench.matched(3) == 3


@pytest.mark.parametrize(
    ("event", "reason"), [({**removed(1), "block_hashes": "x"}, "undecodable-event"), ({"type": "New"}, "")]
)
async def test_an_event_that_may_have_been_a_removal_makes_the_source_inexact(
    bench: Bench, event: Mapping[str, Any], reason: str
) -> None:
    await bench.applier.apply([frame(0, stored(1)), frame(1, event)])

    assert bench.applier.position.degraded == reason


LOST_REMOVAL: Mapping[str, Any] = {**removed(1), "block_hashes": "x"}


class CrashingIndex(MemoryPrefixIndex):
    """Nothing more can be written once a change is in."""

    async def set_state(self, claim: Claim, **_: Any) -> None:
        raise IndexUnavailableError("gone")


async def test_an_indexer_that_ends_right_after_a_change_has_said_that_the_source_is_inexact(bench: Bench) -> None:
    bench.index = CrashingIndex()
    bench.applier = await bench.take()
    await bench.applier.apply([frame(0, stored(1)), frame(1, LOST_REMOVAL)])
    successor = await bench.take()

    assert (successor.position.last_seq, successor.position.degraded) == (1, "undecodable-event")


async def test_a_removal_that_was_lost_after_a_clear_marks_the_new_epoch(bench: Bench) -> None:
    await bench.applier.apply([frame(0, LOST_REMOVAL), frame(1, CLEARED), frame(2, stored(1)), frame(3, LOST_REMOVAL)])
    assert (await bench.take()).position.degraded == "undecodable-event"

    bench.applier = await bench.take()
    await bench.applier.apply([frame(4, CLEARED), frame(5, CLEARED, LOST_REMOVAL)])  # on either side of that clear
    assert (await bench.take()).position.degraded == bench.applier.position.degraded == "undecodable-event"


async def test_what_was_unreadable_before_a_clear_does_not_count(bench: Bench) -> None:
    await bench.applier.apply([Frame(seq=0, payload=b"garbage"), frame(1, {"type": "AllBlocksCleared"})])
    assert bench.applier.position.degraded == ""

    await bench.applier.apply([frame(2, {"type": "AllBlocksCleared"}), Frame(seq=3, payload=b"")])
    assert bench.applier.position.degraded == "undecodable-batch"


async def test_what_the_index_had_no_room_for_makes_the_source_inexact(bench: Bench) -> None:
    bench.index = MemoryPrefixIndex(max_blocks_per_source=2)
    bench.applier = await bench.take()
    await bench.applier.apply([frame(0, stored(1, 2, 3))])

    assert (await bench.matched(3), bench.applier.position.degraded) == (2, "source-full")
    assert bench.telemetry.unindexed == {"source-full": 1}


async def test_what_the_index_had_no_room_for_before_a_clear_does_not_count(bench: Bench) -> None:
    bench.index = MemoryPrefixIndex(max_blocks_per_source=2)
    bench.applier = await bench.take()
    await bench.applier.apply([frame(0, stored(1, 2, 3)), frame(1, CLEARED), frame(2, stored(1))])

    assert (await bench.matched(3), bench.applier.position.degraded) == (1, "")
    assert (await bench.take()).position.degraded == ""
    assert bench.telemetry.unindexed == {}


async def test_a_removal_of_a_block_that_is_not_there_changes_nothing(bench: Bench) -> None:
    await bench.applier.apply([frame(0, removed(1), stored(1), removed(2), removed(2))])

    assert await bench.matched(1) == 1


async def test_one_change_holds_no_more_batches_than_keep_it_short(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[tuple[int, int]] = []
    apply = bench.index.apply

    async def noting(claim: Claim, change: IndexChange) -> Any:
        changes.append((change.previous_seq, change.last_seq))
        return await apply(claim, change)

    monkeypatch.setattr(bench.index, "apply", noting)
    half = BLOCKS_A_CHANGE // 2 - OPERATION_BLOCKS
    long = [stored(*range(first, first + half)) for first in (1, half + 1, 2 * half + 1)]
    first_two = [frame(0, long[0]), frame(1, removed(*range(1, half + 1)))]  # removals take their time, too
    await bench.applier.apply([*first_two, frame(2, long[1]), frame(3), frame(4, long[2], stored(1), stored(2))])

    assert changes == [(-1, 1), (1, 3), (3, 4)]
