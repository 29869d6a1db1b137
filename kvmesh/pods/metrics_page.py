"""Gets a pod's page of metrics from the path on which its engine has it."""

from collections.abc import Awaitable, Callable

from kvmesh.pods.engine_profiles import ENGINES, METRICS_PATHS
from kvmesh.pods.http_response import HttpResponse

Get = Callable[[str], Awaitable[HttpResponse]]  # GETs a path


class MetricsPage:
    """Remembers where one pod's page is."""

    __slots__ = ("_get", "path")

    def __init__(self, get: Get) -> None:
        self._get = get
        self.path = METRICS_PATHS[0]

    async def get(self) -> HttpResponse:
        """Return the page; where neither path has one, what the first of them answers. Raises what `get` raises."""
        response = await self._get(self.path)
        if is_page(response):
            return response
        for path in METRICS_PATHS:
            if path != self.path:
                other = await self._get(path)
                if is_page(other):
                    self.path = path
                    return other
        self.path = METRICS_PATHS[0]
        return response


def is_page(response: HttpResponse) -> bool:
    """Tell whether it may be Prometheus' text format; TensorRT-LLM's /metrics is JSON."""
    return response.status == 200 and response.body.lstrip()[:1] not in (b"[", b"{")


def why_no_load(response: HttpResponse) -> str:
    """Return in words what is wrong with a page without a load."""
    if response.status != 200:
        return f"/metrics answered {response.status}"
    if not is_page(response):
        return "/metrics is JSON, and there is no /prometheus/metrics (TensorRT-LLM: return_perf_metrics: true)"
    return f"/metrics shows the load of no engine that is known here ({ENGINES})"
