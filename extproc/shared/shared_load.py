"""State shared by picker replicas: bookings by endpoint, and the placements of sessions and adapters.

Values and sums only; `shared.shared_state` reads and writes them.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from kvmesh.pods.pod_report import EndpointLoad

DOUBT_SECONDS = 1.0  # several reports: they show a request by then
BELIEVED, LEAST_BELIEVED = 2, 4  # times the reported requests; requests
MOST_PROMPT_TOKENS = 1 << 20  # of one request, if the pod does not report its context length
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


class Claims:
    """Other replicas' bookings, as far as the pods' own reports bear them out: records in Redis may be false."""

    def __init__(self) -> None:
        self._doubted_since: dict[str, float] = {}  # endpoint -> monotonic seconds of the first report that shows less

    def believed(
        self, endpoint: str, claimed: EndpointBookings, load: EndpointLoad, *, context_length: int | None
    ) -> EndpointBookings:
        """Return the plausible part: no more requests than reported once several reports have shown fewer."""
        requests = load.unfinished_requests
        if claimed.requests <= BELIEVED * requests + LEAST_BELIEVED:
            self._doubted_since.pop(endpoint, None)
            requests = claimed.requests
        elif load.reported_at - self._doubted_since.setdefault(endpoint, load.reported_at) < DOUBT_SECONDS:
            requests = claimed.requests
        most = requests * (context_length or MOST_PROMPT_TOKENS)
        if requests == claimed.requests and claimed.uncached_tokens <= most and claimed.context_tokens <= most:
            return claimed
        share = requests / max(claimed.requests, 1)
        return EndpointBookings(
            requests,
            min(int(claimed.uncached_tokens * share), most),
            min(int(claimed.context_tokens * share), most),
            {name: min(count, requests) for name, count in claimed.promised.items()},
        )


def add_bookings(records: Iterable[Mapping[str, EndpointBookings]]) -> dict[str, EndpointBookings]:
    """Add bookings of several replicas or pools, endpoint by endpoint."""
    total: dict[str, EndpointBookings] = {}
    for record in records:
        for endpoint, more in record.items():
            total[endpoint] = total[endpoint] + more if endpoint in total else more
    return total
