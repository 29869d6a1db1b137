"""What a newcomer must expect, and who is refused for it."""

from typing import Any

import pytest

from extproc.admission.degradation import Degradation
from extproc.admission.pool_pressure import MOST_SHEDDING, Expectation, PoolPressure
from extproc.admission.pressure_memory import FIRST
from extproc.errors import RequestShedError
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.policy.priority import DEFAULT_CLASSES, PriorityClass
from extproc.policy.request_class import PriorityPolicy, RequestClass


class NobodyWaits:
    def ahead(self, pool: str, priority: int, tenant: str | None = None, cost: int = 0) -> tuple[int, int]:
        return 0, 0

    def waits_in(self, pool: str) -> bool:
        return False


def pressure(**changes: Any) -> PoolPressure:
    return PoolPressure(
        estimates=LatencyEstimates(),
        degradation=Degradation(PriorityPolicy()),
        waiting=NobodyWaits(),
        clock=lambda: 0.0,
        random=lambda: 0.0,
        **changes,
    )


def of(tenant: str) -> RequestClass:
    return RequestClass(class_name="sheddable", priority_class=DEFAULT_CLASSES["sheddable"], tenant=tenant)


def waits(seconds: float) -> Expectation:
    return Expectation(ttft_seconds=seconds, own_seconds=0.0, work_seconds=0.0)


def test_only_the_tenant_that_got_most_is_refused_for_waits_that_may_become_much_longer() -> None:
    made = pressure()
    for tenant, tokens in (("flood", 1000), ("steady", 900)):
        made.went(of(tenant), pool="m", uncached_tokens=tokens, now=0.0)
        for _ in range(5):  # waits of theirs have been three times what was expected, and longer
            made.waited(of(tenant), waits(10.0), pool="m", seconds=100.0)
    half = waits(30.0)  # of the 60 s that the class is promised
    assert made.is_late(of("flood"), half, pool="m")
    assert not made.is_late(of("steady"), half, pool="m")
    assert not made.is_late(of("steady"), waits(59.0 / FIRST), pool="m")
    assert made.is_late(of("steady"), waits(61.0 / FIRST), pool="m")
    made.went(of("steady"), pool="m", uncached_tokens=200, now=0.0)
    assert made.is_late(of("steady"), half, pool="m")
    assert not made.is_late(of("flood"), half, pool="m")


def test_invented_tenants_of_invented_models_are_remembered_no_more_than_so_many_altogether() -> None:
    made = pressure()
    for pool in range(20):
        for tenant in range(MOST_SHEDDING // 10):
            made.went(of(f"{tenant}"), pool=f"{pool}", uncached_tokens=10, now=0.0)
        made.went(of("0"), pool="used", uncached_tokens=10 + pool, now=0.0)
    assert sum(len(shares) for shares in made._shares.values()) <= MOST_SHEDDING
    assert ("sheddable", "used") in made._shares
    assert ("sheddable", "0") not in made._shares


@pytest.mark.parametrize(
    ("priority_class", "status"), [(PriorityClass(sheddable=True), 503), (PriorityClass(refusal_status=429), 429)]
)
def test_a_refusal_has_the_status_of_its_class(priority_class: PriorityClass, status: int) -> None:
    refused = RequestClass(class_name="own", priority_class=priority_class, tenant="")
    made = pressure()
    assert made.refusal(RequestShedError, refused, pool="m", expectation=waits(1.0), now=0.0).status == status
