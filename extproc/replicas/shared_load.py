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


class SharedView(msgspec.Struct, frozen=True, kw_only=True):
    """What one request learns of the other replicas."""

    others: Mapping[str, EndpointBookings] = {}  # endpoint -> what all *other* replicas have booked there
    session_endpoint: str | None = None  # where the request's session was placed last, by any replica
    session_read: bool = False  # that Redis has said so: no place is then an answer, too
    adapter_endpoints: frozenset[str] = frozenset()  # where the request's adapter was placed of late, by any replica
    replicas: int = 0  # other replicas whose bookings are in `others`
    degraded: str | None = None  # why this is incomplete, for people


def add_bookings(records: Iterable[Mapping[str, EndpointBookings]]) -> dict[str, EndpointBookings]:
    """Add several replicas' bookings, endpoint by endpoint."""
    total: dict[str, EndpointBookings] = {}
    for record in records:
        for endpoint, more in record.items():
            sum_so_far = total.get(endpoint)
            total[endpoint] = (
                more
                if sum_so_far is None
                else EndpointBookings(
                    sum_so_far.requests + more.requests,
                    sum_so_far.uncached_tokens + more.uncached_tokens,
                    sum_so_far.context_tokens + more.context_tokens,
                )
            )
    return total
