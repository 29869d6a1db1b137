"""What one more stream costs is learned from reports that differ."""

import json
import random
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.pods.step_times import StepTimes

GPU_STEPS = Path(__file__).parents[3] / "bench/results/2026-11-26-gpu-steps.json"


def learned(*running: float, alone: float = 0.01, slope: float = 0.0005) -> StepTimes:
    steps = StepTimes()
    for streams in running:
        steps.add(running=streams, tokens=100.0 * streams, seconds_a_token=alone + slope * streams)
    return steps


def test_the_streams_within_a_promise() -> None:
    steps = learned(10, 20, 40)
    assert steps.streams_within(0.05) == pytest.approx(80.0)
    assert steps.seconds_at(80.0) == pytest.approx(0.05)


def test_reports_that_are_alike_say_nothing() -> None:
    assert learned(20, 20, 21).streams_within(0.05) is None
    assert StepTimes().streams_within(0.05) is None


def test_reports_that_have_become_alike_leave_what_a_stream_adds() -> None:
    known = learned(10, 20, 40).line()
    alike = learned(30, 30, 31, alone=0.015)
    line = alike.line(known)
    assert line is not None
    assert line[1] == pytest.approx(0.0005)
    assert line[0] == pytest.approx(0.015)  # the level is that of the reports
    assert alike.streams_within(0.05, known) == pytest.approx(70.0)
    assert alike.seconds_at(70.0, known) == pytest.approx(0.05)
    assert StepTimes().line(known) == known


def test_nothing_is_said_far_beyond_what_was_seen() -> None:
    assert learned(1, 2, 3).streams_within(0.05) == pytest.approx(12.0)
    assert learned(10, 20, slope=0.0).streams_within(0.05) == pytest.approx(80.0)


def test_a_promise_that_not_even_one_stream_keeps() -> None:
    assert learned(10, 20, 40).streams_within(0.005) == 0.0


def test_what_was_seen_fades() -> None:
    steps = learned(10, 20, 40)
    steps.fade(100_000.0)
    assert steps.streams_within(0.05) is None


PODS = {"alone": 0.01, "stream": 0.0002, "context": 2e-7, "prompt": 1e-4}


def pod_time(streams: float, context: float, prompt: float) -> float:
    return PODS["alone"] + PODS["stream"] * streams + PODS["context"] * context + PODS["prompt"] * prompt


def reported(
    count: int = 200, *, noise: float = 0.0, seed: int = 1, streams: tuple[float, float] = (1, 40)
) -> StepTimes:
    draw, times = random.Random(seed), StepTimes(half_life_seconds=120.0)
    for _ in range(count):
        running, each, prompt = draw.uniform(*streams), draw.uniform(100, 3000), draw.uniform(0, 400)
        seconds = pod_time(running, running * each, prompt) * (1.0 + draw.uniform(-noise, noise))
        times.fade(1.0)
        times.add(
            running=running,
            context_tokens=running * each,
            prompt_tokens=prompt,
            tokens=running / seconds,
            seconds_a_token=seconds,
        )
    return times


def test_streams_context_and_prompts_are_told_apart() -> None:
    step = reported().fit(None)
    assert step is not None
    for streams, context, prompt in ((1, 500, 0), (30, 20_000, 0), (30, 80_000, 300), (60, 60_000, 100)):
        expected = step.seconds(streams=streams, context_tokens=context, prompt_tokens=prompt)
        assert expected == pytest.approx(pod_time(streams, context, prompt), rel=0.05), (streams, context, prompt)


def test_noise_is_averaged() -> None:
    for seed in range(5):
        step = reported(noise=0.2, seed=seed).fit(None)
        assert step is not None
        expected = step.seconds(streams=30, context_tokens=45_000)
        assert expected == pytest.approx(pod_time(30, 45_000, 0), rel=0.15), seed


def test_a_pod_of_which_little_is_known_is_taken_for_one_of_its_pool() -> None:
    pool = reported().fit(None)
    assert StepTimes().fit(pool) == pool
    slower = StepTimes()
    for _ in range(50):  # always as busy: it shows a level, and not what a stream costs
        slower.add(running=10, context_tokens=10_000, tokens=500, seconds_a_token=2 * pod_time(10, 10_000, 0))
    step = slower.fit(pool)
    assert step is not None and pool is not None
    assert step.seconds(streams=10, context_tokens=10_000) == pytest.approx(2 * pod_time(10, 10_000, 0), rel=0.1)
    assert step.seconds_a_stream == pytest.approx(pool.seconds_a_stream, rel=0.2)


def test_reports_that_are_alike_do_not_unlearn_what_a_stream_costs() -> None:
    times = reported()
    known = times.fit(None)
    for _ in range(1200):  # twenty minutes
        times.fade(1.0)
        times.add(running=30, context_tokens=45_000, tokens=1000, seconds_a_token=pod_time(30, 45_000, 0))
        known = times.fit(known)
    assert known is not None
    assert known.seconds(streams=50, context_tokens=75_000) == pytest.approx(pod_time(50, 75_000, 0), rel=0.1)


@given(
    samples=st.lists(
        st.tuples(
            *[st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1e6)] * 4,
            st.floats(-1, 1e9) | st.floats(allow_nan=True),
        ),
        max_size=30,
    )
)
def test_whatever_a_pod_reports_no_cost_is_negative_or_no_number(samples: list[tuple[float, ...]]) -> None:
    times = StepTimes()
    for running, context, prompt, seconds, tokens in samples:
        times.add(running=running, context_tokens=context, prompt_tokens=prompt, seconds_a_token=seconds, tokens=tokens)
    for prior in (None, reported(20).fit(None)):
        step = times.fit(prior)
        assert (step is not None) or prior is None
        if step is not None:
            found = msgspec.structs.astuple(step)
            assert all(isfinite(value) and value >= 0.0 for value in found), found


def test_the_sum_of_pods_is_one_that_has_seen_all() -> None:
    one, other = reported(100, seed=1), reported(100, seed=2)
    whole = StepTimes.sum_of((one, other)).fit(None)
    assert whole is not None
    assert whole.seconds(streams=30, context_tokens=45_000) == pytest.approx(pod_time(30, 45_000, 0), rel=0.05)


def test_the_fit_follows_the_steps_of_a_real_gpu() -> None:
    """Recorded by bench/gpu_steps.py on an H200: decode steps of eight streams and more, and prompts beside them."""
    recorded = json.loads(GPU_STEPS.read_text(encoding="utf-8"))
    steps = [each for each in recorded["decode"] if each["sequences"] >= 8 and each["context"] <= 8192]
    steps += [each for each in recorded["mixed"] if each["tokens"]]
    times = StepTimes()
    for step in steps:
        times.add(tokens=1000.0, **_in_step(step), seconds_a_token=step["ms"] / 1e3, running=step["sequences"])
    found = times.fit(None)
    assert found is not None
    errors = [
        abs(1e3 * found.seconds(streams=step["sequences"], **_in_step(step)) / step["ms"] - 1.0) for step in steps
    ]
    assert sum(errors) / len(errors) < 0.06
    assert max(errors) < 0.19


def _in_step(step: dict[str, Any]) -> dict[str, float]:
    return {"context_tokens": step["sequences"] * step["context"], "prompt_tokens": step.get("tokens", 0.0)}
