"""What Prometheus scrapes from an indexer."""

from kv_indexer.telemetry.indexer_telemetry import PrometheusTelemetry
from kvmesh.blocks.source import SourceState, Stream

A, B = Stream(endpoint="10.0.0.1:8000"), Stream(endpoint="10.0.0.1:8000", dp_rank=1)
OF_A, OF_B = '{dp_rank="0",endpoint="10.0.0.1:8000"}', '{dp_rank="1",endpoint="10.0.0.1:8000"}'


def series(telemetry: PrometheusTelemetry, name: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in telemetry.render().decode().splitlines() if line.startswith(f"{name}{{")]
    return {labels.removeprefix(name): float(value) for labels, _, value in lines}


def test_each_streams_batches_and_each_types_events_are_counted_apart() -> None:
    telemetry = PrometheusTelemetry()
    telemetry.applied(A, batches=2, events={"BlockStored": 3}, last_ts=0.0)
    telemetry.applied(B, batches=1, events={"BlockStored": 1, "BlockRemoved": 1}, last_ts=0.0)
    telemetry.applied(A, batches=5, events={}, last_ts=0.0)

    assert series(telemetry, "kvmesh_indexer_batches_total") == {
        OF_A: 7.0,
        OF_B: 1.0,
    }
    assert series(telemetry, "kvmesh_indexer_events_total") == {
        '{type="BlockStored"}': 4.0,
        '{type="BlockRemoved"}': 1.0,
    }


def test_a_stream_that_was_given_away_and_comes_back_shows_its_lag_again() -> None:
    telemetry = PrometheusTelemetry()
    for batches in (1, 2):
        telemetry.state(A, state=SourceState.LIVE, reason="")
        telemetry.applied(A, batches=batches, events={}, last_ts=float("inf"))
        assert series(telemetry, "kvmesh_indexer_lag_seconds") == {OF_A: 0.0}

        telemetry.forget(A)
        assert series(telemetry, "kvmesh_indexer_lag_seconds") == {}
    assert series(telemetry, "kvmesh_indexer_batches_total") == {OF_A: 3.0}
