"""However finely a batch is cut, the index holds the same after it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from kv_indexer.apply import apply_events, batches
from kv_indexer.apply.apply_events import EventApplier, root_keys
from kvmesh.blocks.source import Stream
from tests.unit.kv_indexer_follow.kv_fakes import BLOCK, CLEARED, CountingTelemetry, frame, removed, stored
from tests.unit.kvmesh_index.kv_memory_index import MemoryPrefixIndex

POD = Stream(endpoint="10.0.0.1:8000")
HASHES = st.integers(1, 12)


@st.composite
def stores(draw: st.DrawFn) -> dict[str, Any]:
    """Consecutive blocks of one prompt, from its start or somewhere within, known or not."""
    first, count = draw(st.sampled_from([1, 1, 1, 1, 2, 5, 9])), draw(st.integers(1, 12))
    # a first block that another tier has is taken for held, from one batch to the next as from part to part
    tier = draw(st.sampled_from(["GPU", "GPU", "CPU"])) if first > 1 else "GPU"
    if tier == "CPU" and draw(st.booleans()):
        return stored(*range(first, first + count), token_ids=[], block_size=0, medium=tier)
    hashes = range(first, first + count)
    return stored(*hashes, parent=first - 1 or None, medium=tier, extra_keys=extra_keys(hashes))


def extra_keys(hashes: Iterable[int]) -> list[list[str] | None]:
    """A hash is a content."""
    return [["image"] if each % 5 == 0 else None for each in hashes]


@st.composite
def windows(draw: st.DrawFn) -> dict[str, Any]:
    """Some blocks of a prompt's beginning, in a group that leaves the others out."""
    count = draw(st.integers(1, 12))
    return window(*[each for each in range(1, count + 1) if draw(st.booleans())], of=count)


def window(*kept: int, of: int) -> dict[str, Any]:
    """These blocks of the first `of` of a prompt."""
    group: dict[str, Any] = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8, "group_idx": 1}
    return stored(*kept, first_block=1, token_ids=list(range(of * BLOCK)), extra_keys=extra_keys(kept), **group)


EVENTS = st.one_of(
    windows(),
    st.lists(HASHES, min_size=1, max_size=5).map(lambda hashes: removed(*hashes, group_idx=1)),
    stores(),
    stores(),
    st.lists(HASHES, min_size=1, max_size=9).map(lambda hashes: removed(*hashes)),
    st.lists(HASHES, min_size=1, max_size=3).map(lambda hashes: removed(*hashes, medium="CPU")),
    st.sampled_from([CLEARED, {"type": "New"}, stored(1, kv_cache_spec_kind="mamba", group_idx=2)]),
)


@contextmanager
def cut_finely() -> Iterator[None]:
    """Have every batch count as long, and changes hold next to nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (apply_events, batches):
            patch.setattr(module, "BLOCKS_A_CHANGE", 11)
            patch.setattr(module, "TURN_BLOCKS", 7)
        patch.setattr(batches, "LONG_BATCH_BYTES", 0)
        patch.setattr(batches, "TURN_BYTES", 1)
        yield


async def outcome(said: list[list[dict[str, Any]]]) -> Any:
    """Apply batches; return what is held and counted."""
    index, telemetry = MemoryPrefixIndex(), CountingTelemetry()
    applier = EventApplier(
        claim=await index.claim(POD),
        roots=root_keys(hash_seed="kvmesh", model="tiny"),
        writer=index,
        telemetry=telemetry,
    )
    await applier.resume()
    for seq, events in enumerate(said):
        assert await applier.apply([frame(seq, *events)]) is None
    held = {
        (slot.tier, name): value for slot in index._slots.values() if slot.live for name, value in slot.held.items()
    }
    position = applier.position
    place = position.last_seq, position.part, position.degraded, position.groups
    return (held, place, telemetry.events), telemetry.unindexed["unknown-parent"]


@settings(max_examples=150, deadline=None)
@given(said=st.lists(st.lists(EVENTS, max_size=6), min_size=1, max_size=4))
# blocks that wait for their place: reported twice and removed, and stored before or after they had it
@example(said=[[stored(1), stored(1, 2), window(2, of=2), window(2, of=2), removed(2, group_idx=1)]])
@example(said=[[stored(1), stored(1, 2), window(1, of=2), window(1, of=1)]])
@example(said=[[window(2, of=2), stored(1, 2), window(1, of=1), window(1, 2, 3, of=3)]])
async def test_a_batch_means_the_same_in_parts(said: list[list[dict[str, Any]]]) -> None:
    whole, orphans = await outcome(said)
    assume(orphans == 0)  # a report that completes orphans counts what they held once more if it comes as a whole
    with cut_finely():
        assert await outcome(said) == (whole, 0)
