"""Bookings in requests and tokens: what is open, and what of it still waits to be computed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.inflight import Bookings, EndpointTotals


def open_on_a(bookings: Bookings, *, now: float) -> tuple[int, float, int]:
    totals = bookings.totals("a", now=now)
    return totals.requests, totals.uncached_tokens, totals.context_tokens


def test_uncached_tokens_shrink_at_the_endpoint_s_rate_oldest_first() -> None:
    bookings = Bookings(tokens_per_second=1000.0)
    first = bookings.book("a", now=0.0, uncached_tokens=500, context_tokens=800)
    bookings.book("a", now=0.0, uncached_tokens=1000, context_tokens=1000)
    assert open_on_a(bookings, now=0.0) == (2, 1500, 1800)
    assert open_on_a(bookings, now=1.0) == (2, 500, 1800)
    assert (first.queued_tokens, first.uncached_tokens) == (0.0, 500)
    assert open_on_a(bookings, now=9.0) == (2, 0, 1800)


def test_what_was_computed_takes_room_in_the_cache_until_it_fades_or_the_pod_is_another() -> None:
    bookings = Bookings(fill_seconds=10.0)
    bookings.release(bookings.book("a", now=0.0, uncached_tokens=1000))
    assert bookings.totals("a", now=0.0).filled_tokens == 1000
    assert bookings.totals("a", now=10.0).filled_tokens == pytest.approx(1000 / 2.71828, rel=1e-4)
    bookings.emptied("a")
    assert bookings.totals("a", now=0.0).filled_tokens == 0


def test_time_without_work_is_not_credited_to_later_work() -> None:
    bookings = Bookings(tokens_per_second=1000.0)
    bookings.release(bookings.book("a", now=0.0, uncached_tokens=10))
    bookings.book("a", now=100.0, uncached_tokens=1000)
    assert bookings.totals("a", now=100.5).uncached_tokens == 500


def test_a_rate_that_was_learned_counts_from_then_on() -> None:
    bookings = Bookings(tokens_per_second=1000.0)
    bookings.book("a", now=0.0, uncached_tokens=3000)
    bookings.prefill_rate("a", tokens_per_second=500.0, now=1.0)
    assert bookings.totals("a", now=3.0).uncached_tokens == 1000


def test_the_median_of_the_learned_rates_counts_for_every_endpoint() -> None:
    bookings = Bookings(tokens_per_second=1.0)
    for endpoint, rate in (("a", 10.0), ("b", 1000.0), ("c", 1200.0)):
        bookings.book(endpoint, now=0.0, uncached_tokens=3000)
        bookings.prefill_rate(endpoint, tokens_per_second=rate, now=0.0)
    assert [bookings.totals(endpoint, now=1.0).uncached_tokens for endpoint in "abc"] == [2000.0] * 3


def test_replicas_share_an_endpoint_s_rate() -> None:
    ours, theirs = Bookings(tokens_per_second=1000.0), Bookings(tokens_per_second=1000.0)
    for bookings in (ours, theirs):
        bookings.book("a", now=0.0, uncached_tokens=3000)
        bookings.totals("a", now=0.0, others_tokens=3000)
    waiting = [[bookings.totals("a", now=now).uncached_tokens for bookings in (ours, theirs)] for now in (1, 2, 6)]
    assert waiting == [[2500, 2500], [2000, 2000], [0, 0]]


def test_a_prompt_that_is_gone_waits_no_more() -> None:
    bookings = Bookings(tokens_per_second=1.0)
    answered, gone = (bookings.book("a", now=0.0, uncached_tokens=tokens, context_tokens=9) for tokens in (100, 10))
    assert open_on_a(bookings, now=0.0) == (2, 110, 18)
    bookings.release(gone)
    assert (list(bookings.all_totals(now=0.0)), open_on_a(bookings, now=0.0)) == (["a"], (1, 100.0, 9))
    bookings.release(answered)
    assert bookings.all_totals(now=0.0) == {}
    with pytest.raises(KeyError):
        bookings.release(answered)


def test_nothing_is_open_on_an_endpoint_that_never_got_anything() -> None:
    assert Bookings().totals("a", now=0.0) == EndpointTotals()


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["book", "release", "look"]), st.integers(0, 5000), st.floats(0, 2)),
        max_size=60,
    )
)
def test_whatever_happens_totals_are_those_of_the_open_bookings(steps: list[tuple[str, int, float]]) -> None:
    bookings, now, held = Bookings(tokens_per_second=700.0), 0.0, []
    for what, number, seconds in steps:
        now += seconds
        if what == "book":
            held.append(bookings.book("a", now=now, uncached_tokens=number, context_tokens=number))
        elif what == "release" and held:
            bookings.release(held.pop(number % len(held)))
        totals = bookings.totals("a", now=now, others_tokens=number if what == "look" else None)
        assert totals.requests == len(held)
        assert totals.context_tokens == sum(booking.context_tokens for booking in held)
        assert totals.uncached_tokens == pytest.approx(sum(booking.queued_tokens for booking in held), abs=1e-3)
        assert totals.uncached_tokens >= 0


def test_a_first_token_tells_that_the_prompt_is_computed() -> None:
    bookings = Bookings(tokens_per_second=1000.0)
    long = bookings.book("a", now=0.0, uncached_tokens=9000, context_tokens=9000)
    bookings.book("a", now=0.0, uncached_tokens=2000, context_tokens=2000)
    bookings.first_token(long, now=1.0)
    assert open_on_a(bookings, now=1.0) == (2, 2000, 11_000)
    bookings.first_token(long, now=1.0)
    bookings.release(long)
    assert open_on_a(bookings, now=1.0) == (1, 2000, 2000)


def test_a_report_tells_that_what_was_sent_before_the_waiting_requests_is_computed_but_one() -> None:
    bookings = Bookings(tokens_per_second=1.0)
    for number in range(6):
        bookings.book("a", now=number / 10, uncached_tokens=1000 * (1 + number % 3), context_tokens=1)
    bookings.book("a", now=0.99, uncached_tokens=500, context_tokens=1)  # hardly there when the pod was asked
    before = open_on_a(bookings, now=1.0)
    bookings.reported("a", waiting_requests=6, at=1.0)
    assert open_on_a(bookings, now=1.0) == before
    bookings.reported("a", waiting_requests=2, at=1.0)
    # the largest of the first four, both that wait, and the one on its way; a second has computed one token
    assert open_on_a(bookings, now=1.0)[1] == pytest.approx(3000 + 2000 + 3000 + 500)
    bookings.reported("a", waiting_requests=0, at=1.0)
    assert open_on_a(bookings, now=1.0)[1] == pytest.approx(3000 + 500)
    bookings.reported("b", waiting_requests=0, at=1.0)
    slow = Bookings(tokens_per_second=1.0)
    for number in range(3):
        slow.book("a", now=number, uncached_tokens=1000, context_tokens=1)
    slow.reported("a", waiting_requests=0, at=4.0, first_token_seconds=2.0)  # all may be in the step that runs
    assert open_on_a(slow, now=4.0)[1] == pytest.approx(3000, abs=10)


@given(seconds=st.lists(st.floats(0, 100), min_size=1, max_size=20), filled=st.integers(0, 10**6))
def test_looking_often_changes_nothing_where_nothing_waits(seconds: list[float], filled: int) -> None:
    looked, left = Bookings(), Bookings()
    for bookings in (looked, left):
        bookings.release(bookings.book("a", now=0.0, uncached_tokens=filled, context_tokens=filled))
    now = 0.0
    for more in seconds:
        now += more
        looked.totals("a", now=now)
    assert looked.totals("a", now=now) == left.totals("a", now=now)
    for bookings in (looked, left):
        bookings.book("a", now=now, uncached_tokens=500, context_tokens=500)
    assert looked.totals("a", now=now + 0.01) == left.totals("a", now=now + 0.01)
