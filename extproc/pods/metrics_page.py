"""One page of one endpoint, /metrics or /v1/models, fetched again and again over a kept connection; for the scraper."""

from kvmesh.pods.http_response import HttpResponse
from kvmesh.pods.pod_http import PodHttp


class MetricsPage:
    """One page; one fetch at a time. All pages of an endpoint go over the same connection."""

    def __init__(self, http: PodHttp, *, path: str = "/metrics") -> None:
        self._http = http
        self._path = path

    async def fetch(self) -> HttpResponse:
        """See `PodHttp.get`; the caller sets the deadline."""
        return await self._http.get(self._path)

    def close(self) -> None:
        """Close the connection; it may be opened again."""
        self._http.close()
