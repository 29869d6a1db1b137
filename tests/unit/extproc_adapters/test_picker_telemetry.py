"""The picker's own histogram says what prometheus_client's would say."""

import re

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from extproc.adapters.telemetry import PHASE_SECONDS, PHASES, PickerTelemetry

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
