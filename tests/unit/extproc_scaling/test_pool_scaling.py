"""From looks at a pool to wanted pods: what the load needs, bounded, explained, and never swinging."""

import math
from itertools import pairwise
from typing import Any

import pytest

from extproc.policy.autoscale import Autoscale, ScalePolicy, ScaleSignals
from extproc.scaling.seen import State
from tests.unit.extproc_scaling.scaled_pool import TOKENS_PER_SECOND, FluidPod, FluidPool


def busy(pods: float) -> Any:
    """Return a load that keeps so many pods busy."""
    return lambda _: pods * TOKENS_PER_SECOND


def test_a_steady_load_wants_what_it_keeps_busy_and_a_little_more() -> None:
    signal = FluidPool(rate=busy(4.0)).add(5).run(600)
    assert signal.wanted == 5
    assert signal.state is State.OK
    assert signal.saturation == pytest.approx(0.8, abs=0.02)
    assert signal.prefill_busy == pytest.approx(4.0, abs=0.1)
    assert signal.reason.startswith("prompts keep 4 pods busy, 4 by forecast in 90 s, and chance needs 0.21")


def test_more_than_the_pods_can_do_is_seen_by_what_waits() -> None:
    pool = FluidPool(rate=busy(6.0)).add(2)
    pool.run(36)
    assert (pool.signal.wanted, "in steps" in pool.signal.reason) == (6, True)  # of two in one step
    signal = pool.run(30)
    assert signal.prefill_busy == pytest.approx(6.0, rel=0.05)
    assert signal.wanted >= 12  # six, one for chance, and the rest for what waits too long until they are there


def test_what_waits_in_the_pickers_counts_for_each_of_them() -> None:
    pool = FluidPool(rate=busy(1.0), pickers=3).add(2)
    for _ in range(40):
        pool.queued_tokens += TOKENS_PER_SECOND * 2.0  # each look, in each picker
        signal = pool.run(2)
    assert signal.prefill_busy == pytest.approx(4.0, rel=0.05)
    assert signal.queued_tokens == pytest.approx(3 * pool.queued_tokens)


def test_what_was_refused_counts_up_to_as_much_as_was_served() -> None:
    pool = FluidPool(rate=busy(2.0)).add(2)
    for _ in range(40):
        pool.refused_requests += 1000
        pool.refused_tokens += 100 * TOKENS_PER_SECOND
        signal = pool.run(2)
    assert signal.prefill_busy == pytest.approx(4.0, rel=0.05)


def test_the_bounds_of_the_policy_hold_and_are_named() -> None:
    high = FluidPool(rate=busy(6.0), policy=ScalePolicy(max_replicas=3)).add(2).run(60)
    assert high.wanted == 3
    assert high.reason.endswith("would be needed, maxReplicas is 3")
    low = FluidPool(rate=busy(0.1), policy=ScalePolicy(min_replicas=2)).add(2).run(60)
    assert (low.wanted, low.reason.split("; ")[-1]) == (2, "limited: 1 would do, minReplicas is 2")


def test_an_idle_pool_may_go_to_no_pods() -> None:
    signal = FluidPool(policy=ScalePolicy(min_replicas=0)).add(1).run(400)
    assert signal.wanted == 0


def test_before_there_are_samples_the_number_stays() -> None:
    signal = FluidPool(rate=busy(9.0)).add(3).run(6)
    assert (signal.wanted, signal.state) == (3, State.TOO_FEW_SAMPLES)
    assert signal.reason == "too few reports were seen to say what the load is: the number stays"


def test_a_picker_that_has_just_been_started_takes_no_pods_away_that_still_start() -> None:
    pool = FluidPool(rate=busy(9.0)).add(3)
    pool.pods += [FluidPod(address=f"10.0.1.{at}:8000", serves=False) for at in range(4)]
    signal = pool.run(6)
    assert (signal.ready, signal.present, signal.told) == (3, 7, 7)


def test_without_ready_pods_one_is_wanted_from_the_first_request_on() -> None:
    pool = FluidPool(policy=ScalePolicy(min_replicas=0))
    assert (pool.run(2).wanted, pool.signal.state) == (0, State.NO_READY_PODS)
    pool.refused_requests = 1
    signal = pool.run(2)
    assert (signal.wanted, signal.reason) == (1, "no pod is ready, and there are requests: the number stays")
    assert pool.run(60).wanted == 1  # it is on its way


def test_a_request_that_waits_has_one_pod_wanted_between_two_looks() -> None:
    pool = FluidPool(policy=ScalePolicy(min_replicas=0))
    assert pool.run(2).wanted == 0
    assert pool.scaling.ask_for_one()
    signal = pool.scaling.signals["both"]
    assert (signal.wanted, signal.told, signal.reason) == (1, 1, "no pod is ready, and there are requests")
    assert not pool.scaling.ask_for_one()
    assert pool.run(60).wanted == 1


def test_in_shadow_a_request_that_waits_changes_nothing_that_scalers_are_told() -> None:
    pool = FluidPool(policy=ScalePolicy(min_replicas=0), shadow=True)
    pool.run(2)
    pool.scaling.ask_for_one()
    assert (pool.scaling.signals["both"].wanted, pool.scaling.signals["both"].told) == (1, 0)


def test_where_only_prefill_pods_are_left_a_decode_pod_is_wanted() -> None:
    pool = FluidPool(policy=ScalePolicy(min_replicas=0), role="decode").add(1)
    pool.pods[0].role = "prefill"
    assert pool.run(4).wanted == 0
    pool.queued_requests = 1
    assert (pool.run(2).wanted, pool.signal.state) == (1, State.NO_READY_PODS)


def test_the_oldest_pod_that_starts_to_answer_clients_is_known() -> None:
    pool = FluidPool(policy=ScalePolicy(min_replicas=0))
    pool.run(2)
    pool.pods += [FluidPod(address="p", role="prefill", serves=False)]
    pool.run(2)
    assert pool.scaling.first_start is None
    pool.pods += [FluidPod(address="a", serves=False)]
    began = pool.now
    pool.run(10)
    assert pool.scaling.first_start == pytest.approx(began, abs=2.0)
    pool.pods[1].serves = True
    pool.run(2)
    assert pool.scaling.first_start is None


def test_pods_that_go_all_at_once_do_not_change_the_number() -> None:
    pool = FluidPool(rate=busy(4.0)).add(5)
    pool.run(120)
    for pod in pool.pods:
        pod.serves = False
    assert (pool.run(60).wanted, pool.signal.state) == (5, State.NO_READY_PODS)


@pytest.mark.parametrize("jump", [-500.0, 10_000.0, 0.0])
def test_a_clock_that_jumps_changes_nothing(jump: float) -> None:
    pool = FluidPool(rate=busy(4.0)).add(5)
    before = pool.run(120).wanted
    pool.now += jump
    pool.look()
    assert (pool.signal.wanted, pool.signal.state) == (before, State.CLOCK_JUMPED)
    assert (pool.run(10).wanted, pool.signal.state) == (before, State.TOO_FEW_SAMPLES)
    assert pool.run(60).state is State.OK
    assert set(pool.wanted) == {before}


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_usage": math.nan},
        {"kv_usage": 17.0},
        {"running_requests": -3},
        {"prefix_query_tokens": math.inf},
        {"waiting_requests": 10**9},
    ],
)
def test_a_pod_that_reports_nonsense_is_left_out(changes: dict[str, Any]) -> None:
    pool = FluidPool(rate=busy(4.0)).add(5)
    before = pool.run(120).wanted
    pool.pods[0].changes = changes
    signal = pool.run(120)
    assert (signal.wanted, signal.state) == (before, State.NONSENSE_REPORTS)
    assert signal.reason.endswith("without 1 pods that report nonsense (10.0.0.1:8000)")
    assert signal.prefill_busy == pytest.approx(4.0, rel=0.05)


def test_where_all_pods_report_nonsense_the_number_stays() -> None:
    pool = FluidPool(rate=busy(4.0)).add(5)
    before = pool.run(120).wanted
    for pod in pool.pods:
        pod.changes = {"kv_usage": math.nan}
    signal = pool.run(900)
    assert (signal.wanted, signal.state) == (before, State.NONSENSE_REPORTS)


def test_a_counter_that_leaps_is_nonsense_once() -> None:
    pool = FluidPool(rate=busy(4.0)).add(5)
    pool.run(120)
    pool.pods[0].computed += 1e12
    assert pool.run(2).state is State.NONSENSE_REPORTS
    assert pool.run(2).state is State.OK
    assert set(pool.wanted) == {5}


def test_a_pod_that_starts_anew_counts_from_there() -> None:
    pool = FluidPool(rate=busy(4.0)).add(5)
    pool.run(120)
    pool.pods[0].computed = pool.pods[0].requests = 0.0
    assert pool.run(120).wanted == 5
    assert set(pool.wanted) == {5}


def test_a_first_token_that_no_pod_has_in_time_is_named_and_not_staffed_for() -> None:
    signal = FluidPool(rate=busy(4.0), ttft_seconds=0.05).add(5).run(120)
    assert signal.state is State.PROMISE_OUT_OF_REACH
    assert "a prompt alone takes 0.1 s of the promised 0.05 s: no number of pods keeps that" in signal.reason
    assert signal.wanted <= 7


def test_an_inter_token_time_that_no_pod_has_is_named_and_not_staffed_for() -> None:
    pool = FluidPool(rate=lambda at: (2.0 + math.sin(at / 50)) * 4000, output_each=100, inter_token_seconds=0.001)
    signal = pool.add(4).run(600)
    assert signal.state is State.PROMISE_OUT_OF_REACH
    assert "one stream alone takes more than the promised 0.001 s a token" in signal.reason


def test_decoding_wants_what_keeps_the_promised_time_a_token() -> None:
    # a token takes 10 ms and 0.2 ms more for each stream: 50 streams at 20 ms, which are 2,500 tokens a second
    pool = FluidPool(rate=lambda at: 8000 + 3000 * math.sin(at / 100), output_each=1000, inter_token_seconds=0.02)
    signal = pool.add(5).run(1200)
    most = 11_000 / 800 * 1000 / 2500
    assert signal.decode_busy is not None
    assert signal.decode_busy <= most * 1.05
    assert most <= signal.wanted <= most + 4  # nine tenths of the promise are to be the mean; and it is a sine
    assert "streams each by promise" in signal.reason


def test_a_decode_role_does_not_count_prompts() -> None:
    pool = FluidPool(role="decode", rate=busy(4.0)).add(5)
    for pod in pool.pods:
        pod.streams, pod.kv_usage = 8.0, 0.5
    signal = pool.run(120)
    assert signal.prefill_busy is None
    assert signal.state is State.TOO_FEW_SAMPLES  # nothing was generated: nothing is known


def test_thresholds_act_beside_the_load() -> None:
    up = ScaleSignals(kv_usage=0.9, queue_requests=8)
    pool = FluidPool(rate=busy(0.5), policy=ScalePolicy(scale_up=up)).add(4)
    for pod in pool.pods:
        pod.kv_usage = 0.95
    signal = pool.run(120)
    assert signal.wanted == 5
    assert "scaleUp.kvUsage: 0.95 of 0.9 is reached" in signal.reason


def test_fewer_only_where_load_and_thresholds_agree() -> None:
    down = ScaleSignals(kv_usage=0.3)
    pool = FluidPool(rate=busy(0.5), policy=ScalePolicy(scale_down=down)).add(4)
    for pod in pool.pods:
        pod.kv_usage = 0.31
    signal = pool.run(900)
    assert signal.wanted == 4
    assert "no fewer: kvUsage is 0.31, above scaleDown's 0.3" in signal.reason
    for pod in pool.pods:
        pod.kv_usage = 0.30
    assert pool.run(900).wanted == 1


def test_requests_that_wait_in_the_pickers_reach_a_threshold() -> None:
    pool = FluidPool(rate=busy(1.0), policy=ScalePolicy(scale_up=ScaleSignals(queue_requests=8)), pickers=2).add(2)
    pool.queued_requests = 8
    assert "scaleUp.queueRequests: 8 of 8 is reached" in pool.run(60).reason


def test_shadow_tells_the_present_number_and_shows_the_wanted_one() -> None:
    signal = FluidPool(rate=busy(6.0), shadow=True).add(2).run(36)
    assert (signal.wanted, signal.told, signal.shadow) == (6, 2, True)


@pytest.mark.parametrize("period", [60, 120, 240, 480])
def test_a_saw_tooth_load_does_not_make_the_number_swing(period: int) -> None:
    pool = FluidPool(rate=lambda at: (1.0 + 5.0 * (at % period) / period) * TOKENS_PER_SECOND, start_seconds=90.0)
    pool.add(4).run(7200)
    late = pool.wanted[len(pool.wanted) // 4 :]
    changes = sum(before != after for before, after in pairwise(late))
    # a pod is taken away to see whether it is missed, and that more and more rarely
    assert max(late) - min(late) <= (1 if period < 300 else 2), late
    assert changes <= 8, late
    assert max(late) <= 13  # twice the most that is busy, and one


def test_pods_follow_a_step_up_and_back() -> None:
    pool = FluidPool(rate=lambda at: (6.0 if 1600 <= at < 3400 else 2.0) * TOKENS_PER_SECOND, start_seconds=90.0)
    pool.add(3).run(1000 - 400)
    assert pool.signal.wanted == 3
    pool.run(200)
    assert pool.signal.wanted >= 7
    pool.run(1400)
    pool.run(1800)
    assert pool.signal.wanted == 3


def test_the_time_that_a_pod_takes_is_learned_and_never_shorter_than_declared() -> None:
    pool = FluidPool(rate=lambda at: (4.0 if at > 1100 else 1.0) * TOKENS_PER_SECOND, start_seconds=200.0)
    pool.add(2).run(800)
    assert pool.scaling.start_seconds == pytest.approx(200.0, abs=4.0)
    assert "by forecast in 200 s" in pool.signal.reason


def test_a_policy_that_changes_keeps_what_was_learned() -> None:
    pool = FluidPool(rate=busy(4.0)).add(5)
    pool.run(120)
    pool.scaling.reconfigure(Autoscale(both=ScalePolicy(max_replicas=4)))
    assert (pool.run(2).wanted, pool.signal.state) == (4, State.OK)
    pool.scaling.reconfigure(Autoscale())
    assert not pool.scaling.signals


def test_prompts_wait_for_prefill_pods_where_there_are_any() -> None:
    pool = FluidPool(role="prefill", rate=busy(1.0)).add(2)
    pool.pods.append(pool.pods.pop())
    pool.pods[1].role = "decode"
    for _ in range(40):
        pool.queued_tokens += 2 * TOKENS_PER_SECOND
        pool.run(2)
    assert pool.signal.ready == 1
    assert pool.signal.prefill_busy == pytest.approx(1.5, rel=0.05)  # half of the fluid goes to the other pod
