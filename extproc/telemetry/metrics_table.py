"""The picker's metrics as a table for docs/metrics.md: read from what a picker would show.

`python -m extproc.telemetry.metrics_table` prints it; tests hold the page to this, and running pickers to the page.
"""

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry, Counter, generate_latest

from extproc.admission.admission_queue import Outcome
from extproc.admission.degradation import StepChange
from extproc.pods.endpoint import EndpointLoad, EndpointStatus, Reachability
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.policy.priority import DEFAULT_CLASSES, DegradationStep, StepKind
from extproc.policy.values import ObservabilityPolicy, PickPolicy
from extproc.responses.realised import Comparison
from extproc.telemetry.endpoint_telemetry import EndpointView
from extproc.telemetry.lookup_telemetry import LookupTelemetry
from extproc.telemetry.overload_telemetry import OverloadTelemetry
from extproc.telemetry.picker_telemetry import PHASES, PickerTelemetry
from extproc.telemetry.quota_telemetry import QuotaMetrics
from extproc.telemetry.record_telemetry import RecordTelemetry
from kv_indexer.telemetry.metrics_table import EACH, SUM, MetricRow, metric_rows, metrics_table

ENDPOINT = "10.0.0.1:8000"
# what the picker sees of others, and what its policy says; the rest counts what this process did
SHOWN_BY_EACH = (
    *("kvmesh_endpoint_", "kvmesh_ttft_", "kvmesh_inter_token_seconds", "kvmesh_class_", "kvmesh_gpu_hour_price"),
    *("kvmesh_alert_hit_ratio", "kvmesh_index_problem", "kvmesh_degradation_step", "kvmesh_extproc_", "kvmesh_ready"),
    *("kvmesh_build_info", "kvmesh_quota_writes_failing"),
)
COUNTED_BY_ONE = ("kvmesh_endpoint_failures", "kvmesh_endpoint_full_answers")
LOAD = EndpointLoad(
    waiting_requests=0,
    running_requests=0,
    kv_usage=0.0,
    prefix_hit_tokens=0,
    prefix_query_tokens=0,
    reported_at=0.0,
)
# of `pools`, which counts it where it serves several
UNROUTED = "kvmesh_unrouted_requests", "Requests that belong to no pool, by reason."
PAGE = b"""vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 1
vllm:time_to_first_token_seconds_sum{model_name="m"} 1
vllm:inter_token_latency_seconds_bucket{le="+Inf",model_name="m"} 1
vllm:inter_token_latency_seconds_sum{model_name="m"} 1
"""


class _Quotas:
    """A quota that has decided once."""

    decisions: ClassVar = {("allowed", "shared"): 1}
    decisions_by_tenant: ClassVar = {("acme", "allowed"): 1}

    @staticmethod
    def facts() -> Mapping[str, Any]:
        return {"writes_failing": False, "open_requests": 1}


@dataclass(slots=True, kw_only=True)
class _Records:
    """An access log that has written once, and traces that have been exported once."""

    target: str = "stdout"
    written: int = 1
    dropped: int = 0
    exported_spans: int = 1
    dropped_spans: int = 0


@dataclass(slots=True, kw_only=True)
class _Lookups:
    """An index of which some blocks were looked up."""

    known_blocks: int = 64
    asked_blocks: int = 1
    tracked_blocks: int = 64


async def picker_rows() -> dict[str, MetricRow]:
    """Return the picker's metrics, out of a picker to which everything has happened once."""
    telemetry = PickerTelemetry()
    telemetry.reconfigure(PickPolicy(observability=ObservabilityPolicy(gpu_hour_price=1.0)))
    _requests(telemetry)
    _overload(telemetry)
    telemetry.registry.register(QuotaMetrics(_Quotas()))
    telemetry.registry.register(RecordTelemetry(targets=(_Records(),), traces=_Records()))
    telemetry.registry.register(LookupTelemetry(_Lookups()))
    telemetry.latencies.page(ENDPOINT, PAGE, load=LOAD)
    telemetry.show(_view())
    pools = CollectorRegistry()
    Counter(*UNROUTED, ["reason"], registry=pools).labels("unknown-pool")
    return metric_rows((await telemetry.page(ready=True)).decode() + generate_latest(pools).decode())


def over_pickers(row: MetricRow) -> str:
    """Return what is to be done with the series of several replicas."""
    return EACH if row.name.startswith(SHOWN_BY_EACH) and not row.name.startswith(COUNTED_BY_ONE) else SUM


def _requests(telemetry: PickerTelemetry) -> None:
    for phase in PHASES:
        telemetry.phase(phase, 0.0)
    telemetry.promised("m", seconds=0.1)
    telemetry.routed(
        endpoint=ENDPOINT,
        prompt_tokens=2,
        matched_tokens=1,
        best_matched_tokens=2,
        degraded=("prefix-index-timeout",),
        model="m",
        arm="m",
        served="m",
        seconds_a_token=1.0,
    )
    telemetry.rerouted(picked=ENDPOINT, served_by=ENDPOINT)
    telemetry.refused("no-ready-endpoint")
    telemetry.exchange_ended(endpoint=ENDPOINT, status=200, model="m", arm="m", seconds=1.0)
    telemetry.endpoint_failed(ENDPOINT)
    comparison = Comparison(
        model="m",
        arm="m",
        endpoint=ENDPOINT,
        prompt_tokens=2,
        predicted_tokens=1,
        realised_tokens=1,
        error_tokens=0,
        regret_tokens=1,
        prompt_error_tokens=0,
    )
    telemetry.realised(comparison, seconds_a_token=1.0)
    telemetry.response_missed("no-usage")
    telemetry.finding(endpoint=ENDPOINT, reason="never-matches", stands=True)
    telemetry.model_finding(model="m", reason="cache-overpredicted", stands=True)


def _overload(telemetry: PickerTelemetry) -> None:
    overload = OverloadTelemetry(
        telemetry.registry, classes=DEFAULT_CLASSES, tenants=telemetry.tenants, queued=telemetry.queued
    )
    overload.admitted("standard")
    overload.shed("standard", reason="overloaded")
    overload.left_queue("standard", outcome=Outcome.DISPATCHED, seconds=1.0)
    overload.objective_ignored("unknown")
    overload.endpoint_full(ENDPOINT)
    step = DegradationStep(step=StepKind.REJECT, enter=1.0, leave=0.5)
    overload.step_changed(StepChange(class_name="standard", pool="", step=step, entered=False, pressure=0.0))
    overload.show(
        queued=lambda: {"standard": 1},
        steps_in_force=lambda: [(("standard", "reject"), 1.0)],
        estimate_errors=lambda: [((ENDPOINT,), 0.1)],
    )


def _view() -> EndpointView:
    estimates = LatencyEstimates()
    estimates.first_token(ENDPOINT, uncached_tokens=1, waited_tokens=0.0, seconds=1.0, now=0.0)
    status = EndpointStatus(address=ENDPOINT, reachability=Reachability.READY, load=LOAD)
    return EndpointView(
        known=lambda _: (status,), estimates=estimates, role_of=lambda _: "both", index_problem=lambda: None
    )


if __name__ == "__main__":
    sys.stdout.write(metrics_table(asyncio.run(picker_rows()).values(), over_replicas=over_pickers))
