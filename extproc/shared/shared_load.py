"""State shared by picker replicas: bookings by endpoint, and the placements of sessions and adapters.

Values and sums only; `shared.shared_state` reads and writes them.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]


class EndpointBookings(msgspec.Struct, frozen=True, array_like=True):
    """In-flight bookings on one endpoint."""

    requests: Count = 0
    uncached_tokens: Count = 0  # prompt tokens that the endpoint has yet to compute
    context_tokens: Count = 0  # context of all these requests, which decoding attends to
    promised: Mapping[str, Count] = {}  # class -> these requests, for classes with an inter-token target

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
    """One request's view of the other replicas."""

    others: Mapping[str, EndpointBookings] = {}  # endpoint -> bookings of all *other* replicas
    session_endpoint: str | None = None  # last placement of the request's session, by any replica
    session_read: bool = False  # Redis has answered: None above then means that there is no placement
    adapter_endpoints: frozenset[str] = frozenset()  # recent placements of the request's adapter, by any replica
    replicas: int = 0  # other replicas whose bookings are in `others`
    degraded: str | None = None  # why the view is incomplete, for people


def add_bookings(records: Iterable[Mapping[str, EndpointBookings]]) -> dict[str, EndpointBookings]:
    """Add bookings of several replicas or pools, endpoint by endpoint."""
    total: dict[str, EndpointBookings] = {}
    for record in records:
        for endpoint, more in record.items():
            total[endpoint] = total[endpoint] + more if endpoint in total else more
    return total
