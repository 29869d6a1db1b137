"""What picker replicas share: how much each has booked on every endpoint, and where sessions and adapters were placed.

Values and sums only; `replicas.shared_state` reads and writes them.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]


class EndpointBookings(msgspec.Struct, frozen=True, array_like=True):
    """What is booked on one endpoint and has not ended."""

    requests: Count = 0
    uncached_tokens: Count = 0  # of prompts that the endpoint has still to compute
    context_tokens: Count = 0  # of all these requests: what decoding has to attend to
    promised: Mapping[str, Count] = {}  # these requests by class, of classes with a promised inter-token time

    def __add__(self, more: "EndpointBookings") -> "EndpointBookings":
        return EndpointBookings(
            self.requests + more.requests,
            self.uncached_tokens + more.uncached_tokens,
            self.context_tokens + more.context_tokens,
            add_counts(self.promised, more.promised),
        )


def add_counts(some: Mapping[str, int], more: Mapping[str, int]) -> Mapping[str, int]:
    """Add counts name by name."""
    if not some or not more:
        return some or more
    return {name: some.get(name, 0) + more.get(name, 0) for name in {**some, **more}}


class SharedView(msgspec.Struct, frozen=True, kw_only=True):
    """What one request learns of the other replicas."""

    others: Mapping[str, EndpointBookings] = {}  # endpoint -> what all *other* replicas have booked there
    session_endpoint: str | None = None  # where the request's session was placed last, by any replica
    session_read: bool = False  # that Redis has said so: no place is then an answer, too
    adapter_endpoints: frozenset[str] = frozenset()  # where the request's adapter was placed of late, by any replica
    replicas: int = 0  # other replicas whose bookings are in `others`
    degraded: str | None = None  # why this is incomplete, for people


def add_bookings(records: Iterable[Mapping[str, EndpointBookings]]) -> dict[str, EndpointBookings]:
    """Add bookings of several replicas or pools, endpoint by endpoint."""
    total: dict[str, EndpointBookings] = {}
    for record in records:
        for endpoint, more in record.items():
            total[endpoint] = total[endpoint] + more if endpoint in total else more
    return total
