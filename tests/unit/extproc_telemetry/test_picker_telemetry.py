"""What a picker counts adds up; endpoints that go leave no series; the page shows what is declared, and no more."""

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from extproc.admission.waiting_bodies import WaitingBodies
from extproc.ext_proc.uploads import Uploads
from extproc.pods.endpoint import EndpointStatus, Reachability
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.pods.link_estimate import LinkEstimates
from extproc.policy.priority import DEFAULT_CLASSES, PriorityClass
from extproc.quotas.shared_quotas import Quotas
from extproc.telemetry.endpoint_telemetry import EndpointView
from extproc.telemetry.first_pod_telemetry import FirstPodTelemetry, show_waiting_bodies
from extproc.telemetry.metrics import METRICS, UNROUTED
from extproc.telemetry.overload_telemetry import OverloadTelemetry
from extproc.telemetry.picker_telemetry import PickerTelemetry
from extproc.telemetry.process_telemetry import (
    show_external_metrics,
    show_lookups,
    show_pod_key,
    show_quotas,
    show_records,
    show_uploads,
)
from extproc.telemetry.scale_telemetry import show_scale
from kvmesh.index.redis_reader import PrefixIndexReader
from kvmesh.redis.link import RedisLink


class NotAsked:
    is_listening = False

    def __init__(self) -> None:
        self.answers: Counter[int] = Counter()


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


def routed(telemetry: PickerTelemetry, endpoint: str) -> None:
    telemetry.routed(endpoint=endpoint, prompt_tokens=1, matched_tokens=0, degraded=())


def page(telemetry: PickerTelemetry) -> str:
    return asyncio.run(telemetry.page()).decode()


@given(REQUESTS)
def test_what_is_counted_adds_up(requests: list[tuple[str, int, str, int, int]]) -> None:
    telemetry = PickerTelemetry()
    overload = OverloadTelemetry(telemetry.registry, classes=DEFAULT_CLASSES)
    wanted: Counter[str] = Counter()
    for endpoint, status, model, matched, best in requests:
        overload.admitted("standard")
        telemetry.routed(
            endpoint=endpoint, prompt_tokens=9, matched_tokens=matched, best_matched_tokens=best, degraded=("late",)
        )
        wanted["kvmesh_admitted_requests_total standard"] += 1
        wanted["kvmesh_decisions_total routed"] += 1
        wanted[f"kvmesh_picks_total {endpoint}"] += 1
        wanted[f"kvmesh_open_bookings {endpoint}"] += 1
        wanted["kvmesh_degraded_decisions_total late"] += 1
        wanted["kvmesh_prompt_tokens_total "] += 9
        wanted["kvmesh_predicted_cached_tokens_total "] += matched
        wanted["kvmesh_regret_tokens_total "] += max(best - matched, 0)
        if status:
            telemetry.exchange_ended(endpoint=endpoint, status=status, model=model, arm="arm")
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
        routed(telemetry, endpoint)
        telemetry.exchange_ended(endpoint=endpoint, status=200)
        telemetry.endpoint_failed(endpoint)
        telemetry.rerouted(picked=endpoint, served_by=endpoint)
        telemetry.finding(endpoint=endpoint, reason="never-matches", stands=True)
        overload.endpoint_full(endpoint)
    telemetry.forget("a")
    overload.forget("a")
    assert 'endpoint="a"' not in page(telemetry)
    assert page(telemetry).count('endpoint="b"') > 6
    routed(telemetry, "a")
    assert 'kvmesh_picks_total{endpoint="a"} 1.0' in page(telemetry)
    telemetry.forget("never seen")
    overload.forget("never seen")


def test_classes_that_a_policy_adds_are_counted_and_those_that_it_drops_are_promised_nothing() -> None:
    telemetry = PickerTelemetry()
    overload = OverloadTelemetry(telemetry.registry, classes=DEFAULT_CLASSES)
    overload.know({"gold": PriorityClass()})
    overload.admitted("gold")
    text = page(telemetry)
    assert 'kvmesh_admitted_requests_total{class="gold"} 1.0' in text
    assert 'kvmesh_admitted_requests_total{class="standard"} 0.0' in text
    assert [line for line in text.splitlines() if line.startswith("kvmesh_class_priority{")] == [
        'kvmesh_class_priority{class="gold"} 0.0'
    ]


def test_a_picker_shows_what_is_declared_and_no_more() -> None:
    telemetry = PickerTelemetry()
    overload = OverloadTelemetry(telemetry.registry, classes=DEFAULT_CLASSES)
    overload.show(queued=dict, steps_in_force=list, estimate_errors=list)
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
    show_external_metrics(telemetry.registry, NotAsked())
    telemetry.registry.values(UNROUTED)  # of `Pools`, in a registry of its own
    comments = [line.split()[2:] for line in page(telemetry).splitlines() if line.startswith("# TYPE kvmesh_")]
    assert sorted(comments) == sorted([metric.name, metric.kind] for metric in METRICS)
