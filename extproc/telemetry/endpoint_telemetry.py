"""The endpoints as the picker sees them: state, last report, learned pace. Read when the page is made.

Endpoints that are gone are not shown. Every replica shows all endpoints: their series are not to be added up.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from extproc.pods.endpoint import EndpointStatus, Reachability
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.telemetry import metrics
from kvmesh.metrics.metric import Metric
from kvmesh.metrics.registry import Rows
from kvmesh.pods.pod_report import EndpointLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointView:
    """Where the facts come from."""

    known: Callable[[float], Sequence[EndpointStatus]]  # at a time, monotonic seconds
    estimates: LatencyEstimates
    role_of: Callable[[str], str]
    index_problem: Callable[[], str | None]
    clock: Callable[[], float] = time.monotonic


_REPORTED: Mapping[Metric, Callable[[EndpointLoad, float], float]] = {
    metrics.ENDPOINT_WAITING: lambda load, _: load.waiting_requests,
    metrics.ENDPOINT_RUNNING: lambda load, _: load.running_requests,
    metrics.ENDPOINT_KV_USAGE: lambda load, _: load.kv_usage,
    metrics.ENDPOINT_REPORT_AGE: lambda load, now: max(now - load.reported_at, 0.0),
    metrics.ENDPOINT_HIT_TOKENS: lambda load, _: load.prefix_hit_tokens,
    metrics.ENDPOINT_QUERY_TOKENS: lambda load, _: load.prefix_query_tokens,
}


def endpoint_metrics(view: EndpointView) -> Iterator[tuple[Metric, Rows]]:
    """Yield one metric after the other, so that the loop may turn in between where there are many endpoints."""
    now = view.clock()
    statuses, errors, pace = view.known(now), view.estimates.errors(), view.estimates.pace
    addresses = [(status.address,) for status in statuses]
    yield metrics.ENDPOINT_INFO, (((address, view.role_of(address)), 1) for (address,) in addresses)
    yield metrics.ENDPOINT_REPORTING, (((status.address,), status.load is not None) for status in statuses)
    yield (
        metrics.ENDPOINT_STATE,
        (
            ((status.address, state.value), status.reachability is state)
            for status in statuses
            for state in Reachability
        ),
    )
    yield metrics.ENDPOINT_PACE, ((key, pace(key[0]).prefill.seconds_a_token) for key in addresses)
    yield metrics.ESTIMATE_BIAS, ((key, errors[key[0]].bias_seconds) for key in addresses if key[0] in errors)
    for metric, read in _REPORTED.items():
        loads = ((status.address, status.load) for status in statuses if status.load is not None)
        yield metric, (((address,), read(load, now)) for address, load in loads)
    yield metrics.INDEX_PROBLEM, [((), view.index_problem() is not None)]
