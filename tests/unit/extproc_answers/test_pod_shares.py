"""Within a bucket it is not known where an observation lies: the share is an estimate between two bounds."""

from hypothesis import given
from hypothesis import strategies as st

from extproc.ledger.slo_telemetry import PodShares, Within, within

BOUNDS = (0.1, 0.5, 1.0)
COUNTS = (10.0, 20.0, 40.0, 30.0)


def of(target: float) -> Within:
    return within(BOUNDS, COUNTS, target)


def test_a_target_within_a_bucket_is_interpolated() -> None:
    assert of(0.75) == Within(observed=100, least=30, estimate=50, most=70)
    assert of(0.05) == Within(observed=100, least=0, estimate=5, most=10)


def test_a_target_that_is_a_bound_is_known_exactly() -> None:
    assert of(0.5) == Within(observed=100, least=30, estimate=30, most=30)
    assert of(1.0) == Within(observed=100, least=70, estimate=70, most=70)


def test_beyond_the_last_bound_only_the_bounds_are_known() -> None:
    assert of(3.0) == Within(observed=100, least=70, estimate=70, most=100)


@given(
    st.lists(st.floats(0.001, 100), min_size=1, max_size=30),
    st.floats(0.001, 100),
    st.sets(st.floats(0.01, 90), min_size=1, max_size=8),
)
def test_the_true_number_lies_between_the_bounds(times: list[float], target: float, bounds: set[float]) -> None:
    ordered = sorted(bounds)
    counts = [0.0] * (len(ordered) + 1)
    for seconds in times:
        counts[sum(bound < seconds for bound in ordered)] += 1
    found = within(ordered, counts, target)
    assert found.least <= sum(seconds <= target for seconds in times) <= found.most
    assert found.least <= found.estimate <= found.most <= found.observed == len(times)


def test_each_class_counts_by_the_target_that_was_in_force_when_it_was_observed() -> None:
    pods = PodShares()
    pods.take(("m", "both"), BOUNDS, (1.0, 0.0, 0.0, 0.0), {"chat": 0.1})
    pods.take(("m", "both"), BOUNDS, (2.0, 3.0, 0.0, 0.0), {"chat": 0.1, "batch": 0.5})
    pods.take(("m", "both"), BOUNDS, (2.0, 3.0, 0.0, 0.0), {"chat": 0.5, "batch": 0.5})
    assert pods.sums == {
        ("chat", ("m", "both")): Within(observed=5, least=2, estimate=2, most=2),
        ("batch", ("m", "both")): Within(observed=4, least=4, estimate=4, most=4),
    }
