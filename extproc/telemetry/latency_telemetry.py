"""TTFT and inter-token time by model and role, out of the histograms that the pods show themselves.

`metrics_scraper` hands in the pages that it fetches anyway; each pod's is read every few seconds, which costs 0.1 ms.
Every replica of the picker shows all pods: their series are not to be added up over replicas.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from extproc.pods.endpoint import EndpointLoad, Role
from extproc.pods.pod_latencies import PodLatencies
from extproc.pods.vllm_metrics import parse_latencies
from extproc.telemetry.histogram_telemetry import add_series

READ_EVERY_SECONDS = 5.0
STARTED = re.compile(rb"^process_start_time_seconds (\S+)", re.MULTILINE)
# vLLM's own (vllm/v1/metrics/loggers.py, 0.32): what comes from there is counted exactly
TTFT_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
INTER_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


class LatencyTelemetry(Collector):
    """Implements `metrics_scraper.PageReader`."""

    def __init__(self, registry: CollectorRegistry, *, read_every_seconds: float = READ_EVERY_SECONDS) -> None:
        self.role_of: Callable[[str], str] = _both  # endpoint -> role
        self._ttft = PodLatencies(TTFT_SECONDS)
        self._inter_token = PodLatencies(INTER_TOKEN_SECONDS)
        self._read_every_seconds = read_every_seconds
        self._due: dict[str, float] = {}  # endpoint -> monotonic seconds
        self._started: dict[str, bytes] = {}  # endpoint -> start time as its page writes it; b"": it does not tell
        self._read: dict[str, tuple[int, int]] = {}  # endpoint -> observations of both when its page was read
        registry.register(self)

    def page(self, endpoint: str, text: bytes, *, load: EndpointLoad) -> None:
        """Take an endpoint's page and its load; most pages are not read, and none of an idle pod."""
        now = load.reported_at
        if now < self._due.get(endpoint, now):
            return
        self._due[endpoint] = now + self._read_every_seconds
        observed = load.first_token_count, load.inter_token_count
        if self._read.get(endpoint) == observed:
            return
        self._read[endpoint] = observed
        self._note_start(endpoint, text)
        ttft, inter_token = parse_latencies(text)
        role = self.role_of(endpoint)
        self._ttft.report(endpoint, ttft, role=role)
        self._inter_token.report(endpoint, inter_token, role=role)

    def restarted(self, endpoint: str) -> None:
        """Take note that another process answers there."""
        self._due.pop(endpoint, None)
        self._read.pop(endpoint, None)
        self._ttft.restarted(endpoint)
        self._inter_token.restarted(endpoint)

    def forget(self, endpoint: str) -> None:
        """Take note that the endpoint is gone."""
        self._due.pop(endpoint, None)
        self._read.pop(endpoint, None)
        self._started.pop(endpoint, None)
        self._ttft.forget(endpoint)
        self._inter_token.forget(endpoint)

    def _note_start(self, endpoint: str, text: bytes) -> None:
        """See whether it is another process, which may have counted more by now than the one before it."""
        found = STARTED.search(text)
        started = found[1] if found is not None else b""
        before = self._started.get(endpoint, b"")
        self._started[endpoint] = started
        if started and before and started != before:
            self._ttft.restarted(endpoint)
            self._inter_token.restarted(endpoint)

    def describe(self) -> Iterator[Metric]:
        """Yield the names."""
        for name, (text, _) in self._families().items():
            yield Metric(name, text, "histogram")

    def collect(self) -> Iterator[Metric]:
        """Yield all series."""
        for name, (text, latencies) in self._families().items():
            metric = Metric(name, text, "histogram")
            for (model, role), merged in latencies.merged.items():
                add_series(
                    metric,
                    {"model": model, "role": role},
                    bounds=latencies.bounds,
                    counts=merged.counts,
                    seconds=merged.seconds,
                )
            yield metric

    def _families(self) -> Mapping[str, tuple[str, PodLatencies]]:
        return {
            "kvmesh_ttft_seconds": (
                "Time to the first token as the pods measure it, by their model name and role, since this picker saw "
                "them first.",
                self._ttft,
            ),
            "kvmesh_inter_token_seconds": (
                "Time from one token to the next as the pods measure it, by their model name and role, since this "
                "picker saw them first.",
                self._inter_token,
            ),
        }


def _both(_: str) -> str:
    return Role.BOTH.value
