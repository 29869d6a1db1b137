"""What one pod does within the promise stays known while all reports are alike."""

import pytest

from extproc.scaling.capacity import Capacities, Declared
from extproc.scaling.seen import PodSeen
from kvmesh.pods.pod_report import EndpointLoad

PROMISE = 0.05  # seconds a token, of which 0.045 are to be the mean
ALONE, EACH = 0.01, 0.0005  # of a token where one stream runs, and what each further one adds


def seen(running: int) -> PodSeen:
    load = EndpointLoad(
        waiting_requests=0,
        running_requests=running,
        kv_usage=running / 100.0,  # 90 streams fit
        prefix_hit_tokens=0,
        prefix_query_tokens=0,
        reported_at=0.0,
    )
    return PodSeen(address="a:1", role="both", serves=True, load=load, tokens_per_second=1000.0, request_seconds=0.1)


def look(capacities: Capacities, running: int) -> None:
    capacities.steps_of("").add(running=running, tokens=50.0 * running, seconds_a_token=ALONE + EACH * running)
    capacities.note([seen(running)])
    capacities.fade(2.0)


def test_a_steady_load_does_not_unlearn_the_streams_within_the_promise() -> None:
    capacities = Capacities()
    for running in (10, 20, 30, 40, 50, 60):
        look(capacities, running)
    learned = capacities.of("", declared=Declared(), promise=PROMISE)
    assert learned.limit == "promise"
    assert learned.streams == pytest.approx(70.0)
    for _ in range(3000):  # 100 minutes, in which what differed fades
        look(capacities, 60)
    steady = capacities.of("", declared=Declared(), promise=PROMISE)
    assert steady.limit == "promise"
    assert steady.streams == pytest.approx(70.0, rel=0.02)
    assert steady.decode == pytest.approx(learned.decode, rel=0.02)


def test_before_reports_have_differed_the_cache_bounds_the_streams() -> None:
    capacities = Capacities()
    for _ in range(20):
        look(capacities, 60)
    found = capacities.of("", declared=Declared(), promise=PROMISE)
    assert (found.limit, found.stream_seconds) == ("cache", None)
    assert found.streams == pytest.approx(90.0)
