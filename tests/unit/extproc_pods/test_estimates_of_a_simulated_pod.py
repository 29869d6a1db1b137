"""What is promised comes true at a pod that schedules as vLLM does, in virtual time."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import pytest

from bench.virtual_pod import VirtualPod
from extproc.choosing.endpoint_health import EndpointHealth
from extproc.pods.endpoint import Candidate
from extproc.pods.inflight import Booking, Bookings
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.policy.priority import OverloadPolicy
from podsim.core.scheduler import EngineSettings, Generation, State
from tests.unit.extproc_choosing.pick_candidates import candidate, load
from tests.unit.extproc_choosing.room_of import Saturation

pytestmark = pytest.mark.thorough

REPORT_SECONDS = 0.2
PRIOR = 8000.0  # tokens a second; what the policy says, not what the pod does


@dataclass(slots=True, kw_only=True)
class Sent:
    """A request at the pod."""

    promised: float
    booking: Booking
    ttft: float = math.nan


class Run:
    """One pod, its requests, and what the picker makes of them."""

    def __init__(self, engine: EngineSettings, *, gated: bool) -> None:
        self.pod, self.gated, self.now = VirtualPod("a", engine), gated, 0.0
        self.estimates = LatencyEstimates(tokens_per_second=PRIOR)
        self.bookings = Bookings(tokens_per_second=PRIOR)
        self.saturation = Saturation(OverloadPolicy(), estimates=self.estimates, health=EndpointHealth())
        self.queue: list[tuple[int, int]] = []  # prompt tokens, output tokens
        self.sent: dict[Generation, Sent] = {}
        self.served: list[tuple[float, Sent]] = []
        self.last = load()

    def report(self) -> None:
        reported = self.pod.report(self.now).load
        assert reported is not None
        self.last = reported
        self.estimates.report("a", self.last, now=self.now)
        seconds = self.estimates.pace("a").first_token_seconds
        self.bookings.reported("a", self.last, first_token_seconds=seconds)
        rate = self.estimates.tokens_per_second("a")
        if rate is not None:
            self.bookings.prefill_rate("a", tokens_per_second=rate, now=self.now)

    def seen(self, prompt: int) -> Candidate:
        totals = self.bookings.totals("a", now=self.now)
        return candidate(
            "a",
            reported=self.last,
            prompt=prompt,
            booked_requests=self.bookings.booked_since("a", since=self.last.reported_at),
            open_requests=totals.requests,
            backlog_tokens=totals.uncached_tokens,
        )

    def dispatch(self, random_token: Callable[[], int]) -> None:
        while self.queue:
            prompt, output = self.queue[0]
            seen = self.seen(prompt)
            if self.gated and self.saturation.rooms([seen], ceiling=1.0, now=self.now)[0].fill >= 1.0:
                return
            del self.queue[0]
            token_ids = [random_token() for _ in range(prompt + output)]
            generation = Generation(token_ids=token_ids, prompt_tokens=prompt, arrived_at=self.now)
            self.sent[generation] = Sent(
                promised=self.saturation.ttft(seen, now=self.now),
                booking=self.bookings.book("a", now=self.now, uncached_tokens=prompt, context_tokens=prompt),
            )
            self.estimates.promised("a", seconds=self.sent[generation].promised)
            self.pod.add(generation)

    def end(self) -> None:
        for generation in self.pod.finish_step(self.now)[0].produced:
            sent = self.sent[generation]
            if generation.produced == 1:
                sent.ttft = self.now - generation.arrived_at
            if generation.state is State.FINISHED:
                del self.sent[generation]
                self.bookings.release(sent.booking)
                self.served.append((self.now, sent))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What is offered until some time."""

    until: float
    rate: float  # requests a second
    prompt: Callable[[random.Random], int]  # tokens
    output: int


def offer(made: Run, *phases: Phase) -> list[float | None]:
    """Play the phases, each to an empty queue here; return the running limit that was known at the end of each."""
    rng, step, arrival, report = random.Random(7), None, 0.0, 0.0
    limits = []
    for phase in phases:
        made.queue.clear()
        while made.now < phase.until:
            step = step or made.pod.begin_step(made.now)
            made.now = min(arrival, report, step.ends_at if step else math.inf)
            if step is not None and made.now == step.ends_at:
                made.end()
                step = None
            elif made.now == report:
                made.report()
                report += REPORT_SECONDS
            else:
                made.queue.append((phase.prompt(rng), phase.output))
                arrival += rng.expovariate(phase.rate)
            made.dispatch(lambda: rng.randrange(1 << 30))
        limits.append(made.estimates.pace("a").running_limit)
    return limits


def run(engine: EngineSettings, *, rate: float, prompt: int, output: int, gated: bool, seconds: float = 30.0) -> Run:
    """Offer `rate` requests a second with prompts of about `prompt` tokens; the first third is for learning."""
    made = Run(engine, gated=gated)

    def about(rng: random.Random) -> int:
        return 1 + int(rng.lognormvariate(math.log(prompt), 0.6))

    offer(made, Phase(until=seconds, rate=rate, prompt=about, output=output))
    made.served = [(at, sent) for at, sent in made.served if at > seconds / 3]
    return made


def means(made: Run) -> tuple[float, float]:
    return fmean(sent.promised for _, sent in made.served), fmean(sent.ttft for _, sent in made.served)


@pytest.mark.parametrize("tokens_per_second", [3000.0, 8000.0, 40_000.0])
def test_below_its_capacity_a_pod_keeps_what_is_promised_for_it(tokens_per_second: float) -> None:
    engine = EngineSettings(total_blocks=20_000, max_running=64, prefill_tokens_per_second=tokens_per_second)
    made = run(engine, rate=0.5 * tokens_per_second / 600, prompt=500, output=20, gated=True)
    promised, real = means(made)
    assert promised == pytest.approx(real, rel=0.35, abs=0.02)
    assert not made.queue


def test_at_three_times_its_places_a_pod_stays_busy_and_keeps_its_promises() -> None:
    engine = EngineSettings(total_blocks=20_000, max_running=8)  # 100 tokens take 0.8 s: 10 a second
    gated = run(engine, rate=30.0, prompt=60, output=100, gated=True)
    free = run(engine, rate=30.0, prompt=60, output=100, gated=False)
    assert len(gated.served) >= 0.95 * len(free.served)
    promised, real = means(gated)
    assert promised == pytest.approx(real, abs=0.1)
    assert real < 0.5
    assert gated.estimates.pace("a").running_limit == pytest.approx(8.0, rel=0.1)


def test_at_three_times_its_prefill_rate_a_pod_stays_busy_and_its_queue_short() -> None:
    engine = EngineSettings(total_blocks=20_000, max_running=256)
    gated = run(engine, rate=30.0, prompt=700, output=10, gated=True)
    computed = sum(sent.booking.context_tokens for _, sent in gated.served)
    assert computed >= 0.9 * 8000.0 * 20.0
    promised, real = means(gated)
    assert promised == pytest.approx(real, abs=0.5)
    assert real < 1.2


def test_short_prompts_that_the_pod_can_take_are_all_sent() -> None:
    # each step costs as much as one token's decoding: a prompt's time says nothing of what its tokens cost
    engine = EngineSettings(
        total_blocks=20_000,
        max_running=256,
        prefill_tokens_per_second=40_000.0,
        inter_token_seconds=0.01,
        max_step_tokens=8192,
    )
    made = run(engine, rate=400.0, prompt=60, output=20, gated=True, seconds=9.0)
    assert len(made.queue) < 40
    assert len(made.served) >= 0.95 * 400.0 * 6.0


def test_short_prompts_after_long_ones_are_not_held_to_what_the_long_ones_have_shown() -> None:
    engine = EngineSettings(
        total_blocks=2000, max_running=64, prefill_tokens_per_second=40_000.0, inter_token_seconds=0.01
    )
    made = Run(engine, gated=True)
    long = Phase(until=12.0, rate=3.0, prompt=lambda _: 7000, output=150)
    short = Phase(until=20.0, rate=400.0, prompt=lambda _: 60, output=4)
    [limit, _] = offer(made, long, short)
    assert limit is not None
    assert limit < 8.0
    assert len([at for at, _ in made.served if at > 14.0]) >= 0.95 * 400.0 * 6.0
    assert len(made.queue) < 40
