"""From outcomes to numbers, and from numbers to verdicts."""

import math
from typing import Any

import pytest

from bench.overload.plan import CLASSES, CRITICAL, FLOOD, SHEDDABLE, STEADY
from bench.overload.script import Attempt, Outcome
from bench.overload.summary import Retries, RunSummary, summarise
from bench.overload.verdicts import verdicts
from bench.routing.script import POD_MISSING, Way


def answered(sent: float, *, ttft: float) -> Attempt:
    return Attempt(sent=sent, ended=sent + ttft + 0.3, status=200, first=sent + ttft, pieces=4)


def refused(sent: float, *, retry_after: float | None = 2.0, took: float = 0.004) -> Attempt:
    return Attempt(
        sent=sent, ended=sent + took, status=503, retry_after=retry_after, reason="overload", error="status 503"
    )


def outcome(*attempts: Attempt, class_name: str = SHEDDABLE, tenant: str = STEADY, work_tokens: int = 1000) -> Outcome:
    return Outcome(
        due=attempts[0].sent - 0.001,
        tenant=tenant,
        class_name=class_name,
        work_tokens=work_tokens,
        obeys=True,
        attempts=attempts,
    )


def run(*outcomes: Outcome, load: float = 3.0, scenario: str = "steady", **changes: Any) -> RunSummary:
    fields: dict[str, Any] = {"measured_from": 1.0, "ends": 11.0, "arm": "kvmesh", "classes": CLASSES} | changes
    return summarise(outcomes, scenario=scenario, load=load, **fields)


def test_goodput_is_the_work_whose_first_token_came_in_time_and_within_the_measured_seconds() -> None:
    summary = run(
        outcome(answered(2, ttft=5), work_tokens=3000),
        outcome(answered(2, ttft=6.5), work_tokens=700),  # too late for its class
        outcome(answered(9, ttft=4), work_tokens=500),  # after the end
        outcome(answered(0.5, ttft=4), work_tokens=500),  # due in the warm-up, begun after it
        outcome(answered(0.5, ttft=0.2), work_tokens=900),
    )

    assert (summary.goodput, summary.throughput, summary.goodput_requests) == (350.0, 420.0, 0.2)
    assert (summary.of_class(SHEDDABLE).requests, summary.of_class(SHEDDABLE).in_time) == (3, 2)


def test_a_class_tells_what_was_answered_refused_and_lost() -> None:
    lost = Attempt(sent=3, ended=18, status=200, error="no whole answer within 15 s")
    summary = run(
        outcome(refused(2), answered(4, ttft=1)),
        outcome(refused(2), refused(4)),
        outcome(lost),
        outcome(answered(5, ttft=2)),
    )

    told = summary.of_class(SHEDDABLE)
    assert (told.requests, told.answered, told.refused, told.failed) == (4, 2, 2, 1)
    assert (told.ttft_mean, told.ttft_p50, told.ttft_p99) == (1500.0, 1000.0, 2000.0)
    assert summary.errors == {"no whole answer within 15 s": 1}


def test_the_gap_between_tokens_is_the_mean_of_an_answer() -> None:
    assert run(outcome(answered(2, ttft=1))).of_class(SHEDDABLE).inter_token_p50 == pytest.approx(100.0)


def test_refusals_are_told_with_how_long_they_took_and_what_they_asked_for() -> None:
    summary = run(
        outcome(refused(2, took=0.004), refused(5, took=0.006, retry_after=7.5)), outcome(refused(3, retry_after=None))
    )

    told = summary.refusals
    assert (told.count, told.reasons, told.without_retry_after) == (3, {"503 overload": 3}, 1)
    assert [told.ms_p50, told.ms_p99] == pytest.approx([4.0, 6.0])
    assert (told.retry_after_p50, told.retry_after_most) == (2.0, 7.5)


def test_first_retries_count_from_the_moment_at_which_the_load_falls() -> None:
    summary = run(
        outcome(refused(2), answered(4, ttft=1)),  # before it falls
        outcome(refused(2), answered(6, ttft=1)),
        outcome(refused(2), refused(6), answered(8, ttft=1)),
        falls_at=5.0,
    )

    assert summary.retries == Retries(count=2, home=1)


def test_the_steady_tenant_is_compared_with_a_half_of_its_own_in_the_measured_seconds() -> None:
    summary = run(
        outcome(answered(2, ttft=1), work_tokens=800),
        outcome(refused(6), work_tokens=400),  # a half of the class has been idle for long when it comes
        outcome(refused(6), work_tokens=300),  # begins when the one before it is done, at 9
        outcome(refused(6), work_tokens=300),  # not before 10.5
        outcome(refused(6), answered(12, ttft=1), work_tokens=400),  # after 12
        *(outcome(answered(at, ttft=1), tenant=FLOOD, work_tokens=400) for at in range(3, 15)),
    )

    steady = next(each for each in summary.tenants if (each.tenant, each.class_name) == (STEADY, SHEDDABLE))
    assert (steady.begun_tokens, steady.own_half_tokens) == (800, 800 + 400 + 300 + 300)
    assert summary.share_of_own_half(SHEDDABLE) == 800 / 1800


def test_all_targets_can_be_met() -> None:
    critical = outcome(answered(2, ttft=0.2), class_name=CRITICAL)
    calm = run(critical, outcome(answered(2, ttft=1), work_tokens=2000), load=0.5)
    busy = run(
        outcome(answered(2, ttft=0.39), class_name=CRITICAL),
        outcome(answered(2, ttft=1), work_tokens=2000),
        outcome(refused(2), tenant=FLOOD),
    )
    fallen = run(critical, outcome(refused(2), answered(6, ttft=1)), scenario="falling", falls_at=5.0)

    assert [verdict.met for verdict in verdicts([busy, calm, fallen])] == [True] * 6


def test_all_targets_can_be_missed() -> None:
    calm = run(
        outcome(answered(2, ttft=0.2), class_name=CRITICAL),
        outcome(answered(2, ttft=1), work_tokens=9000),
        load=0.5,
    )
    busy = run(
        outcome(answered(2, ttft=0.41), class_name=CRITICAL),
        outcome(refused(2), class_name=CRITICAL),
        outcome(refused(2, took=0.02)),
        outcome(answered(2, ttft=1), tenant=FLOOD),
    )
    fallen = run(outcome(refused(2), refused(6)), scenario="falling", falls_at=5.0)

    assert [verdict.met for verdict in verdicts([calm, busy, fallen])] == [False] * 6


def test_goodput_beside_a_bad_pod_is_judged_by_that_of_the_other_pods() -> None:
    good, refusal = [outcome(answered(2, ttft=1)) for _ in range(19)], outcome(refused(2, retry_after=None))
    early = [outcome(answered(0.5, ttft=1)) for _ in range(5)]  # due before the measured seconds
    alone = run(*good, *early, outcome(answered(2, ttft=1)), scenario=POD_MISSING)
    refuses = run(*good, refusal, scenario=Way.REFUSES)
    breaks_off = run(*good[1:], *early, refusal, outcome(answered(2, ttft=6.1)), scenario=Way.BREAKS_OFF)

    judged = verdicts([alone, refuses, breaks_off])
    assert [verdict.met for verdict in judged] == [True, False]
    assert [verdict.measured.split("%")[0] for verdict in judged] == ["95.0", "90.0"]
    assert verdicts([refuses, breaks_off]) == []


def test_targets_without_their_runs_are_left_out() -> None:
    other = run(outcome(answered(2, ttft=1)), arm="least-request")

    assert verdicts([other]) == []


def test_nothing_answered_is_no_number() -> None:
    assert math.isnan(run(outcome(refused(2))).of_class(SHEDDABLE).ttft_mean)
