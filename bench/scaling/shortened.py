"""The step load of virtual time, so much shorter that real processes can play it, and its oracle.

All that can be is shorter by the same factor: the load, a pod's start, the stabilisation window, what is not counted.
The signal's own times are not: its buckets of 5 s, of which three show a step, the two minutes of its level, a third
fewer a minute. So a shortened load is harder than the long one. Requests do not come more often than in the long one,
and their lengths differ less, or chance would decide so short a run.
"""

from collections.abc import Sequence

from bench.scaling.arms import ORACLE, SETTINGS, made
from bench.scaling.loads import Request, requests
from bench.scaling.plan import STANDARD, Engine, Mix, Plan
from bench.scaling.world import World

TARGET = 0.95
BATCH_TOKENS = 256  # that a step of a simulated pod computes at most
PROMPT_TOKENS, ANSWER_TOKENS, SPREAD = 1000.0, 8.0, 0.3
RATE = 2000.0  # prompt tokens a second of a simulated pod
INTER_TOKEN_SECONDS = 0.008  # of a simulated pod's stream alone
SLOT_SECONDS = 30.0  # of who knows all
NOT_PROMISED_SECONDS = 10.0  # a token


def shortened(faster: float) -> Plan:
    """Return the plan, so many times shorter."""
    return Plan(
        engine=Engine(
            tokens_per_second=RATE,
            alone_seconds=INTER_TOKEN_SECONDS,
            stream_seconds=1e-6,
            prompt_seconds=BATCH_TOKENS / RATE,
        ),
        start_seconds=STANDARD.start_seconds / faster,
        sync_seconds=2.0,
        warm_seconds=STANDARD.warm_seconds / faster,
        ttft_seconds=STANDARD.ttft_seconds,
        inter_token_seconds=NOT_PROMISED_SECONDS,
        end_seconds=STANDARD.ttft_seconds,
        window_seconds=STANDARD.window_seconds / faster,
        slot_seconds=SLOT_SECONDS,
        peak=STANDARD.peak,
        seconds={"step": STANDARD.seconds["step"] / faster},
    )


def coming(plan: Plan, *, seed: int) -> list[Request]:
    """Return the load's requests: the work of the long one's, in pods."""
    mix = Mix(
        uncached_tokens=PROMPT_TOKENS, cached_tokens=0.0, answer_tokens=ANSWER_TOKENS, busy_pods=1.0, spread=SPREAD
    )
    return list(requests(mix, "step", plan, seed=seed))


def virtual(plan: Plan, load: Sequence[Request], *, arm: str, setting: float = 0.0) -> tuple[float, float]:
    """Return the share of promises kept and the pod seconds of an arm in virtual time, on the very same requests."""
    seconds = plan.seconds["step"]
    found = World(plan=plan, arm=made(arm, setting, load, plan=plan, seconds=seconds), seconds=seconds).run(load)
    return found.kept / found.requests, found.pod_seconds


def cheapest_oracle(plan: Plan, load: Sequence[Request]) -> tuple[float, float, float]:
    """Return the utilisation, the share kept and the pod seconds of the cheapest oracle that keeps the target."""
    played = [(setting, *virtual(plan, load, arm=ORACLE, setting=setting)) for setting in SETTINGS[ORACLE]]
    return min((each for each in played if each[1] >= TARGET), key=lambda each: each[2])
