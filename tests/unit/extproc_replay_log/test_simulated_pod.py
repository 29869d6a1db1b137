"""A simulated pod computes as its numbers say, in as few steps of ours as can be."""

from dataclasses import replace

import pytest

from extproc.replay_log.simulated_pod import Generation, PodPace, SimulatedPod

PACE = PodPace(alone_seconds=0.01, seconds_a_stream=0.001, seconds_a_prompt_token=0.0001, step_tokens=1000)


def asked(prompt: int = 100, cached: int = 0, output: int = 10, at: float = 0.0) -> Generation:
    return Generation(prompt_tokens=prompt, cached_tokens=cached, output_tokens=output, arrived_at=at)


def play(pod: SimulatedPod, *, until: float = 1e9) -> int:
    """Advance until the pod is idle or the time is over; return how often."""
    count = 0
    while (ends_at := pod.ends_at) is not None and ends_at <= until:
        pod.advance(now=ends_at)
        count += 1
    return count


def test_one_request_takes_its_prompt_and_a_step_for_each_token() -> None:
    pod, one = SimulatedPod(PACE), asked(prompt=500, output=11)
    pod.add(one, now=0.0)
    advances = play(pod)
    assert one.first_at == pytest.approx(0.011 + 0.05)
    assert one.ended_at == pytest.approx(0.061 + 10 * 0.011)
    assert advances == 2  # the ten steps after the first token are one of ours


def test_what_is_cached_is_not_computed_but_for_one_token() -> None:
    for cached, computed in ((400, 100), (500, 1), (900, 1)):
        pod, one = SimulatedPod(PACE), asked(prompt=500, cached=cached, output=1)
        pod.add(one, now=0.0)
        play(pod)
        assert one.ended_at == pytest.approx(0.011 + computed * 0.0001)


def test_a_long_prompt_takes_several_steps_and_those_behind_it_wait() -> None:
    pod, long, short = SimulatedPod(PACE), asked(prompt=2500, output=1), asked(prompt=10, output=1)
    pod.add(long, now=0.0)
    pod.add(short, now=0.0)
    assert pod.report(now=0.0).waiting_requests == 1
    play(pod)
    assert long.first_at == pytest.approx(3 * 0.011 + 0.25 + 0.001 + 0.001)  # the last step has both
    assert short.first_at == long.first_at


def test_a_request_that_comes_during_many_like_steps_joins_at_the_next_one() -> None:
    pod, first, second = SimulatedPod(PACE), asked(prompt=1, output=1001), asked(prompt=1, output=1)
    pod.add(first, now=0.0)
    play(pod, until=0.02)
    began = first.first_at
    assert began is not None
    pod.add(second, now=began + 0.0275)  # in the third step of 11 ms
    ended = pod.ends_at
    assert ended == pytest.approx(began + 0.033)
    play(pod)
    assert second.first_at == pytest.approx(began + 0.033 + 0.012 + 0.0001)
    assert first.produced == 1001
    assert first.ended_at == pytest.approx(began + 0.0121 + 999 * 0.011)


def test_no_more_run_than_may_and_no_more_than_the_cache_holds() -> None:
    pod = SimulatedPod(replace(PACE, most_running=2))
    for _ in range(3):
        pod.add(asked(), now=0.0)
    pod.advance(now=pod.ends_at or 0.0)
    assert (len(pod.running), len(pod.waiting)) == (2, 1)
    pod = SimulatedPod(replace(PACE, cache_tokens=250))
    for _ in range(3):
        pod.add(asked(), now=0.0)
    pod.advance(now=pod.ends_at or 0.0)
    assert (len(pod.running), len(pod.waiting)) == (2, 1)
    assert pod.report(now=1.0).kv_usage == pytest.approx(0.8, abs=0.05)
    play(pod)
    assert pod.report(now=2.0).kv_usage == 0.0


def test_what_it_reports_adds_up() -> None:
    pod = SimulatedPod(PACE)
    for number in range(5):
        pod.add(asked(prompt=100 + number, cached=16, output=20), now=0.0)
    play(pod, until=0.1)
    midway = pod.report(now=0.1)
    assert 0 < midway.inter_token_count < 5 * 19
    play(pod)
    report = pod.report(now=9.0)
    assert (report.first_token_count, report.prefill_count, report.inter_token_count) == (5, 5, 5 * 19)
    assert report.prefill_computed_tokens == sum(84 + number for number in range(5))
    assert (report.prefix_query_tokens, report.prefix_hit_tokens) == (510, 80)
    assert report.inter_token_seconds_sum == pytest.approx(5 * 19 * 0.015, rel=0.1)
    assert (report.waiting_requests, report.running_requests) == (0, 0)


def test_one_that_leaves_is_gone_wherever_it_stands() -> None:
    pod = SimulatedPod(replace(PACE, most_running=1))
    running, waiting = asked(output=100), asked()
    pod.add(running, now=0.0)
    pod.add(waiting, now=0.0)
    pod.leave(waiting)
    pod.leave(running)
    play(pod)
    assert pod.report(now=1.0).kv_usage == 0.0
    assert (running.ended_at, waiting.ended_at, pod.ends_at) == (None, None, None)
