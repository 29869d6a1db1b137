"""Bookings: what this picker has sent to each endpoint and has not seen the end of."""

from collections import defaultdict
from collections.abc import Mapping

import msgspec


class Booking(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One request on one endpoint, from the pick until its exchange ends. Compared by identity."""

    endpoint: str
    booked_at: float  # monotonic seconds


class Bookings:
    """All open bookings by endpoint, in the order in which they were made."""

    def __init__(self) -> None:
        self._open: defaultdict[str, dict[Booking, None]] = defaultdict(dict)

    def book(self, endpoint: str, *, now: float) -> Booking:
        """Count one more request on the endpoint; every booking must be released exactly once."""
        booking = Booking(endpoint=endpoint, booked_at=now)
        self._open[endpoint][booking] = None
        return booking

    def release(self, booking: Booking) -> None:
        """Forget the booking; raise KeyError if it was released before."""
        held = self._open[booking.endpoint]
        del held[booking]
        if not held:
            del self._open[booking.endpoint]

    def booked_since(self, endpoint: str, *, since: float) -> int:
        """Count the open bookings made after `since`: what the pod's last report cannot show yet."""
        held = self._open.get(endpoint)
        if held is None:
            return 0
        count = 0
        for booking in reversed(held):  # newest first: only those few are looked at
            if booking.booked_at <= since:
                break
            count += 1
        return count

    def by_endpoint(self) -> Mapping[str, int]:
        """Count the open bookings of each endpoint that has any."""
        return {endpoint: len(held) for endpoint, held in self._open.items()}
