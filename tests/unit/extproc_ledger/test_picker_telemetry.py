"""What a picker counts adds up; endpoints that go leave no series; the page shows what is declared, and no more."""

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from extproc.admission.waiting_bodies import WaitingBodies
from extproc.ext_proc.exchange import Uploads
from extproc.ledger.endpoint_telemetry import EndpointView, show_scale
from extproc.ledger.facts import Arrival, Ended, EndpointFailed, EndpointFull, EndpointRemoved, Rerouted
from extproc.ledger.feature_telemetry import FirstPodTelemetry, OverloadTelemetry, show_waiting_bodies
from extproc.ledger.metrics import METRICS, UNROUTED
from extproc.ledger.picker_telemetry import PickerTelemetry
from extproc.ledger.process_telemetry import (
    show_lookups,
    show_pod_key,
    show_quotas,
    show_records,
    show_uploads,
)
from extproc.pods.endpoint import EndpointStatus, Reachability
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.pods.link_estimate import LinkEstimates
from extproc.policy.priority import DEFAULT_CLASSES, PriorityClass
from extproc.shared.shared_quotas import Quotas
from kvmesh.index.redis_reader import PrefixIndexReader
from kvmesh.redis.link import RedisLink
from tests.unit.extproc_ledger.told_facts import routed

REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(["a:1", "b:1"]),
        st.sampled_from([0, 200, 204, 503]),
        st.sampled_from(["", "m"]),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    max_size=20,
)


def page(telemetry: PickerTelemetry) -> str:
    return asyncio.run(telemetry.page()).decode()


@given(REQUESTS)
def test_what_is_counted_adds_up(requests: list[tuple[str, int, str, int, int]]) -> None:
    telemetry = PickerTelemetry()
    overload = OverloadTelemetry(telemetry.registry, classes=DEFAULT_CLASSES)
    wanted: Counter[str] = Counter()
    for endpoint, status, model, matched, best in requests:
        fact = routed(endpoint, matched=matched, best=best, degraded={"late": "too late"})
        telemetry.decided(fact)
        overload.decided(fact)
        wanted["kvmesh_admitted_requests_total standard"] += 1
        wanted["kvmesh_decisions_total routed"] += 1
        wanted[f"kvmesh_picks_total {endpoint}"] += 1
        wanted[f"kvmesh_open_bookings {endpoint}"] += 1
        wanted["kvmesh_degraded_decisions_total late"] += 1
        wanted["kvmesh_prompt_tokens_total "] += 9
        wanted["kvmesh_predicted_cached_tokens_total "] += matched
        wanted["kvmesh_regret_tokens_total "] += max(best - matched, 0)
        if status:
            ended = Ended(arrival=Arrival(), endpoint=endpoint, booked_on=endpoint, status=status)
            telemetry.ended(structs.replace(ended, label=model, arm="arm"))
            wanted[f"kvmesh_open_bookings {endpoint}"] -= 1
            wanted[f"kvmesh_pod_responses_total {endpoint} {status // 100}xx"] += 1
            if model:
                wanted[f"kvmesh_model_requests_total arm {model} {status // 100}xx"] += 1
    names = {name.partition(" ")[0] for name in wanted}
    counted = {
        " ".join((sample.name, *sample.labels.values())) if sample.labels else f"{sample.name} ": sample.value
        for family in text_string_to_metric_families(telemetry.registry.text().decode())
        for sample in family.samples
        if sample.name in names
    }
    assert {name: count for name, count in counted.items() if count} == +wanted


def test_an_endpoint_that_is_gone_leaves_no_series_and_may_come_back() -> None:
    telemetry = PickerTelemetry()
    overload = OverloadTelemetry(telemetry.registry, classes=DEFAULT_CLASSES)
    for endpoint in ("a", "b"):
        telemetry.decided(routed(endpoint))
        telemetry.ended(Ended(arrival=Arrival(), endpoint=endpoint, booked_on=endpoint, status=200))
        telemetry.endpoint_failed(EndpointFailed(endpoint))
        telemetry.rerouted(Rerouted(picked=endpoint, served_by=endpoint))
        overload.endpoint_full(EndpointFull(endpoint))
    telemetry.removed(EndpointRemoved("a"))
    assert 'endpoint="a"' not in page(telemetry)
    assert page(telemetry).count('endpoint="b"') > 5
    telemetry.decided(routed("a"))
    assert 'kvmesh_picks_total{endpoint="a"} 1.0' in page(telemetry)
    telemetry.removed(EndpointRemoved("never seen"))


def test_classes_that_a_policy_adds_are_counted_and_those_that_it_drops_are_promised_nothing() -> None:
    telemetry = PickerTelemetry()
    overload = OverloadTelemetry(telemetry.registry, classes=DEFAULT_CLASSES)
    overload.know({"gold": PriorityClass()})
    overload.admitted("gold")
    text = page(telemetry)
    assert 'kvmesh_admitted_requests_total{class="gold"} 1.0' in text
    assert 'kvmesh_admitted_requests_total{class="standard"} 0.0' in text
    assert [line for line in text.splitlines() if line.startswith("kvmesh_class_ttft_target_seconds{")] == [
        'kvmesh_class_ttft_target_seconds{class="gold"} 5.0'
    ]


def test_a_picker_shows_what_is_declared_and_no_more() -> None:
    telemetry = PickerTelemetry()
    overload = OverloadTelemetry(telemetry.registry, classes=DEFAULT_CLASSES)
    overload.show(queued=dict, steps_in_force=list, estimate_errors=list, answer_length_errors=list)
    telemetry.show_token_sources(dict)
    telemetry.show_token_states(dict)
    telemetry.show(
        EndpointView(
            known=lambda _: (EndpointStatus(address="a", reachability=Reachability.READY, load=None),),
            estimates=LatencyEstimates(),
            links=LinkEstimates(),
            role_of=lambda _: "both",
            index_problem=lambda: None,
        )
    )
    show_scale(telemetry.registry, dict)
    show_quotas(
        telemetry.registry, Quotas(RedisLink("redis://127.0.0.1:1"), hash_seed="s", quotas=(), others=lambda: 0)
    )
    show_records(telemetry.registry, targets=(), traces=None)
    show_lookups(telemetry.registry, PrefixIndexReader(url="redis://127.0.0.1:1", hash_seed="s"))
    show_uploads(telemetry.registry, Uploads(most_bytes=1))
    show_waiting_bodies(telemetry.registry, WaitingBodies(most_bytes=1))
    FirstPodTelemetry(telemetry.registry).show(dict)
    show_pod_key(telemetry.registry, None)
    telemetry.registry.values(UNROUTED)  # of `Pools`, in a registry of its own
    comments = [line.split()[2:] for line in page(telemetry).splitlines() if line.startswith("# TYPE kvmesh_")]
    assert sorted(comments) == sorted([metric.name, metric.kind] for metric in METRICS)
