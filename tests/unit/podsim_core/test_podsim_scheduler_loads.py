"""The scheduler with prompts that come from other pods, and with blocks that other pods are to read."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from podsim.core.events import BlockRemoved, BlockStored, CacheEvent
from podsim.core.scheduler import EngineSettings, Generation, Scheduler, State

SMALL = EngineSettings(
    block_size=4,
    total_blocks=33,
    max_running=2,
    max_step_tokens=64,
    prefill_tokens_per_second=1000.0,
    inter_token_seconds=0.01,
)


def generation(prompt: list[int], *, output: int = 1) -> Generation:
    answer = [900 + number for number in range(output)]
    return Generation(token_ids=prompt + answer, prompt_tokens=len(prompt), arrived_at=0.0)


def finish(scheduler: Scheduler, *generations: Generation, now: float = 0.0) -> None:
    """Run the engine until it is idle."""
    for one in generations:
        scheduler.add(one)
    while (step := scheduler.begin_step(now)) is not None:
        now = step.ends_at
        scheduler.finish_step(step, now)


def stored_counts(events: list[CacheEvent]) -> list[int]:
    return [len(event.block_hashes) for event in events if isinstance(event, BlockStored)]


def load_started(scheduler: Scheduler, one: Generation) -> None:
    """Queue a decode leg and plan a step, in which its load begins."""
    one.loads_prompt = True
    scheduler.add(one)
    scheduler.begin_step(0.0)
    assert scheduler.take_started_loads() == [one]
    assert (one.state, one.loads_prompt) == (State.LOADING, False)


def test_a_prompt_that_is_loaded_is_cached_when_it_is_there_and_only_its_last_token_is_computed() -> None:
    scheduler = Scheduler(SMALL)
    leg = generation(list(range(10)), output=2)
    load_started(scheduler, leg)
    assert (scheduler.waiting, scheduler.loading, scheduler.running) == (1, 1, 0)
    assert (scheduler.pool.free_blocks, leg.cached_tokens, leg.loaded_tokens) == (29, 10, 10)
    assert scheduler.pool.take_events() == []
    scheduler.finish_load(leg)
    assert (scheduler.loading, scheduler.loaded) == (0, 1)
    step = scheduler.begin_step(1.0)
    assert step is not None
    assert [(one, tokens) for one, tokens in step.work] == [(leg, 1)]
    assert stored_counts(scheduler.finish_step(step, 1.01).events) == [2]
    assert (leg.admitted_at, scheduler.waiting) == (1.0, 0)
    finish(scheduler, now=1.01)
    assert (leg.state, scheduler.pool.free_blocks) == (State.FINISHED, 32)
    totals = scheduler.totals
    assert (totals.queried_tokens, totals.hit_tokens, totals.loaded_tokens) == (10, 0, 10)


def test_only_what_is_not_cached_is_loaded_and_at_least_the_last_block() -> None:
    scheduler = Scheduler(SMALL)
    finish(scheduler, generation(list(range(12))))
    leg = generation(list(range(12)))
    load_started(scheduler, leg)
    assert (len(leg.blocks), leg.cached_blocks, leg.loaded_tokens, leg.cached_tokens) == (3, 2, 4, 12)


def test_loads_take_no_slot_and_run_before_what_waits() -> None:
    scheduler = Scheduler(EngineSettings(block_size=4, total_blocks=33, max_running=1, max_step_tokens=64))
    legs = [generation([number] * 10, output=1) for number in (1, 2)]
    for leg in legs:
        leg.loads_prompt = True
        scheduler.add(leg)
    plain = generation([3] * 10, output=3)
    scheduler.add(plain)
    step = scheduler.begin_step(0.0)
    assert step is not None
    assert [one for one, _ in step.work] == [plain]
    later = generation([4] * 10)
    scheduler.add(later)
    for leg in legs:
        scheduler.finish_load(leg)
    events = scheduler.finish_step(step, 0.1)
    assert events.produced == [plain]
    order: list[Generation] = []
    now = 0.1
    while (step := scheduler.begin_step(now)) is not None:
        now = step.ends_at
        order += [one for one in scheduler.finish_step(step, now).produced if one is not plain]
    assert order == [*legs, later]


def test_a_load_waits_until_its_whole_prompt_has_room() -> None:
    scheduler = Scheduler(EngineSettings(block_size=4, total_blocks=6))
    scheduler.add(generation(list(range(10)), output=2))
    step = scheduler.begin_step(0.0)
    assert step is not None
    leg = generation([9] * 12)
    leg.loads_prompt = True
    scheduler.add(leg)
    scheduler.finish_step(step, 0.1)
    step = scheduler.begin_step(0.1)
    assert step is not None
    assert (scheduler.take_started_loads(), scheduler.waiting, scheduler.waiting_to_load()) == ([], 1, 1)
    scheduler.finish_step(step, 0.2)
    scheduler.begin_step(0.2)
    assert scheduler.take_started_loads() == [leg]


def test_an_aborted_load_frees_its_blocks_when_it_ends_and_not_before() -> None:
    scheduler = Scheduler(SMALL)
    leg = generation(list(range(10)))
    load_started(scheduler, leg)
    scheduler.abort(leg)
    assert (leg.state, scheduler.waiting, scheduler.pool.free_blocks) == (State.ABORTED, 0, 29)
    scheduler.finish_load(leg)
    assert scheduler.pool.free_blocks == 32
    ready = generation(list(range(10)))
    load_started(scheduler, ready)
    scheduler.finish_load(ready)
    scheduler.abort(ready)
    assert (ready.state, scheduler.waiting, scheduler.pool.free_blocks) == (State.ABORTED, 0, 32)


def test_a_load_that_fails_ends_its_generation_or_has_it_computed() -> None:
    scheduler = Scheduler(SMALL)
    failed = generation(list(range(10)))
    load_started(scheduler, failed)
    scheduler.fail_load(failed, recompute=False)
    assert (failed.state, scheduler.waiting, scheduler.pool.free_blocks) == (State.FAILED, 0, 32)
    for cached in (0, 8):  # tokens: with none, the generation goes back into the queue
        computed = generation(list(range(10)), output=2)
        load_started(scheduler, computed)
        scheduler.fail_load(computed, recompute=True)
        step = scheduler.begin_step(0.0)
        assert step is not None
        assert step.work == [(computed, 10 - cached)]
        scheduler.finish_step(step, 0.1)
        finish(scheduler)
        assert (computed.state, scheduler.pool.free_blocks) == (State.FINISHED, 32)


def test_kept_blocks_outlive_their_generation_until_they_are_released() -> None:
    scheduler = Scheduler(SMALL)
    leg = generation(list(range(10)))
    leg.keeps_blocks = True
    finish(scheduler, leg)
    assert (leg.state, leg.blocks, scheduler.running, scheduler.pool.free_blocks) == (State.FINISHED, [1, 2, 3], 0, 29)
    assert not scheduler.pool.reset()
    scheduler.release_kept(leg)
    assert (leg.blocks, scheduler.pool.free_blocks) == ([], 32)


@dataclass
class Story:
    """An engine, the loads that are under way, and a consumer of its events that counts references."""

    scheduler: Scheduler = field(default_factory=lambda: Scheduler(SMALL))
    legs: list[Generation] = field(default_factory=list)
    loading: list[Generation] = field(default_factory=list)
    held: Counter[bytes] = field(default_factory=Counter)
    now: float = 0.0

    def steps(self, most: int) -> None:
        for _ in range(most):
            step = self.scheduler.begin_step(self.now)
            self.loading += self.scheduler.take_started_loads()
            if step is None:
                return
            self.now = step.ends_at
            self.hear(self.scheduler.finish_step(step, self.now).events)

    def hear(self, events: list[CacheEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self.held.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.held[event.block_hash] -= 1
                assert self.held[event.block_hash] >= 0

    def happens(self, what: str) -> None:
        if what == "an abort":
            self.scheduler.abort(self.legs[len(self.legs) // 2])
        elif what == "a release":
            self.release_kept()
        elif self.loading:
            ended = self.loading.pop(0)
            if what == "a load":
                self.scheduler.finish_load(ended)
            else:
                self.scheduler.fail_load(ended, recompute=what == "recomputing")

    def release_kept(self) -> None:
        for leg in self.legs:
            if leg.state is State.FINISHED and leg.blocks:
                self.scheduler.release_kept(leg)

    def end(self) -> None:
        """Let all loads come and all leases end until nobody is left."""
        while self.loading or self.scheduler.waiting or self.scheduler.running:
            while self.loading:
                self.scheduler.finish_load(self.loading.pop())
            self.release_kept()
            self.steps(1000)
        self.release_kept()
        self.hear(self.scheduler.pool.take_events())


KINDS = st.sampled_from(["plain", "prefill", "decode", "decode"])
HAPPENINGS = st.sampled_from(["a load", "a load", "a failure", "recomputing", "an abort", "a release"])


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(1, 9), KINDS, st.integers(0, 3), HAPPENINGS),
        min_size=1,
        max_size=25,
    )
)
def test_whatever_becomes_of_the_legs_no_block_is_lost_and_a_consumer_knows_what_is_cached(
    requests: list[tuple[int, int, int, str, int, str]],
) -> None:
    story = Story()
    for family, length, output, kind, pause, happening in requests:
        leg = generation([family * 100 + number for number in range(length)], output=output)
        leg.loads_prompt, leg.keeps_blocks = kind == "decode", kind == "prefill"
        story.legs.append(leg)
        story.scheduler.add(leg)
        story.steps(pause)
        story.happens(happening)
    story.end()
    assert {leg.state for leg in story.legs} <= {State.FINISHED, State.ABORTED, State.FAILED}
    pool = story.scheduler.pool
    assert pool.free_blocks == SMALL.total_blocks - 1
    for digest, count in story.held.items():
        assert bool(pool.cached_prefix([digest], max_blocks=1)) == (count > 0)
