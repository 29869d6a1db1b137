"""Adding up what several replicas have booked."""

from extproc.shared.shared_load import EndpointBookings, add_bookings

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


def test_bookings_of_several_replicas_add_up_endpoint_by_endpoint() -> None:
    one = {A: EndpointBookings(1, 100, 1000)}
    two = {A: EndpointBookings(2, 0, 500), B: EndpointBookings(1, 7, 8)}

    assert add_bookings([one, {}, two]) == {A: EndpointBookings(3, 100, 1500), B: EndpointBookings(1, 7, 8)}
    assert one == {A: EndpointBookings(1, 100, 1000)}


def test_streams_with_a_promise_add_up_class_by_class() -> None:
    one, two = {A: EndpointBookings(2, 0, 0, {"chat": 2})}, {A: EndpointBookings(3, 0, 0, {"chat": 1, "code": 2})}
    assert add_bookings([one, two, {A: EndpointBookings(1)}]) == {A: EndpointBookings(6, 0, 0, {"chat": 3, "code": 2})}


def test_nobody_has_booked_nothing() -> None:
    assert add_bookings([]) == {}
