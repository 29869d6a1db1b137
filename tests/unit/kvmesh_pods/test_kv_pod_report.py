"""How many blocks a pod must have filled: never more than it did, however its requests were made up."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.pods.pod_report import EngineCounters, is_restart, least_new_blocks, sum_counters

NOTHING = EngineCounters(
    prompt_tokens=0,
    cached_prompt_tokens=0,
    generated_tokens=0,
    prefills=0,
    unfinished=0,
    queried_tokens=0,
    hit_tokens=0,
)


def served(before: EngineCounters, *, prompt: int, hit: int = 0, generated: int = 1) -> EngineCounters:
    """One more request, from look-up to last token."""
    cached = before.cached_prompt_tokens
    return EngineCounters(
        prompt_tokens=before.prompt_tokens + prompt,
        cached_prompt_tokens=None if cached is None else cached + hit,
        generated_tokens=before.generated_tokens + generated,
        prefills=before.prefills + 1,
        unfinished=before.unfinished,
        queried_tokens=before.queried_tokens + prompt,
        hit_tokens=before.hit_tokens + hit,
    )


@given(
    block_size=st.integers(1, 64),
    requests=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 20), st.integers(1, 200)), max_size=12),
    running=st.lists(st.tuples(st.integers(0, 63), st.integers(0, 100)), max_size=3),
    says_cached=st.booleans(),
)
def test_a_pod_is_never_expected_to_have_filled_more_blocks_than_it_did(
    block_size: int,
    requests: list[tuple[int, int, int]],
    running: list[tuple[int, int]],
    says_cached: bool,
) -> None:
    before = replace(NOTHING, cached_prompt_tokens=0 if says_cached else None, unfinished=len(running))
    after, filled = before, 0
    for in_last_block, generated in running:  # under way since before, with a last block that is partly full
        after = replace(after, generated_tokens=after.generated_tokens + generated)
        filled += (in_last_block % block_size + generated) // block_size
    for prompt, hit_blocks, generated in requests:
        hit = min(hit_blocks, (prompt - 1) // block_size) * block_size  # the last token is always computed
        after = served(after, prompt=prompt, hit=hit, generated=generated)
        filled += (prompt + generated - 1) // block_size - hit // block_size

    assert least_new_blocks(before, after, block_size=block_size) <= filled


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([], 0),
        ([{"prompt": 15}] * 1000, 0),  # shorter than a block, however many
        ([{"prompt": 1000, "hit": 992}] * 100, 0),  # found as a whole
        ([{"prompt": 1000}], 61),  # 62 blocks and 8 tokens: one block of doubt
        ([{"prompt": 1000}] * 10, 615),
        ([{"prompt": 5, "generated": 100}], 5),  # decoding fills blocks, too
        ([{"prompt": 1000}] + [{"prompt": 5}] * 50, 30),  # each short prompt brings a doubt of a block
    ],
)
def test_blocks_that_must_have_been_filled_are_counted(requests: list[dict[str, int]], expected: int) -> None:
    after = NOTHING
    for request in requests:
        after = served(after, **request)

    assert least_new_blocks(NOTHING, after, block_size=16) == expected


def test_a_prefill_that_was_under_way_at_the_first_look_counts_for_nothing() -> None:
    # its look-up is counted before, its tokens are afterwards, and its blocks have been announced in between
    before = replace(NOTHING, queried_tokens=100_000, unfinished=1)
    after = replace(before, prompt_tokens=100_000, prefills=1, generated_tokens=1, unfinished=0)

    assert least_new_blocks(before, after, block_size=16) == 0


def test_a_request_that_is_looked_up_again_and_again_while_it_waits_counts_once() -> None:
    after = replace(NOTHING, queried_tokens=500_000, hit_tokens=490_000, unfinished=1)

    assert least_new_blocks(NOTHING, after, block_size=16) == 0


def test_without_a_prefix_cache_every_prompt_token_is_computed() -> None:
    after = replace(NOTHING, prompt_tokens=1000, prefills=1, cached_prompt_tokens=None)

    assert least_new_blocks(NOTHING, after, block_size=16, caches=False) == 61


def test_counters_that_fell_tell_of_a_restart() -> None:
    assert is_restart(served(NOTHING, prompt=10), NOTHING)
    assert not is_restart(NOTHING, served(NOTHING, prompt=10))


def test_engines_add_up_and_what_one_does_not_say_is_not_said() -> None:
    one, two = served(NOTHING, prompt=10, hit=4), served(NOTHING, prompt=20, hit=8, generated=3)

    assert sum_counters([one, two]) == EngineCounters(
        prompt_tokens=30,
        cached_prompt_tokens=12,
        generated_tokens=4,
        prefills=2,
        unfinished=0,
        queried_tokens=30,
        hit_tokens=12,
    )
    total = sum_counters([one, replace(two, cached_prompt_tokens=None)])
    assert total is not None
    assert total.cached_prompt_tokens is None
    assert sum_counters([]) is None
