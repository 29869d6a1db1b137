"""A request under which a pod died is refused for a minute; innocents are not."""

from extproc.choosing.deadly_requests import REFUSED_SECONDS, UNSURE_SECONDS, DeadlyRequests
from extproc.errors import DeadlyRequestError

KILLER, OTHER = 1, 2


def retry_after(deadly: DeadlyRequests, request: int, *, now: float) -> int:
    """Return the seconds told to the client, 0 if the request may go."""
    try:
        deadly.turn_away(request, now=now)
    except DeadlyRequestError as error:
        return error.retry_after_seconds or 0
    return 0


def refused(deadly: DeadlyRequests, *, now: float) -> list[int]:
    return [request for request in (KILLER, OTHER) if retry_after(deadly, request, now=now)]


def test_nothing_is_refused_before_a_death() -> None:
    deadly = DeadlyRequests()
    assert not deadly.has_some
    deadly.unanswered("a", KILLER, is_unserved=False, now=0.0)
    assert not deadly.has_some
    assert refused(deadly, now=0.1) == []


def test_the_only_suspect_is_refused_for_a_minute_whichever_is_noticed_first() -> None:
    for is_death_first in (False, True):
        deadly = DeadlyRequests()
        if is_death_first:
            deadly.died("a", now=0.9)
        deadly.unanswered("a", KILLER, is_unserved=True, now=1.0)
        if not is_death_first:
            deadly.died("a", now=1.1)
        assert refused(deadly, now=50.0) == [KILLER]
        assert retry_after(deadly, KILLER, now=31.0) in (30, 31)
        assert refused(deadly, now=1.2 + REFUSED_SECONDS) == []
        assert not deadly.has_some


def test_of_several_suspects_the_one_of_two_deaths_is_refused() -> None:
    deadly = DeadlyRequests()
    for request in (KILLER, OTHER):
        deadly.unanswered("a", request, is_unserved=True, now=1.0)
    deadly.died("a", now=1.2)
    assert refused(deadly, now=1.3) == []
    deadly.unanswered("b", 3, is_unserved=True, now=2.0)
    deadly.unanswered("b", KILLER, is_unserved=True, now=2.0)
    deadly.died("b", now=2.1)
    assert refused(deadly, now=2.2) == [KILLER]


def test_an_unserved_request_waits_for_the_next_report_of_its_pod() -> None:
    deadly = DeadlyRequests()
    deadly.unanswered("a", KILLER, is_unserved=True, now=1.0)
    assert refused(deadly, now=1.1) == [KILLER]
    deadly.reported("b")
    assert refused(deadly, now=1.2) == [KILLER]
    deadly.reported("a")
    assert refused(deadly, now=1.3) == []


def test_it_does_not_wait_for_long() -> None:
    deadly = DeadlyRequests()
    deadly.unanswered("a", KILLER, is_unserved=True, now=1.0)
    assert refused(deadly, now=1.1 + UNSURE_SECONDS) == []
    assert not deadly.has_some


def test_a_death_long_after_a_request_is_not_its_doing() -> None:
    deadly = DeadlyRequests()
    deadly.unanswered("a", KILLER, is_unserved=False, now=1.0)
    deadly.died("a", now=9.0)
    assert refused(deadly, now=9.1) == []


def test_a_pod_that_leaves_the_pool_has_not_died() -> None:
    deadly = DeadlyRequests()
    deadly.unanswered("a", KILLER, is_unserved=True, now=1.0)
    deadly.forget("a")
    deadly.died("a", now=1.1)
    assert refused(deadly, now=1.2) == []


def test_it_keeps_few_requests_whatever_comes() -> None:
    deadly = DeadlyRequests()
    for request in range(10_000):
        deadly.unanswered("a", request, is_unserved=True, now=1.0)
    deadly.died("a", now=1.1)
    assert sum(bool(retry_after(deadly, request, now=1.2)) for request in range(10_000)) == 0
    for request in range(10_000):
        deadly.died("b", now=1.2)
        deadly.unanswered("b", request, is_unserved=True, now=1.2)
    assert sum(bool(retry_after(deadly, request, now=1.3)) for request in range(10_000)) < 100
