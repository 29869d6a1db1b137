"""The stores of the benchmark of hybrid models are those of vLLM."""

import array

import msgspec

from bench.hybrid_index import BLOCKS, KEPT, LAYOUTS, PROMPT_BLOCKS, frames, least, prompt_tokens
from bench.kv_apply import BLOCK_SIZE, CHAIN


def test_a_window_that_keeps_some_blocks_stores_the_last_hashes_and_all_tokens() -> None:
    of_one, keeps_all, keeps_some = (
        msgspec.msgpack.decode(frames(layout, batches=1, source=3)[0].payload)[1] for layout in LAYOUTS
    )
    (full,) = of_one
    assert [[len(event["block_hashes"]) for event in events] for events in (keeps_all, keeps_some)] == [
        [BLOCKS, BLOCKS],
        [BLOCKS, KEPT],
    ]
    for events in (keeps_all, keeps_some):
        assert events[0] == full
        assert events[1]["token_ids"] == full["token_ids"]
        assert events[1]["block_hashes"] == full["block_hashes"][-len(events[1]["block_hashes"]) :]


def test_the_prompt_that_is_looked_up_is_the_one_that_was_stored() -> None:
    stored = [
        token
        for frame in frames(LAYOUTS[0], batches=CHAIN, source=0)
        for token in msgspec.msgpack.decode(frame.payload)[1][0]["token_ids"]
    ]
    assert array.array("I", prompt_tokens(source=0))[: PROMPT_BLOCKS * BLOCK_SIZE].tolist() == stored


def test_the_least_of_the_rounds_counts() -> None:
    assert least([{"a": 2.004, "b": 1.0}, {"a": 3.0, "b": 0.5}]) == {"a": 2.0, "b": 0.5}
