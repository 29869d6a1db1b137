"""A bucket gives so much a second and so much at once, whatever the order of what is asked of it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.shared.quota import LONGEST_DEBT_SECONDS, NEVER_SECONDS, BucketTerms, TokenBucket, terms_of


def full(per_second: float, capacity: float) -> TokenBucket:
    return TokenBucket(BucketTerms(per_second, capacity), capacity, 0.0)


@pytest.mark.parametrize(
    ("per_minute", "burst_seconds", "expected"),
    [
        (600.0, 10.0, BucketTerms(10.0, 100.0)),
        (6.0, 1.0, BucketTerms(0.1, 1.0)),  # at least one at once, or no request could ever pass
        (0.0, 10.0, BucketTerms(0.0, 0.0)),  # nothing is allowed
    ],
)
def test_a_limit_per_minute_becomes_a_rate_and_a_capacity(
    per_minute: float, burst_seconds: float, expected: BucketTerms
) -> None:
    assert terms_of(per_minute, burst_seconds=burst_seconds) == expected


def test_what_was_taken_comes_back_with_time() -> None:
    bucket = full(2.0, 10.0)
    bucket.change(10.0, now=0.0)
    assert [bucket.wait(3.0, now=now) for now in (0.0, 1.0, 1.5, 100.0)] == [1.5, 0.5, 0.0, 0.0]


def test_more_than_the_capacity_is_given_to_a_full_bucket_and_leaves_a_debt() -> None:
    bucket = full(2.0, 10.0)
    assert bucket.wait(50.0, now=0.0) == 0.0
    bucket.change(50.0, now=0.0)
    assert (bucket.wait(1.0, now=0.0), bucket.wait(50.0, now=0.0)) == (20.5, 25.0)


def test_an_empty_limit_lets_nothing_pass() -> None:
    bucket = full(0.0, 0.0)
    assert (bucket.wait(1.0, now=0.0), bucket.wait(0.0, now=0.0)) == (NEVER_SECONDS, 0.0)


def test_a_share_of_a_small_limit_is_still_one() -> None:
    assert BucketTerms(0.1, 1.0).shared_by(4) == BucketTerms(0.025, 1.0)
    assert BucketTerms(8.0, 40.0).shared_by(4) == BucketTerms(2.0, 10.0)
    assert BucketTerms(8.0, 40.0).shared_by(1) == BucketTerms(8.0, 40.0)


def test_a_clock_that_goes_back_gives_nothing_and_takes_nothing() -> None:
    bucket = full(2.0, 10.0)
    bucket.change(10.0, now=5.0)
    bucket.change(0.0, now=1.0)
    assert bucket.level == 0.0


AMOUNTS = st.floats(min_value=0.0, max_value=1e9)
STEPS = st.lists(st.tuples(st.floats(min_value=0.0, max_value=100.0), AMOUNTS), max_size=30)


@given(
    per_minute=st.floats(min_value=0.01, max_value=1e9), burst=st.floats(min_value=0.1, max_value=3600.0), steps=STEPS
)
def test_nobody_gets_more_than_the_limit_and_one_burst_and_one_request(
    per_minute: float, burst: float, steps: list[tuple[float, float]]
) -> None:
    terms = terms_of(per_minute, burst_seconds=burst)
    bucket, now, passed, largest = TokenBucket(terms, terms.capacity, 0.0), 0.0, 0.0, 0.0
    for pause, amount in steps:
        now += pause
        if bucket.wait(amount, now=now) == 0.0:
            bucket.change(amount, now=now)
            # what is above the longest debt is forgiven: it is beyond anything that a request brings
            passed += min(amount, LONGEST_DEBT_SECONDS * terms.per_second)
            largest = max(largest, min(amount, LONGEST_DEBT_SECONDS * terms.per_second))
        assert passed <= (terms.capacity + now * terms.per_second + largest) * (1 + 1e-6) + 0.01 * len(steps)


@given(per_minute=st.just(0.0) | st.floats(min_value=1e-3, max_value=1e9), steps=STEPS, amount=AMOUNTS)
def test_who_waits_as_told_gets_it(per_minute: float, steps: list[tuple[float, float]], amount: float) -> None:
    terms = terms_of(per_minute, burst_seconds=10.0)
    bucket, now = TokenBucket(terms, terms.capacity, 0.0), 0.0
    for pause, taken in steps:
        now += pause
        bucket.change(taken, now=now)
    wait = bucket.wait(amount, now=now)
    assert math.isfinite(wait)
    assert wait >= 0.0
    if terms.per_second > 0:
        later = now + wait * (1 + 1e-9) + 1e-6 / terms.per_second
        assert bucket.wait(amount, now=later) * terms.per_second <= 1e-3 + 1e-6 * terms.capacity


@given(steps=STEPS)
def test_what_is_given_back_never_exceeds_the_capacity(steps: list[tuple[float, float]]) -> None:
    bucket, now = full(3.0, 100.0), 0.0
    for pause, amount in steps:
        now += pause
        bucket.change(-amount, now=now)
        assert bucket.level <= 100.0


def test_the_wait_for_next_to_nothing_is_still_a_number() -> None:
    bucket = TokenBucket(terms_of(1e-300, burst_seconds=10.0), 0.0, 0.0)
    assert math.isfinite(bucket.wait(1.0, now=0.0))
