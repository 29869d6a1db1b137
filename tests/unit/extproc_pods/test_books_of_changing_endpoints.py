"""Endpoints come and go while requests are open: nothing booked is lost, and nothing of the gone is kept."""

from extproc.pods.endpoint import NO_TREND
from extproc.policy.values import PickPolicy
from tests.unit.extproc_choosing.pick_candidates import load
from tests.unit.extproc_pools.test_picker_books import books, picked, routed


async def test_an_endpoint_that_is_gone_keeps_its_booking_until_the_end() -> None:
    made, _, _ = books()
    booking = routed(made, await picked())  # b
    made.set_endpoints(("a",))
    assert made.knows("b")
    assert made.bookings.by_endpoint() == {"b": 1}
    assert made.open_requests == 1
    made.release(booking, status=200)
    assert not made.knows("b")
    assert made.open_requests == 0
    assert made.picks == {"a": 0}


async def test_an_endpoint_without_requests_is_forgotten_at_once() -> None:
    made, _, _ = books()
    made.reported("b", load(reported_at=1.0), NO_TREND)
    made.release(routed(made, await picked()), status=200)
    made.set_endpoints(("a", "c"))
    assert made.picks == {"a": 0, "c": 0}
    made.reported("b", load(reported_at=2.0), NO_TREND)  # a scrape that was under way
    assert made.estimates.errors() == {}
    assert "b" not in made.estimates._samples


async def test_an_endpoint_that_comes_back_before_its_last_request_ends_goes_on() -> None:
    made, _, _ = books()
    booking = routed(made, await picked())
    made.set_endpoints(("a",))
    made.set_endpoints(("a", "b"))
    made.release(booking, status=200)
    assert made.picks == {"a": 0, "b": 1}


async def test_a_retry_away_from_an_endpoint_that_is_gone_forgets_it() -> None:
    made, _, _ = books()
    booking = routed(made, await picked())
    made.set_endpoints(("a",))
    moved = made.rebook(booking, "a")
    assert made.picks == {"a": 0}
    made.release(moved, status=200)
    assert made.bookings.by_endpoint() == {}


async def test_whoever_waits_is_told_of_new_endpoints() -> None:
    made, _, _ = books()
    told: list[str] = []
    made.freed = lambda: told.append("freed")
    made.set_endpoints(("a", "b", "c"))
    assert told == ["freed"]


async def test_another_policy_leaves_bookings_and_what_was_learned() -> None:
    made, _, _ = books()
    routed(made, await picked(session="s"))
    made.reconfigure(PickPolicy(session_seconds=1000.0, prefill_tokens_per_second=5.0))
    assert made.bookings.by_endpoint() == {"b": 1}
    assert made.memory.session_place("tiny\0s", now=900.0) == "b"
