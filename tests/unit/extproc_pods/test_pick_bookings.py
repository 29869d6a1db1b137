"""Bookings in requests and tokens: what is open, and what of it still waits to be computed."""

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.pods.inflight import Booking, Bookings, EndpointTotals
from tests.unit.extproc_choosing.pick_candidates import load

NO_STEP_ENDS = 1e9  # seconds to a first token: anything may be in the running step, and only the other rules tell


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


def test_streams_of_classes_with_a_promise_are_counted_until_they_end() -> None:
    bookings = Bookings()
    chats = [bookings.book("a", now=0.0, promised="chat") for _ in range(2)]
    code = bookings.book("a", now=0.0, promised="code")
    bookings.book("a", now=0.0)
    seen = bookings.totals("a", now=0.0)
    assert (seen.requests, seen.promised) == (4, {"chat": 2, "code": 1})
    for booking in (chats[0], code):
        bookings.release(booking)
    assert bookings.totals("a", now=0.0).promised == {"chat": 1}
    assert seen.promised == {"chat": 2, "code": 1}  # as it was then


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
        st.tuples(
            st.sampled_from(["book", "release", "look", "report"]),
            st.integers(0, 5000),
            st.floats(0, 2),
            st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 60)),
        ),
        max_size=60,
    )
)
def test_whatever_happens_totals_are_those_of_the_open_bookings(
    steps: list[tuple[str, int, float, tuple[int, int, int]]],
) -> None:
    bookings, now, held = Bookings(tokens_per_second=700.0), 0.0, []
    for what, number, seconds, (waiting, running, first_tokens) in steps:
        now += seconds
        if what == "book":
            held.append(
                bookings.book(
                    "a",
                    now=now,
                    uncached_tokens=number,
                    context_tokens=number,
                    answer_tokens=number / 7,
                    answer_variance=number / 3,
                )
            )
        elif what == "release" and held:
            bookings.release(held.pop(number % len(held)))
        elif what == "report":
            report = load(
                reported_at=now - number / 5000,
                waiting_requests=waiting,
                running_requests=running,
                first_token_count=first_tokens,
            )
            bookings.reported("a", report, first_token_seconds=number / 5000)
        before = [booking.queued_tokens for booking in held]
        assert_sums(bookings, held, now=now, others_tokens=number if what == "look" else None)
        now += seconds / 2
        assert_sums(bookings, held, now=now)
        # the oldest first: one that has lost some has none before it that has any left
        lost = [at for at, booking in enumerate(held) if booking.queued_tokens < before[at]]
        assert not any(booking.queued_tokens for booking in held[: max(lost, default=0)])


def assert_sums(bookings: Bookings, held: list[Booking], *, now: float, others_tokens: float | None = None) -> None:
    totals = bookings.totals("a", now=now, others_tokens=others_tokens)
    assert totals.requests == len(held)
    growth = sum(booking.answer_tokens for booking in held) / 2
    assert totals.context_tokens == sum(booking.context_tokens for booking in held)
    spread = sqrt(sum(booking.answer_variance for booking in held)) / 2
    assert totals.growth_tokens == pytest.approx(growth + (spread if growth else 0.0), abs=1e-3)
    assert totals.uncached_tokens == pytest.approx(sum(booking.queued_tokens for booking in held), abs=1e-6)
    assert totals.uncached_tokens >= 0
    assert all(0 <= booking.queued_tokens <= booking.uncached_tokens for booking in held)


def test_a_report_tells_that_what_was_sent_before_the_waiting_requests_is_computed_but_one() -> None:
    bookings = Bookings(tokens_per_second=1.0)
    for number in range(6):
        bookings.book("a", now=number / 10, uncached_tokens=1000 * (1 + number % 3), context_tokens=1)
    bookings.book("a", now=0.99, uncached_tokens=500, context_tokens=1)  # hardly there when the pod was asked
    assert open_on_a(bookings, now=1.0)[1] == pytest.approx(12_499)
    bookings.reported("a", load(waiting_requests=6, reported_at=1.0))
    assert open_on_a(bookings, now=1.0) == (7, 12_500, 7)
    bookings.reported("a", load(waiting_requests=2, reported_at=1.0))
    # the largest of the first four, both that wait, and the one on its way
    assert open_on_a(bookings, now=1.0) == (7, 3000 + 2000 + 3000 + 500, 7)
    bookings.reported("a", load(reported_at=1.0))
    assert open_on_a(bookings, now=1.0) == (7, 3000 + 500, 7)
    bookings.reported("b", load(reported_at=1.0))
    assert bookings.totals("b", now=1.0) == EndpointTotals()


@pytest.mark.parametrize(("first_token_seconds", "left"), [(4.0, 3000), (2.0, 2000), (0.5, 1000)])
def test_what_was_sent_within_the_usual_time_to_a_first_token_may_be_in_the_running_step(
    first_token_seconds: float, left: int
) -> None:
    bookings = Bookings(tokens_per_second=1.0)
    for number in range(3):
        bookings.book("a", now=number, uncached_tokens=1000, context_tokens=1)
    bookings.reported("a", load(reported_at=4.0), first_token_seconds=first_token_seconds)
    assert open_on_a(bookings, now=4.0)[1] == pytest.approx(left, abs=10)


def booked(*tokens: int, rate: float) -> tuple[Bookings, list[Booking]]:
    """Book prompts of so many tokens at 0; the pod has counted 100 first tokens before them."""
    bookings = Bookings(tokens_per_second=rate)
    made = [bookings.book("a", now=0.0, uncached_tokens=each) for each in tokens]
    report(bookings, at=0.0, first_tokens=100)
    return bookings, made


def report(bookings: Bookings, *, at: float, first_tokens: int, waiting: int = 0, running: int = 0) -> None:
    bookings.reported(
        "a",
        load(reported_at=at, first_token_count=first_tokens, waiting_requests=waiting, running_requests=running),
        first_token_seconds=NO_STEP_ENDS,
    )


def queued(made: list[Booking]) -> list[float]:
    return [booking.queued_tokens for booking in made]


def test_prompts_that_wait_by_a_report_are_put_back_whole_though_the_books_had_drained_them() -> None:
    bookings, made = booked(1000, 1000, 1000, rate=1000.0)
    bookings.totals("a", now=2.5)
    assert queued(made) == [0, 0, 500]
    report(bookings, at=2.5, first_tokens=100, waiting=2, running=1)
    assert queued(made) == [0, 1000, 1000]
    assert open_on_a(bookings, now=3.5) == (3, 1000, 0)
    assert queued(made) == [0, 0, 1000]  # the oldest first again


def test_a_request_that_may_be_on_its_way_is_none_of_those_that_wait() -> None:
    bookings, made = booked(1000, 1000, rate=1000.0)
    made.append(bookings.book("a", now=2.5, uncached_tokens=1000))
    report(bookings, at=2.51, first_tokens=100, waiting=1, running=1)
    assert queued(made) == [0, 1000, pytest.approx(990)]


def test_as_many_of_the_oldest_prompts_are_computed_as_the_pod_has_counted_first_tokens() -> None:
    bookings, made = booked(9000, 1000, 2000, rate=1.0)
    report(bookings, at=0.0, first_tokens=102, running=3)
    assert queued(made) == [0, 0, 2000]
    report(bookings, at=0.0, first_tokens=102, running=3)
    assert open_on_a(bookings, now=0.0) == (3, 2000, 0)


def test_the_first_report_of_a_pod_tells_nothing_of_its_first_tokens() -> None:
    bookings = Bookings(tokens_per_second=1.0)
    bookings.book("a", now=0.0, uncached_tokens=1000)
    report(bookings, at=0.0, first_tokens=100, running=1)
    assert open_on_a(bookings, now=0.0) == (1, 1000, 0)


def test_prompts_that_the_books_took_for_computed_early_are_not_counted_again_with_their_first_tokens() -> None:
    bookings, made = booked(1000, 1000, 1000, 1000, rate=1000.0)
    bookings.totals("a", now=2.0)
    seen = []
    for first_tokens in (101, 102, 103):
        report(bookings, at=2.0, first_tokens=first_tokens, running=4)
        seen.append(queued(made))
    assert seen == [[0, 0, 1000, 1000], [0, 0, 1000, 1000], [0, 0, 0, 1000]]


def test_a_request_that_ended_before_its_first_token_was_reported_is_not_counted_again() -> None:
    bookings, made = booked(1000, 1000, rate=1.0)
    bookings.release(made[0])
    report(bookings, at=0.0, first_tokens=101, running=1)
    assert open_on_a(bookings, now=0.0) == (1, 1000, 0)


def test_prompts_that_were_put_back_count_with_their_first_tokens() -> None:
    bookings, made = booked(1000, 1000, 1000, rate=1000.0)
    report(bookings, at=3.0, first_tokens=100, waiting=3)
    assert queued(made) == [1000, 1000, 1000]
    report(bookings, at=3.0, first_tokens=101, waiting=2, running=1)
    assert queued(made) == [0, 1000, 1000]


def test_the_smaller_count_of_a_restarted_pod_changes_nothing() -> None:
    bookings, made = booked(1000, 1000, 1000, rate=1000.0)
    bookings.totals("a", now=1.0)  # one more than the pod has counted
    report(bookings, at=1.0, first_tokens=3, running=3)
    assert queued(made) == [0, 1000, 1000]
    report(bookings, at=1.0, first_tokens=4, running=3)
    assert queued(made) == [0, 0, 1000]


def test_of_what_waits_where_others_send_requests_too_only_our_share_is_ours() -> None:
    bookings, made = booked(1000, 1000, 1000, 1000, rate=1000.0)
    report(bookings, at=4.0, first_tokens=100, waiting=4, running=4)
    assert queued(made) == [0, 0, 1000, 1000]


def test_of_first_tokens_where_others_send_requests_too_only_our_share_is_ours() -> None:
    bookings, made = booked(1000, 1000, 1000, 1000, rate=1.0)
    report(bookings, at=0.0, first_tokens=104, running=8)
    assert queued(made) == [0, 0, 1000, 1000]


def test_our_share_of_few_first_tokens_adds_up_from_report_to_report() -> None:
    bookings, made = booked(1000, 1000, 1000, 1000, rate=1.0)
    for first_tokens in range(101, 105):
        report(bookings, at=0.0, first_tokens=first_tokens, running=8)
    assert queued(made) == [0, 0, 1000, 1000]


def test_first_tokens_of_prompts_that_are_not_in_the_books_are_not_kept_for_later_ones() -> None:
    bookings, made = booked(1000, rate=1.0)
    report(bookings, at=0.0, first_tokens=150, running=1)
    made.append(bookings.book("a", now=0.0, uncached_tokens=1000))
    report(bookings, at=0.0, first_tokens=150, running=2)
    assert queued(made) == [0, 1000]


def test_the_newest_that_wait_are_never_taken_for_computed() -> None:
    bookings, made = booked(1000, 1000, 1000, rate=1.0)
    # none was sent long enough ago to be known there, and first tokens of others came at once
    report(bookings, at=0.0, first_tokens=150, waiting=2, running=1)
    assert queued(made) == [0, 1000, 1000]
    report(bookings, at=0.0, first_tokens=151, waiting=1, running=2)  # those of before are not kept for later
    assert queued(made) == [0, 0, 1000]
    bookings.reported("a", load(reported_at=1.0, first_token_count=151, waiting_requests=1, running_requests=2))
    assert queued(made) == [0, 0, 1000]


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


def test_the_first_token_of_a_request_without_uncached_tokens_tells_of_no_other() -> None:
    bookings = Bookings(tokens_per_second=1.0)
    bookings.book("a", now=0.0, uncached_tokens=0, context_tokens=50)
    bookings.reported("a", load(reported_at=0.0), first_token_seconds=9.0)
    bookings.book("a", now=0.0, uncached_tokens=100, context_tokens=100)
    bookings.reported("a", load(reported_at=0.0, running_requests=2, first_token_count=1), first_token_seconds=9.0)
    assert open_on_a(bookings, now=0.0)[1] == 100
    bookings.reported("a", load(reported_at=0.0, running_requests=2, first_token_count=2), first_token_seconds=9.0)
    assert open_on_a(bookings, now=0.0)[1] == 0


def test_clients_that_leave_swallow_no_first_tokens_of_others() -> None:
    bookings = Bookings(tokens_per_second=1.0)
    bookings.book("a", now=0.0, uncached_tokens=1, context_tokens=1)
    bookings.reported("a", load(reported_at=0.0), first_token_seconds=9.0)
    for _ in range(5):
        bookings.release(bookings.book("a", now=0.0, uncached_tokens=100, context_tokens=100))
    stays = bookings.book("a", now=0.0, uncached_tokens=100, context_tokens=100)
    bookings.reported("a", load(reported_at=0.0, running_requests=2, first_token_count=0), first_token_seconds=9.0)
    bookings.reported("a", load(reported_at=0.0, running_requests=2, first_token_count=2), first_token_seconds=9.0)
    assert stays.queued_tokens == 0
