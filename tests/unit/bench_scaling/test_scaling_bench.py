"""The bench of scaling: its world loses nothing, its load is what it says, and the best run of an arm is found."""

from dataclasses import replace

import pytest

from bench.scaling.arms import HPA_KV, KVMESH, ORACLE, Hpa, Oracle, Seen, made
from bench.scaling.loads import Request, requests
from bench.scaling.plan import MIXES, Plan
from bench.scaling.pods import NEVER, Pod
from bench.scaling.run import Job, Run, play, rows_of
from bench.scaling.shortened import RATE, TARGET, cheapest_oracle, coming, shortened
from bench.scaling.world import World
from extproc.scaling.demand import is_sane

PLAN = Plan(warm_seconds=0.0, peak=3.0, seconds={"step": 1200.0, "day": 1200.0})
MIX = MIXES["long-prompts"]
LOAD = list(requests(MIX, "step", PLAN, seed=1))


class Fixed:
    """Always the same number."""

    def __init__(self, pods: int) -> None:
        self._pods = pods

    def reports(self, seen: Seen) -> None:
        pass

    def wanted(self, seen: Seen) -> int:
        return self._pods


def test_enough_pods_keep_all_promises_and_cost_their_time() -> None:
    outcome = World(plan=PLAN, arm=Fixed(6), seconds=1200.0).run(LOAD)
    assert outcome.requests == sum(request.at <= 1080.0 for request in LOAD)
    assert outcome.kept / outcome.requests > 0.97
    assert outcome.pod_seconds == pytest.approx(6 * 1200.0, rel=0.02)  # three of them from the first look on


def test_too_few_pods_keep_few() -> None:
    outcome = World(plan=replace(PLAN, first_pods=1), arm=Fixed(1), seconds=1200.0).run(LOAD)
    assert outcome.kept / outcome.requests < 0.7


def test_a_load_is_as_large_as_it_says() -> None:
    busy = sum(request.uncached_tokens for request in LOAD if 400.0 <= request.at < 800.0) / 8000.0 / 400.0
    assert busy == pytest.approx(0.75 * PLAN.peak, rel=0.15)


def test_a_run_can_be_repeated() -> None:
    job = Job("long-prompts", "day", KVMESH, 0.0, PLAN, 1)
    assert play(job) == play(job)


def test_all_requests_of_a_pod_end() -> None:
    pod = Pod("a:1", PLAN.engine, asked_at=0.0, serves_at=0.0)
    for _ in range(5):
        pod.add(Request(at=0.0, uncached_tokens=800.0, cached_tokens=200.0, answer_tokens=10.0))
    ended, now = 0, 0.0
    while (now := pod.next_event()) < 60.0:
        ended += sum(has_ended for _, has_ended in pod.advance(now))
    load = pod.report(60.0)
    assert (ended, load.running_requests, load.waiting_requests) == (5, 0, 0)
    assert (load.kv_usage, load.prefix_query_tokens, load.prefix_hit_tokens) == (0.0, 5000, 1000)
    assert (load.first_token_count, load.prefill_count, load.inter_token_count) == (5, 5, 45)
    assert load.prefill_seconds_sum == pytest.approx(0.5, rel=0.02)


def test_who_knows_all_asks_in_time() -> None:
    oracle = made(ORACLE, 1.0, LOAD, plan=PLAN, seconds=1200.0)
    assert isinstance(oracle, Oracle)
    few = oracle.wanted(Seen(now=60.0, ready=(), starting=(), queued=()))
    many = oracle.wanted(Seen(now=400.0 - 120.0, ready=(), starting=(), queued=()))
    assert few < many  # the step comes at 400 s, and a pod takes 90


def test_kubernetes_autoscaler_leaves_small_differences_alone() -> None:
    def seen(usage: float, *, now: float) -> Seen:
        pods = [Pod(f"a:{number}", PLAN.engine, asked_at=0.0, serves_at=0.0) for number in range(4)]
        for pod in pods:
            pod.add(Request(at=0.0, uncached_tokens=usage * 196_608.0, cached_tokens=0.0, answer_tokens=0.0))
        return Seen(now=now, ready=[(pod, pod.report(now)) for pod in pods], starting=(), queued=())

    hpa = made(HPA_KV, 0.3, LOAD, plan=PLAN, seconds=1200.0)
    assert isinstance(hpa, Hpa)
    assert [hpa.wanted(seen(usage, now=0.0)) for usage in (0.32, 0.36)] == [4, 5]
    assert hpa.wanted(seen(0.1, now=200.0)) == 4
    assert hpa.wanted(seen(0.1, now=301.0)) == 2


def test_an_arms_best_run_is_the_cheapest_that_keeps_enough() -> None:
    def run(arm: str, attainment: float, hours: float, seed: int = 1) -> Run:
        return Run("m", "s", arm, 0.0, seed, 1, attainment, attainment, attainment, hours, 1, 1)

    runs = [
        *(run(ORACLE, 0.99, 12.0), run(ORACLE, 0.96, 10.0), run(ORACLE, 0.90, 8.0)),
        *(run(KVMESH, 0.97, 11.0), run("hpa-kv", 0.8, 5.0), run("hpa-kv", 0.9, 20.0), run("hpa-queue", 0.995, 30.0)),
    ]
    rows = {row.arm: row for row in rows_of(runs, "m", "s")}
    assert (rows[KVMESH].of_oracle, rows[KVMESH].of_equal_oracle) == (1.1, round(11 / 12, 3))
    assert (rows["hpa-kv"].attainment, rows["hpa-queue"].of_equal_oracle) == (0.9, None)
    more = [run(ORACLE, 0.96, 10.0, 2), run(KVMESH, 0.99, 13.0, 2)]
    (line,) = [row for row in rows_of([*runs, *more], "m", "s") if row.arm == KVMESH]
    assert (line.seeds, line.of_oracle, line.of_oracle_range) == (2, 1.2, (1.1, 1.3))
    assert (line.attainment, line.attainment_range, line.of_equal_oracle) == (0.98, (0.97, 0.99), None)


def test_the_trace_is_played_in_its_order_at_the_speed_of_the_shape() -> None:
    mix = MIXES["mooncake"]
    load = list(requests(mix, "step", replace(PLAN, seconds={"step": 3600.0}), seed=4))
    middle = [request for request in load if 1200.0 <= request.at < 2400.0]
    busy = sum(request.uncached_tokens for request in middle) / 8000.0 / 1200.0
    assert busy == pytest.approx(0.75 * PLAN.peak, rel=0.05)
    again = [request[1:] for request in load[:262]]
    assert [request[1:] for request in load[262:524]] == again  # it is repeated
    assert sum(request.uncached_tokens for request in load[:262]) / 262 == pytest.approx(mix.uncached_tokens, rel=0.01)
    assert next(requests(mix, "step", PLAN, seed=5))[1:] != load[0][1:]


def test_an_idle_pod_reports_what_can_be() -> None:
    pod, now = Pod("a:1", PLAN.engine, asked_at=0.0, serves_at=0.0), 0.0
    for first in range(1, 50):
        for size in (first / 7.0, first / 3.0, first * 10.1):  # sums of these are not exact
            pod.add(Request(at=now, uncached_tokens=size, cached_tokens=size / 3.0, answer_tokens=2.0))
        while pod.next_event() < NEVER:
            now = pod.next_event()
            list(pod.advance(now))
        assert is_sane(pod.report(now))


def test_the_load_of_real_processes_is_the_long_one_so_many_times_shorter() -> None:
    plan = shortened(10.0)
    assert (plan.seconds["step"], plan.start_seconds, plan.window_seconds) == (1080.0, 9.0, 30.0)
    load = coming(plan, seed=1)
    for began, busy in ((0.0, 2.0), (360.0, 6.0), (720.0, 2.0)):
        tokens = sum(request.uncached_tokens for request in load if began <= request.at < began + 360.0)
        assert tokens / RATE / 360.0 == pytest.approx(busy, rel=0.1)


def test_the_oracle_of_real_processes_is_the_cheapest_that_keeps_enough() -> None:
    plan = shortened(30.0)
    load = coming(plan, seed=1)
    _, kept, pod_seconds = cheapest_oracle(plan, load)
    assert kept >= TARGET
    low, high = 2.0 * (240.0 - plan.warm_seconds), 6.0 * 120.0  # what the work alone keeps busy
    assert low + high < pod_seconds < 2.0 * (low + high)
