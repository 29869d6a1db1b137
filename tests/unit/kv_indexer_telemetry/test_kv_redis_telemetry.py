"""What Redis says of itself is read from INFO as each server writes it, and shown only while it is known."""

import pytest

from kv_indexer.telemetry import metrics
from kv_indexer.telemetry.indexer_telemetry import PrometheusTelemetry
from kv_indexer.telemetry.redis_telemetry import redis_facts
from kvmesh.blocks.source import SourceState, Stream

INFO = (
    "# Server\r\nredis_version:7.2.4\r\n\r\n# Clients\r\nconnected_clients:12\r\n\r\n# Memory\r\n"
    "used_memory:1048576\r\n"
    "used_memory_human:1.00M\r\nmaxmemory:0\r\n\r\n"
    "# Stats\r\nevicted_keys:3\r\ntracking_total_keys:640\r\n\r\n# Replication\r\n"
    "role:master\r\n"
    "slave0:ip=10.0.0.1,port=6379,state=online\r\n\r\n"
    "# Keyspace\r\ndb0:keys=70,expires=2,avg_ttl=0\r\ndb3:keys=7,expires=0,avg_ttl=0,subexpiry=0\r\n"
)
FACTS = {
    metrics.REDIS_MEMORY: 1048576.0,
    metrics.REDIS_MEMORY_LIMIT: 0.0,
    metrics.REDIS_KEYS: 77.0,
    metrics.REDIS_EVICTED: 3.0,
    metrics.REDIS_TRACKED_KEYS: 640.0,
}
STREAM = Stream(endpoint="10.0.0.1:8000")


def samples(telemetry: PrometheusTelemetry, start: str) -> dict[str, float]:
    lines = telemetry.render().decode().splitlines()
    found = [line.rpartition(" ") for line in lines if line.startswith(start) and "_created" not in line]
    return {name: float(value) for name, _, value in found}


def test_info_is_read() -> None:
    assert redis_facts(INFO) == FACTS


@pytest.mark.parametrize("answer", ["", "nonsense", "used_memory:lots\r\nconnected_clients:\r\n"])
def test_what_is_not_told_is_not_known(answer: str) -> None:
    assert redis_facts(answer) == {}


def test_an_empty_redis_has_no_keys_and_not_no_number_of_keys() -> None:
    assert redis_facts("# Keyspace\r\n") == {metrics.REDIS_KEYS: 0.0}


def test_facts_are_shown_while_they_are_known() -> None:
    telemetry = PrometheusTelemetry()
    telemetry.redis_facts(FACTS, 0.002)
    shown = samples(telemetry, "kvmesh_indexer_redis_")
    assert shown["kvmesh_indexer_redis_memory_bytes"] == 1048576.0
    assert shown["kvmesh_indexer_redis_evicted_keys_total"] == 3.0
    assert shown["kvmesh_indexer_redis_round_trip_seconds_count"] == 1.0

    telemetry.redis_facts(None, 2.0)
    shown = samples(telemetry, "kvmesh_indexer_redis_")
    assert "kvmesh_indexer_redis_memory_bytes" not in shown
    assert shown["kvmesh_indexer_redis_round_trip_seconds_count"] == 1.0


def test_the_lag_of_all_streams_is_a_histogram_and_orphans_go_with_their_stream() -> None:
    telemetry = PrometheusTelemetry()
    telemetry.state(STREAM, state=SourceState.LIVE, reason="")
    telemetry.applied(STREAM, batches=1, events={}, last_ts=0.0)  # decades ago
    telemetry.applied(STREAM, batches=1, events={}, last_ts=float("inf"))
    telemetry.orphans(STREAM, waiting=4)
    lags = samples(telemetry, "kvmesh_indexer_event_lag_seconds_bucket")
    assert (
        lags['kvmesh_indexer_event_lag_seconds_bucket{le="0.001"}'],
        lags['kvmesh_indexer_event_lag_seconds_bucket{le="+Inf"}'],
    ) == (1.0, 2.0)
    assert list(samples(telemetry, "kvmesh_indexer_orphan_events").values()) == [4.0]
    telemetry.forget(STREAM)
    assert samples(telemetry, "kvmesh_indexer_orphan_events") == {}


def test_an_indexer_says_which_process_it_is_and_whether_it_is_ready() -> None:
    telemetry = PrometheusTelemetry()
    telemetry.ready(True)
    text = telemetry.render().decode()
    assert "\nkvmesh_indexer_ready 1.0\n" in text
    assert 'process="indexer"' in text
    assert "\nprocess_cpu_seconds_total " in text
