import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podsim.core.block_hash import event_hash
from podsim.core.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from podsim.core.scheduler import EngineSettings, Generation, Scheduler, State

HISTORY = json.loads((Path(__file__).parents[2] / "data" / "podsim_vllm_cache_history.json").read_text())["prompts"]
SMALL = EngineSettings(
    block_size=4,
    total_blocks=33,
    max_running=2,
    max_step_tokens=64,
    prefill_tokens_per_second=1000.0,
    inter_token_seconds=0.01,
)


def generation(
    prompt: list[int], *, output: int = 1, arrived_at: float = 0.0, cache_salt: str | None = None
) -> Generation:
    answer = [900 + number for number in range(output)]
    return Generation(
        token_ids=prompt + answer, prompt_tokens=len(prompt), arrived_at=arrived_at, cache_salt=cache_salt
    )


def finish(scheduler: Scheduler, *generations: Generation, now: float = 0.0) -> list[CacheEvent]:
    """Run the engine until it is idle and return all events."""
    for one in generations:
        scheduler.add(one)
    events: list[CacheEvent] = []
    while (step := scheduler.begin_step(now)) is not None:
        now = step.ends_at
        events += scheduler.finish_step(step, now).events
    return events


def stored_counts(events: list[CacheEvent]) -> list[int]:
    return [len(event.block_hashes) for event in events if isinstance(event, BlockStored)]


def test_the_cache_behaves_as_vllms_did_with_the_same_prompts_event_by_event() -> None:
    scheduler = Scheduler(EngineSettings(block_size=32, total_blocks=80))
    prompts: list[list[int]] = []
    for index, recorded in enumerate(HISTORY):
        base = [] if recorded["base"] is None else prompts[recorded["base"]]
        fresh = [(index * 7919 + position * 104729) % 4000 + 4 for position in range(recorded["fresh_tokens"])]
        prompts.append(base[: recorded["prefix_tokens"]] + fresh)
        one = generation(prompts[-1])
        events = finish(scheduler, one)
        flat = [
            ["BlockRemoved", [event_hash(event.block_hash)], None, 0]
            if isinstance(event, BlockRemoved)
            else [
                "BlockStored",
                [event_hash(digest) for digest in event.block_hashes],
                None if event.parent_hash is None else event_hash(event.parent_hash),
                len(event.token_ids),
            ]
            for event in events
            if not isinstance(event, AllBlocksCleared)
        ]
        seen = {
            "cached_tokens": one.cached_tokens,
            "stored_blocks": sum(stored_counts(events)),
            "removed_blocks": sum(isinstance(event, BlockRemoved) for event in events),
            "events_sha256": hashlib.sha256(json.dumps(flat).encode()).hexdigest(),
        }
        assert seen == {key: recorded[key] for key in seen}, f"prompt {index}"


def test_an_exact_repeat_hits_all_but_its_last_block_and_stores_that_one_again() -> None:
    scheduler = Scheduler(SMALL)
    first, again = generation(list(range(12))), generation(list(range(12)))
    assert stored_counts(finish(scheduler, first)) == [3]
    events = finish(scheduler, again)
    assert again.cached_tokens == 8
    assert [(len(e.block_hashes), e.token_ids) for e in events if isinstance(e, BlockStored)] == [(1, [8, 9, 10, 11])]


def test_a_prompt_one_token_longer_hits_every_full_block() -> None:
    scheduler = Scheduler(SMALL)
    finish(scheduler, generation(list(range(12))))
    longer = generation([*range(12), 99])
    assert stored_counts(finish(scheduler, longer)) == []
    assert longer.cached_tokens == 12


def test_blocks_that_decoding_fills_are_cached_once_the_next_token_is_computed() -> None:
    scheduler = Scheduler(SMALL)
    # 8 prompt tokens: the fourth output token fills block 3, and only a fifth one has it computed
    assert stored_counts(finish(scheduler, generation(list(range(8)), output=4))) == [2]
    assert stored_counts(finish(scheduler, generation(list(range(50, 58)), output=5))) == [2, 1]


def test_equal_prompts_in_one_step_share_blocks_as_in_vllm() -> None:
    scheduler = Scheduler(SMALL)
    first, second = generation(list(range(10))), generation(list(range(10)))
    assert stored_counts(finish(scheduler, first, second)) == [2]
    assert (first.cached_tokens, second.cached_tokens) == (0, 8)


def test_a_salt_separates_equal_prompts() -> None:
    scheduler = Scheduler(SMALL)
    finish(scheduler, generation(list(range(10))))
    salted = generation(list(range(10)), cache_salt="tenant-a")
    events = finish(scheduler, salted)
    assert salted.cached_tokens == 0
    assert [event.cache_salt for event in events if isinstance(event, BlockStored)] == ["tenant-a"]


def test_a_full_report_announces_hit_blocks_again_from_the_root() -> None:
    scheduler = Scheduler(SMALL)
    finish(scheduler, generation(list(range(10))))
    reporting = generation([*range(10), 11, 12])
    reporting.reports_hits = True
    events = [event for event in finish(scheduler, reporting) if isinstance(event, BlockStored)]
    assert [(event.parent_hash is None, len(event.block_hashes)) for event in events] == [(True, 2), (False, 1)]


def test_prefill_takes_its_uncached_tokens_at_the_prefill_rate() -> None:
    scheduler = Scheduler(SMALL)
    scheduler.add(generation(list(range(50))))
    step = scheduler.begin_step(5.0)
    assert step is not None
    assert step.ends_at == 5.05
    scheduler.finish_step(step, 5.05)
    scheduler.add(generation([*range(48), 999, 998]))
    step = scheduler.begin_step(6.0)
    assert step is not None
    assert step.ends_at == 6.01, "only two tokens are new: the step takes the shortest time"


def test_a_long_prompt_is_computed_in_chunks_and_gives_its_token_after_the_last() -> None:
    scheduler = Scheduler(SMALL)
    one = generation(list(range(100)))
    scheduler.add(one)
    first = scheduler.begin_step(0.0)
    assert first is not None
    outcome = scheduler.finish_step(first, 0.064)
    assert (outcome.produced, stored_counts(outcome.events)) == ([], [16])
    second = scheduler.begin_step(0.064)
    assert second is not None
    outcome = scheduler.finish_step(second, 0.1)
    assert (outcome.produced, stored_counts(outcome.events)) == ([one], [9])
    assert (one.state, one.first_token_at) == (State.FINISHED, 0.1)


def test_decoding_gives_one_token_a_step() -> None:
    scheduler = Scheduler(SMALL)
    one = generation([1, 2, 3], output=3)
    scheduler.add(one)
    ends = []
    now = 0.0
    while (step := scheduler.begin_step(now)) is not None:
        now = step.ends_at
        scheduler.finish_step(step, now)
        ends.append((round(now, 6), one.produced))
    assert ends == [(0.01, 1), (0.02, 2), (0.03, 3)]


def test_sequences_beyond_the_slots_wait_in_order() -> None:
    scheduler = Scheduler(SMALL)
    generations = [generation([number], output=2) for number in range(4)]
    for one in generations:
        scheduler.add(one)
    step = scheduler.begin_step(0.0)
    assert step is not None
    assert ([one for one, _ in step.work], scheduler.running, scheduler.waiting) == (generations[:2], 2, 2)


def test_a_sequence_waits_while_blocks_are_short() -> None:
    scheduler = Scheduler(SMALL)  # 32 usable blocks
    large, small = generation(list(range(60)), output=4), generation(list(range(500, 600)))
    scheduler.add(large)
    scheduler.add(small)
    step = scheduler.begin_step(0.0)
    assert step is not None
    assert (scheduler.running, scheduler.waiting) == (1, 1)
    scheduler.abort(large)
    scheduler.finish_step(step, 0.1)
    finish(scheduler)
    assert small.state is State.FINISHED


def test_the_youngest_sequence_steps_back_when_decoding_finds_no_block() -> None:
    settings = EngineSettings(block_size=4, total_blocks=9, max_running=4, max_step_tokens=64)
    scheduler = Scheduler(settings)  # 8 usable blocks
    old, young = generation(list(range(16)), output=8), generation(list(range(50, 65)), output=8)
    finish(scheduler, old, young)
    assert (old.state, young.state) == (State.FINISHED, State.FINISHED)
    assert scheduler.totals.preemptions > 0
    assert (old.produced, young.produced, scheduler.pool.free_blocks) == (8, 8, 8)


def test_an_aborted_sequence_frees_its_blocks_at_once_and_gives_no_token() -> None:
    scheduler = Scheduler(SMALL)
    running, waiting = generation(list(range(8)), output=9), generation([1])
    scheduler.add(running)
    step = scheduler.begin_step(0.0)
    assert step is not None
    scheduler.add(waiting)
    scheduler.abort(waiting)
    scheduler.abort(running)
    assert (scheduler.running, scheduler.waiting, scheduler.pool.usage) == (0, 0, 0.0)
    assert scheduler.finish_step(step, 0.1).produced == []
    assert scheduler.begin_step(0.1) is None


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 9), st.integers(0, 3)),
        min_size=1,
        max_size=25,
    )
)
def test_a_consumer_that_counts_references_always_knows_exactly_what_is_cached(
    requests: list[tuple[int, int, int, int]],
) -> None:
    scheduler = Scheduler(SMALL)
    held: Counter[bytes] = Counter()
    active: list[Generation] = []
    now = 0.0
    for family, length, output, steps in requests:
        one = generation([family * 100 + number for number in range(length)], output=output)
        active.append(one)
        scheduler.add(one)
        for _ in range(steps):
            step = scheduler.begin_step(now)
            if step is None:
                break
            now = step.ends_at
            apply(held, scheduler.finish_step(step, now).events)
        if steps == 3:
            scheduler.abort(active.pop(0))
    apply(held, finish(scheduler, now=now))
    assert scheduler.pool.free_blocks == SMALL.total_blocks - 1
    for digest, count in held.items():
        assert bool(scheduler.pool.cached_prefix([digest], max_blocks=1)) == (count > 0)


def apply(held: Counter[bytes], events: list[CacheEvent]) -> None:
    for event in events:
        if isinstance(event, BlockStored):
            held.update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            held[event.block_hash] -= 1
            assert held[event.block_hash] >= 0


def test_a_step_takes_longer_with_each_sequence_and_each_token_that_it_attends_to() -> None:
    settings = replace(SMALL, stream_seconds=0.001, context_token_seconds=0.0001)
    plain, costly = (Scheduler(each) for each in (SMALL, settings))
    for scheduler in (plain, costly):
        for number in range(2):
            scheduler.add(generation(list(range(100 * number, 100 * number + 12)), output=3))
    first, dearer = plain.begin_step(0.0), costly.begin_step(0.0)
    assert first is not None and dearer is not None
    assert first.ends_at == pytest.approx(24 / 1000)  # the prompts take longer than the weights
    assert dearer.ends_at == pytest.approx(24 / 1000 + 2 * 0.001 + 24 * 0.0001)
    for scheduler, step in ((plain, first), (costly, dearer)):
        scheduler.finish_step(step, step.ends_at)
    second, dearer = plain.begin_step(0.0), costly.begin_step(0.0)
    assert second is not None and dearer is not None
    assert second.ends_at == pytest.approx(0.01)
    assert dearer.ends_at == pytest.approx(0.01 + 2 * 0.001 + 26 * 0.0001)  # each reads one token more
