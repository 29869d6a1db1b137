"""The picker's own histogram says what prometheus_client's would say."""

import re
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from extproc.policy.priority import DEFAULT_CLASSES
from extproc.telemetry.overload_telemetry import OverloadTelemetry
from extproc.telemetry.picker_telemetry import MOST_KEPT, PHASE_SECONDS, PHASES, PickerTelemetry

CREATED_AT = re.compile(rb"(_created\{[^}]*\}) .*")
DURATIONS = st.floats(0, 100) | st.sampled_from(PHASE_SECONDS)


def lines_of_phases(exposition: bytes) -> list[bytes]:
    lines = [line for line in exposition.splitlines() if b"kvmesh_pick_phase_seconds" in line]
    return [CREATED_AT.sub(rb"\1", line) for line in lines]


@given(st.lists(st.tuples(st.sampled_from(PHASES), DURATIONS), max_size=30))
def test_the_phases_read_as_those_of_the_library(observed: list[tuple[str, float]]) -> None:
    registry = CollectorRegistry()
    reference = Histogram(
        "kvmesh_pick_phase_seconds",
        "Time a pick spent in each phase; in the queue: of the requests that waited.",
        ["phase"],
        buckets=PHASE_SECONDS,
        registry=registry,
    )
    for name in PHASES:
        reference.labels(name)
    telemetry = PickerTelemetry()
    for phase, seconds in observed:
        reference.labels(phase).observe(seconds)
        telemetry.phase(phase, seconds)

    assert lines_of_phases(generate_latest(telemetry.registry)) == lines_of_phases(generate_latest(registry))


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(["a:1", "b:1"]),
        st.sampled_from([0, 200, 204, 503]),
        st.sampled_from(["", "m"]),
        st.integers(0, 9),
        st.integers(0, 9),
        st.booleans(),  # somebody looks at the page
    ),
    max_size=20,
)


@given(REQUESTS)
def test_what_is_kept_until_somebody_looks_adds_up(requests: list[tuple[str, int, str, int, int, bool]]) -> None:
    telemetry = PickerTelemetry()
    overload = OverloadTelemetry(telemetry.registry, classes=DEFAULT_CLASSES)
    wanted: Counter[str] = Counter()
    for endpoint, status, model, matched, best, looks in requests:
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
        if looks:
            generate_latest(telemetry.registry)
        if status:
            telemetry.exchange_ended(endpoint=endpoint, status=status, model=model, arm="arm")
            wanted[f"kvmesh_open_bookings {endpoint}"] -= 1
            wanted[f"kvmesh_pod_responses_total {endpoint} {status // 100}xx"] += 1
            if model:
                wanted[f"kvmesh_model_requests_total {model} arm {status // 100}xx"] += 1
    names = {name.partition(" ")[0] for name in wanted}
    counted = {
        " ".join((sample.name, *sample.labels.values())) if sample.labels else f"{sample.name} ": sample.value
        for family in telemetry.registry.collect()
        for sample in family.samples
        if sample.name in names
    }
    assert {name: count for name, count in counted.items() if count} == +wanted


def test_what_is_kept_is_counted_though_nobody_ever_looks() -> None:
    telemetry = PickerTelemetry()
    for status in range(1, MOST_KEPT + 2):
        telemetry.exchange_ended(endpoint="a:1", status=status)
    assert not telemetry._kept.ended
