"""Metrics under the inference extension's names: they are its own, and each is what we have counted."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.pods.endpoint import EndpointStatus, Reachability
from extproc.telemetry.extension_metrics import EXTENSION_METRICS, ExtensionTelemetry, ModelNames, error_code
from extproc.telemetry.picker_telemetry import PickerTelemetry
from kvmesh.metrics.metric import Metric
from kvmesh.metrics.registry import Registry
from kvmesh.pods.pod_report import EndpointLoad

DATA = Path(__file__).parents[2] / "data" / "inference_extension_metrics.json"
THEIRS: dict[str, dict[str, Any]] = {each["name"]: each for each in json.loads(DATA.read_text("utf-8"))["metrics"]}
LABELS = ("model_name", "target_model_name", "priority", "error_code", "name", "model_server_pod")
CHAT = ModelNames(requested="chat", target="llama")


def samples(registry: Registry) -> dict[tuple[str, ...], float]:
    """Return all series: name and the labels' values -> value; of histograms the sums and counts."""
    return {
        (sample.name, *(sample.labels[label] for label in LABELS if label in sample.labels)): sample.value
        for family in text_string_to_metric_families(registry.text().decode())
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def load(**changes: Any) -> EndpointLoad:
    usual: dict[str, Any] = {"kv_usage": 0.5, "waiting_requests": 4, "running_requests": 2, "reported_at": 0.0}
    return EndpointLoad(**{**usual, "prefix_hit_tokens": 0, "prefix_query_tokens": 0, **changes})


@pytest.mark.parametrize("metric", EXTENSION_METRICS, ids=[metric.name for metric in EXTENSION_METRICS])
def test_name_type_labels_and_buckets_are_theirs(metric: Metric) -> None:
    theirs = THEIRS[metric.name]
    assert (metric.kind.value, list(metric.labels)) == (theirs["type"], theirs["labels"])
    assert list(metric.bounds) == theirs.get("buckets", [])


def test_a_request_is_counted_from_its_pick_to_its_end() -> None:
    registry = Registry()
    counts = ExtensionTelemetry(registry)
    first = counts.routed(CHAT, priority=10, arrived_at=100.0, body_bytes=300, input_tokens=70)
    counts.predicted(CHAT, seconds=0.25)
    second = counts.routed(CHAT, priority=0, arrived_at=101.0, body_bytes=None, input_tokens=None)
    seen = samples(registry)
    assert seen["inference_objective_running_requests", "chat"] == 2.0
    assert seen["inference_objective_request_total", "chat", "llama", "10"] == 1.0
    assert seen["inference_objective_request_sizes_sum", "chat", "llama"] == 300.0
    assert seen["inference_objective_input_tokens_count", "chat", "llama"] == 1.0
    assert seen["inference_objective_request_predicted_ttft_seconds_sum", "chat", "llama"] == 0.25
    first.ended(status=200, now=103.5)
    second.ended(status=0, now=104.0)  # its client has left
    seen = samples(registry)
    assert seen["inference_objective_running_requests", "chat"] == 0.0
    assert seen["inference_objective_request_duration_seconds_sum", "chat", "llama"] == 3.5
    assert seen["inference_objective_request_duration_seconds_count", "chat", "llama"] == 1.0
    assert not [key for key in seen if key[0] == "inference_objective_request_error_total"]


def test_errors_have_their_words() -> None:
    registry = Registry()
    counts = ExtensionTelemetry(registry)
    counts.routed(CHAT, priority=0, arrived_at=0.0, body_bytes=1, input_tokens=1).ended(status=500, now=1.0)
    counts.refused(CHAT, status=429)
    counts.refused(ModelNames(requested="", target=""), status=413)
    seen = samples(registry)
    name = "inference_objective_request_error_total"
    assert {key[1:]: value for key, value in seen.items() if key[0] == name} == {
        ("chat", "llama", "ModelServerError"): 1.0,
        ("chat", "llama", "ResourceExhausted"): 1.0,
        ("", "", "BadRequest"): 1.0,
    }
    words = [error_code(status) for status in (400, 401, 403, 404, 422, 429, 500, 501, 503)]
    assert words == [
        *("BadRequest", "Unauthorized", "Forbidden", "NotFound", "BadRequest", "ResourceExhausted", "Internal"),
        *("Unknown", "ServiceUnavailable"),
    ]


def test_models_beyond_the_bound_share_a_series() -> None:
    registry = Registry()
    counts = ExtensionTelemetry(registry, most_models=2)
    for number in range(5):
        names = ModelNames(requested=f"m{number}", target=f"m{number}")
        counts.routed(names, priority=0, arrived_at=0.0, body_bytes=1, input_tokens=1)
    seen = samples(registry)
    assert {key[1]: value for key, value in seen.items() if key[0] == "inference_objective_request_total"} == {
        "m0": 1.0,
        "m1": 1.0,
        "other": 3.0,
    }
    assert seen["inference_objective_running_requests", "other"] == 3.0


def test_the_pools_figures_are_means_over_ready_pods_that_report() -> None:
    registry = Registry()
    statuses = [
        EndpointStatus(address="a:1", reachability=Reachability.READY, load=load(kv_usage=0.2, waiting_requests=1)),
        EndpointStatus(address="b:1", reachability=Reachability.READY, load=load(kv_usage=0.4, waiting_requests=2)),
        EndpointStatus(address="c:1", reachability=Reachability.TERMINATING, load=load(waiting_requests=9)),
        EndpointStatus(address="d:1", reachability=Reachability.READY, load=None),
    ]
    counts = ExtensionTelemetry(registry)
    counts.show("llama", known=lambda: statuses, pods=lambda: {"a:1": "vllm-1-rank-0", "b:1": "vllm-2-rank-0"})
    assert {key: value for key, value in samples(registry).items() if key[0].startswith("inference_pool_")} == {
        ("inference_pool_ready_pods", "llama"): 2.0,
        ("inference_pool_average_kv_cache_utilization", "llama"): pytest.approx(0.3),
        ("inference_pool_average_queue_size", "llama"): 1.5,
        ("inference_pool_average_running_requests", "llama"): 2.0,
        ("inference_pool_per_pod_queue_size", "llama", "vllm-1-rank-0"): 1.0,
        ("inference_pool_per_pod_queue_size", "llama", "vllm-2-rank-0"): 2.0,
        ("inference_pool_per_pod_queue_size", "llama", "c:1"): 9.0,
    }
    statuses.clear()
    assert {key: value for key, value in samples(registry).items() if key[0].startswith("inference_pool_")} == {
        ("inference_pool_ready_pods", "llama"): 0.0
    }


@pytest.mark.parametrize("wanted", [True, False])
def test_nothing_is_shown_under_these_names_unless_it_is_asked_for(wanted: bool) -> None:
    telemetry = PickerTelemetry(as_extension=wanted)
    if telemetry.extension is not None:
        telemetry.extension.show("llama", known=tuple, pods=dict)
        telemetry.extension.scheduling.show("llama", waiting=tuple, pods=dict, tenant_label=str, models=tuple)
    page = asyncio.run(telemetry.page()).decode()
    shown = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE inference_")}
    assert shown == ({metric.name for metric in EXTENSION_METRICS} if wanted else set())
