"""The endpoints as the picker sees them, for the metrics: state, last report, learned pace. Reads when somebody asks.

Costs a pick nothing. Endpoints that are gone are not shown. Every replica shows all endpoints: not to be added up.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.pods.endpoint import EndpointLoad, EndpointStatus, Reachability
from extproc.pods.latency_estimate import LatencyEstimates

Family = GaugeMetricFamily | CounterMetricFamily
NAME = "kvmesh_endpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointView:
    """Where the facts come from."""

    known: Callable[[float], Sequence[EndpointStatus]]  # at a time, monotonic seconds
    estimates: LatencyEstimates
    role_of: Callable[[str], str]
    index_problem: Callable[[], str | None]


class EndpointTelemetry(Collector):
    """Shows them."""

    def __init__(
        self, view: EndpointView, *, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._view, self._clock = view, clock
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """Yield the names."""
        yield from _families().values()

    def collect(self) -> Iterator[Metric]:
        """Yield all series, one family after the other: the loop may turn in between where there are many endpoints."""
        families, view, now = _families(), self._view, self._clock()
        statuses = view.known(now)
        for status in statuses:
            families["info"].add_metric((status.address, view.role_of(status.address)), 1)
            families["reporting"].add_metric((status.address,), status.load is not None)
        yield from (families["info"], families["reporting"])
        for status in statuses:
            for state in Reachability:
                families["state"].add_metric((status.address, state.value), status.reachability is state)
        yield families["state"]
        errors = view.estimates.errors()
        for status in statuses:
            pace = view.estimates.pace(status.address)
            families["pace"].add_metric((status.address,), pace.prefill.seconds_a_token)
            if (error := errors.get(status.address)) is not None:
                families["bias"].add_metric((status.address,), error.bias_seconds)
        yield from (families["pace"], families["bias"])
        for name, read in _REPORTED.items():
            for status in statuses:
                if (load := status.load) is not None:
                    families[name].add_metric((status.address,), read(load, now))
            yield families[name]
        families["index"].add_metric((), view.index_problem() is not None)
        yield families["index"]


_REPORTED: Mapping[str, Callable[[EndpointLoad, float], float]] = {
    "waiting": lambda load, _: load.waiting_requests,
    "running": lambda load, _: load.running_requests,
    "kv_usage": lambda load, _: load.kv_usage,
    "age": lambda load, now: max(now - load.reported_at, 0.0),
    "hits": lambda load, _: load.prefix_hit_tokens,
    "queries": lambda load, _: load.prefix_query_tokens,
}


def _families() -> Mapping[str, Family]:
    def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, labels=labels or ("endpoint",))

    def counter(name: str, text: str) -> CounterMetricFamily:
        return CounterMetricFamily(name, text, labels=("endpoint",))

    return {
        "info": gauge(f"{NAME}_info", "1 for each endpoint, with its role.", "endpoint", "role"),
        "state": gauge(f"{NAME}_state", "1 for the state that an endpoint is in.", "endpoint", "state"),
        "reporting": gauge(f"{NAME}_reporting", "1 while an endpoint's last report is fresh enough to be believed."),
        "waiting": gauge(f"{NAME}_waiting_requests", "Requests that wait at the endpoint, as it reports."),
        "running": gauge(f"{NAME}_running_requests", "Requests that run at the endpoint, as it reports."),
        "kv_usage": gauge(
            f"{NAME}_kv_usage_ratio", "Share of an endpoint's cache blocks in use (0 to 1), as it reports."
        ),
        "age": gauge(f"{NAME}_report_age_seconds", "Age of an endpoint's last report."),
        "hits": counter(
            f"{NAME}_prefix_hit_tokens", "Prompt tokens that an endpoint found in its cache since it started."
        ),
        "queries": counter(
            f"{NAME}_prefix_query_tokens", "Prompt tokens that an endpoint looked for in its cache since it started."
        ),
        "pace": gauge(
            f"{NAME}_prefill_seconds_per_token",
            "What a prompt token costs at an endpoint, as learned from its reports.",
        ),
        "bias": gauge(
            "kvmesh_ttft_estimate_bias_seconds", "Mean of expected less real TTFT, lately; above 0: too pessimistic."
        ),
        "index": GaugeMetricFamily(
            "kvmesh_index_problem", "1 while the last lookup could not rely on the prefix index.", labels=()
        ),
    }
