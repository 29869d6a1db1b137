"""Sums of what became of requests."""

import pytest

from extproc.policy.priority import DEFAULT_CLASSES
from extproc.replay_log.fates import (
    ABANDONED,
    ALL,
    MOST_TENANTS,
    REFUSED,
    SERVED,
    Fate,
    grouped,
    groups_of,
    recorded_fate,
    sums_of,
)
from tests.unit.extproc_replay_log.recorded import line, refused


def served(ttft: float | None = None, waited: float = 0.0, tenant: str = "a", class_name: str = "standard") -> Fate:
    return Fate(class_name=class_name, tenant=tenant, outcome=SERVED, ttft_seconds=ttft, waited_seconds=waited)


def test_what_a_line_says_of_a_request() -> None:
    record = line(
        0.0, queued_us=250_000, first_token_us=700_000, ended_us=1_600_000, output_tokens=10, steps=("reject",)
    )
    found = recorded_fate(record, names={"aaaa": "acme"})
    assert (found.class_name, found.tenant, found.outcome, found.steps) == ("standard", "acme", SERVED, ("reject",))
    assert (found.waited_seconds, found.ttft_seconds) == (0.25, 0.7)
    assert found.inter_token_seconds == pytest.approx(0.1)
    assert recorded_fate(refused(0.0, "shed"), names={}).reason == "shed"
    assert recorded_fate(refused(0.0, "client-left", fate="abandoned"), names={}).outcome == ABANDONED
    assert recorded_fate(line(0.0), names={}).ttft_seconds is None


def test_refused_requests_miss_their_target() -> None:
    fates = [
        served(0.5),
        served(1.5),
        served(3.0),
        Fate(class_name="standard", tenant="a", outcome=REFUSED, reason="x"),
    ]
    sums = sums_of(fates, target=2.0)
    assert (sums.requests, sums.served, sums.refused, sums.in_target) == (4, 3, {"x": 1}, 0.5)
    assert (sums.ttft_p50_seconds, sums.ttft_p95_seconds) == (1.5, 3.0)


def test_a_sample_of_first_tokens_stands_for_all_that_were_served() -> None:
    fates = [served(0.5), served(3.0), *[served()] * 6, *[Fate(class_name="s", tenant="", outcome=REFUSED)] * 2]
    sums = sums_of(fates, target=2.0)
    assert (sums.ttft_known, sums.in_target) == (2, 0.4)  # half of 8, of 10
    assert sums_of([served()], target=2.0).in_target is None
    late = [served(0.5), served(waited=2.5), served(0.5), served(waited=1.0)]
    assert sums_of(late, target=2.0).in_target == pytest.approx(2 / 3)


def test_waits_are_of_those_that_were_served() -> None:
    fates = [
        served(waited=0.0),
        served(waited=2.0),
        Fate(class_name="s", tenant="", outcome=REFUSED, waited_seconds=9.0),
    ]
    sums = sums_of(fates, target=None)
    assert (sums.waited, sums.waited_p50_seconds, sums.waited_p95_seconds) == (2, 0.0, 2.0)
    empty = sums_of([], target=1.0)
    assert (empty.requests, empty.waited_p50_seconds, empty.in_target) == (0, None, None)


@pytest.mark.parametrize(
    ("values", "p50", "p95"), [((4.0, 1.0, 3.0, 2.0), 2.0, 4.0), ((7.0,), 7.0, 7.0), ((), None, None)]
)
def test_percentiles_are_values_that_came(values: tuple[float, ...], p50: float | None, p95: float | None) -> None:
    waits = sums_of([served(waited=value) for value in values], target=None)
    assert (waits.waited_p50_seconds, waits.waited_p95_seconds) == (p50, p95)
    firsts = sums_of([served(ttft=value) for value in values], target=None)
    assert (firsts.ttft_p50_seconds, firsts.ttft_p95_seconds) == (p50, p95)


def test_classes_and_their_largest_tenants_are_shown_by_themselves() -> None:
    fates = [served(tenant=f"t{number % 20}", class_name="batch") for number in range(50)] + [served(tenant="one")]
    groups = groups_of(fates)
    assert groups[0] == ("batch", ALL)
    assert len([group for group in groups if group[0] == "batch"]) == 1 + MOST_TENANTS
    assert groups[-2:] == [("standard", ALL), (ALL, ALL)]
    sums = grouped(fates, groups, classes=DEFAULT_CLASSES)
    assert sums["batch", ALL].requests == 50
    assert sums["batch", "t0"].requests == 3
    assert sums[ALL, ALL].requests == 51
    assert sums["standard", ALL].ttft_target_seconds == DEFAULT_CLASSES["standard"].targets.ttft_seconds
    assert sums["batch", ALL].ttft_target_seconds is None
