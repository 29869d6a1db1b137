"""The endpoints in the metrics are those that the picker knows now, as they are now."""

import pytest
from msgspec import structs

from extproc.ledger.endpoint_telemetry import EndpointView, endpoint_metrics
from extproc.pods.endpoint import EndpointStatus, Reachability
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.pods.link_estimate import LinkEstimates
from kvmesh.metrics.registry import Registry
from kvmesh.pods.pod_report import EndpointLoad

LOAD = EndpointLoad(
    waiting_requests=2,
    fetching_requests=1,
    running_requests=3,
    kv_usage=0.25,
    prefix_hit_tokens=100,
    prefix_query_tokens=400,
    reported_at=8.0,
)


def status(address: str, reachability: Reachability, load: EndpointLoad | None = None) -> EndpointStatus:
    return EndpointStatus(address=address, reachability=reachability, load=load)


def shown(*statuses: EndpointStatus, problem: str | None = None) -> dict[str, float]:
    """Return what is not 0, or belongs to no endpoint."""
    registry = Registry()
    estimates = LatencyEstimates(tokens_per_second=1000.0)
    estimates.report("a", structs.replace(LOAD, reported_at=0.0), now=0.0)
    estimates.promised("a", seconds=1.5)
    estimates.report("a", structs.replace(LOAD, first_token_count=1, first_token_seconds_sum=1.0), now=8.0)
    view = EndpointView(
        known=lambda _: statuses,
        estimates=estimates,
        links=LinkEstimates(),
        role_of=lambda address: "prefill" if address == "a" else "both",
        index_problem=lambda: problem,
        clock=lambda: 10.0,
    )
    registry.read(lambda: endpoint_metrics(view))
    lines = [line for line in registry.text().decode().splitlines() if not line.startswith("#")]
    found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
    return {name: value for name, value in found.items() if value or "endpoint=" not in name}


def test_an_endpoint_that_reports_is_shown_with_its_report() -> None:
    found = shown(status("a", Reachability.READY, LOAD))
    pace = found.pop('kvmesh_endpoint_prefill_seconds_per_token{endpoint="a"}')
    assert 0.0 < pace < 1.0
    assert found == {
        'kvmesh_endpoint_info{endpoint="a",role="prefill"}': 1.0,
        'kvmesh_endpoint_state{endpoint="a",state="ready"}': 1.0,
        'kvmesh_endpoint_reporting{endpoint="a"}': 1.0,
        'kvmesh_endpoint_waiting_requests{endpoint="a"}': 2.0,
        'kvmesh_endpoint_fetching_requests{endpoint="a"}': 1.0,
        'kvmesh_endpoint_running_requests{endpoint="a"}': 3.0,
        'kvmesh_endpoint_kv_usage_ratio{endpoint="a"}': 0.25,
        'kvmesh_endpoint_report_age_seconds{endpoint="a"}': 2.0,
        'kvmesh_ttft_estimate_bias_seconds{endpoint="a"}': 0.5,
        "kvmesh_index_problem": 0.0,
    }


def test_one_without_a_fresh_report_has_a_state_and_no_load() -> None:
    found = shown(status("b", Reachability.UNREACHABLE), problem="no answer")
    assert found == {
        'kvmesh_endpoint_info{endpoint="b",role="both"}': 1.0,
        'kvmesh_endpoint_state{endpoint="b",state="unreachable"}': 1.0,
        'kvmesh_endpoint_prefill_seconds_per_token{endpoint="b"}': found[
            'kvmesh_endpoint_prefill_seconds_per_token{endpoint="b"}'
        ],
        "kvmesh_index_problem": 1.0,
    }


def test_what_one_more_stream_costs_is_shown_once_it_is_learned() -> None:
    estimates, tokens, seconds = LatencyEstimates(), 0.0, 0.0
    for at in range(30):
        running = 1 + at % 10
        tokens, seconds = tokens + running / (0.01 + 0.001 * running), seconds + running
        report = structs.replace(
            LOAD,
            reported_at=float(at),
            running_requests=running,
            inter_token_count=round(tokens),
            inter_token_seconds_sum=seconds,
            preemptions=7,
        )
        estimates.report("a", report, now=float(at))
    view = EndpointView(
        known=lambda _: [status("a", Reachability.READY, report)],
        estimates=estimates,
        links=LinkEstimates(),
        role_of=lambda _: "both",
        index_problem=lambda: None,
        clock=lambda: 30.0,
    )
    rows = {metric.name: dict(found) for metric, found in endpoint_metrics(view)}
    assert rows["kvmesh_endpoint_stream_seconds"][("a",)] == pytest.approx(0.001, rel=0.1)
    following = report.unfinished_requests + 1
    expected = rows["kvmesh_endpoint_next_stream_inter_token_seconds"][("a",)]
    assert expected == pytest.approx(0.01 + 0.001 * following, rel=0.1)
    assert rows["kvmesh_endpoint_preemptions_total"] == {("a",): 7}


def test_what_an_endpoint_has_fetched_is_shown_with_its_role_once_it_has_fetched_anything() -> None:
    fetched = structs.replace(LOAD, fetched_bytes=3e6, fetch_seconds_sum=1.5)
    found = shown(status("a", Reachability.READY, fetched), status("b", Reachability.READY, LOAD))
    assert {name: value for name, value in found.items() if "_kv_fetch" in name} == {
        'kvmesh_endpoint_kv_fetched_bytes_total{endpoint="a",role="prefill"}': 3e6,
        'kvmesh_endpoint_kv_fetch_seconds_total{endpoint="a",role="prefill"}': 1.5,
    }


def test_one_that_is_gone_is_not_shown() -> None:
    assert not [name for name in shown() if "endpoint=" in name]
