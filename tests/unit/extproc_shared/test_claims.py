"""Other replicas' bookings are believed as far as the pods' reports bear them out."""

import pytest

from extproc.shared.shared_load import Claims, EndpointBookings
from tests.unit.extproc_choosing.pick_candidates import load

MILLION = EndpointBookings(1_000_000, 10**12, 10**12, {"chat": 1_000_000})
NOTHING = EndpointBookings(0, 0, 0, {"chat": 0})


def believed(
    claims: Claims, claimed: EndpointBookings, *, at: float, running: int = 0, length: int | None = None
) -> EndpointBookings:
    report = load(running_requests=running, reported_at=at)
    return claims.believed("a", claimed, report, context_length=length)


def test_requests_that_no_report_shows_are_believed_for_a_second() -> None:
    claims = Claims()
    assert [believed(claims, MILLION, at=at).requests for at in (10.0, 10.9, 11.0, 30.0)] == [10**6, 10**6, 0, 0]
    assert believed(claims, MILLION, at=31.0) == NOTHING


def test_as_many_as_reported_are_believed_with_their_share_of_the_tokens() -> None:
    claims = Claims()
    believed(claims, MILLION, at=10.0, running=3)
    assert believed(claims, MILLION, at=12.0, running=3) == EndpointBookings(3, 3_000_000, 3_000_000, {"chat": 3})
    assert believed(claims, MILLION, at=12.0, running=3, length=4096).context_tokens == 3 * 4096


def test_a_burst_that_the_next_report_shows_is_believed() -> None:
    claims, burst = Claims(), EndpointBookings(40, 4000, 40_000)
    assert [believed(claims, burst, at=at, running=n) for at, n in ((10.0, 0), (10.5, 25), (11.0, 0), (11.9, 40))] == [
        burst
    ] * 4


@pytest.mark.parametrize("claimed", [EndpointBookings(), EndpointBookings(4, 400, 4000)], ids=["none", "few"])
def test_few_requests_are_always_believed(claimed: EndpointBookings) -> None:
    claims = Claims()
    assert [believed(claims, claimed, at=at) for at in (10.0, 20.0)] == [claimed, claimed]


def test_no_request_has_more_tokens_than_its_pod_takes() -> None:
    claimed = EndpointBookings(1, 10**12, 10**12)
    assert believed(Claims(), claimed, at=10.0, running=1, length=4096) == EndpointBookings(1, 4096, 4096)
