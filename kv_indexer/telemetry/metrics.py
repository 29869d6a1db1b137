"""The indexer's metrics: names, types, labels and meanings. `python -m kv_indexer.telemetry.metrics` prints the table.

A test compares the table in docs/reference/metrics.md with this module.
"""

import sys

from kvmesh.metrics.metric import BUILD, Metric, Over, counter, gauge, histogram, metrics_table

LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
ROUND_TRIP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5)

# streams
EVENTS = counter("kvmesh_indexer_events_total", "Events read, by type.", "type")
DECODE_ERRORS = counter(
    "kvmesh_indexer_decode_errors_total",
    "Undecodable events, batches and messages, by reason.",
    "reason",
)
NOT_INDEXED = counter(
    "kvmesh_indexer_events_not_indexed_total",
    "Decoded events that are not in the index, by reason.",
    "reason",
)
BATCHES = counter("kvmesh_indexer_batches_total", "Event batches applied.", "endpoint", "dp_rank")
GAPS = counter("kvmesh_indexer_gaps_total", "Gaps in live sequences.", "endpoint", "dp_rank")
REPLAYED = counter("kvmesh_indexer_replayed_batches_total", "Replayed batches.", "endpoint", "dp_rank")
STATE = gauge(
    "kvmesh_indexer_source_state",
    "1 for the state of a stream.",
    "endpoint",
    "dp_rank",
    "state",
    over=Over.ONE,
)
BLOCKS = gauge("kvmesh_indexer_blocks", "Blocks indexed.", "endpoint", "dp_rank", "tier", over=Over.EACH)
LAG = gauge(
    "kvmesh_indexer_lag_seconds",
    "Age of the newest batch at its application.",
    "endpoint",
    "dp_rank",
    over=Over.ONE,
)
EVENT_LAG = histogram(
    "kvmesh_indexer_event_lag_seconds",
    "Age of each batch's newest event at its application, over all streams.",
    bounds=LAG_SECONDS,
)
ORPHANS = gauge(
    "kvmesh_indexer_orphan_events",
    "Store events without their parent block.",
    "endpoint",
    "dp_rank",
    over=Over.ONE,
)

# this indexer
READY = gauge("kvmesh_indexer_ready", "1 while the indexer is ready.", over=Over.EACH)
STREAMS_HELD = gauge("kvmesh_indexer_streams_held", "Streams of this indexer.")
POD_KEY_UNUSABLE = gauge(
    "kvmesh_indexer_pod_key_unusable",
    "1 while the file of --pod-key-file is unusable; the last good key is in use.",
    over=Over.EACH,
)
FINDING = gauge(
    "kvmesh_indexer_finding",
    "1 while a finding about a pod lasts (docs/reference/findings.md).",
    "reason",
    "endpoint",
    over=Over.ONE,
)
FINDINGS = counter("kvmesh_indexer_findings_total", "New findings.", "reason")

# Redis
REDIS_UP = gauge("kvmesh_indexer_redis_up", "1 while Redis is readable and writable.", over=Over.EACH)
REDIS_EVICTION = gauge(
    "kvmesh_indexer_redis_eviction_policy",
    "1 for Redis' maxmemory-policy; must be noeviction.",
    "policy",
    over=Over.EACH,
)
UNREADABLE = gauge("kvmesh_indexer_unreadable_records", "Unreadable streams and slots in Redis.", over=Over.EACH)
REDIS_ROUND_TRIP = histogram(
    "kvmesh_indexer_redis_round_trip_seconds",
    "Round trip of INFO, from the indexer.",
    bounds=ROUND_TRIP_SECONDS,
)
REDIS_MEMORY = gauge(
    "kvmesh_indexer_redis_memory_bytes",
    "Memory used by Redis (used_memory).",
    over=Over.EACH,
)
REDIS_MEMORY_LIMIT = gauge(
    "kvmesh_indexer_redis_memory_limit_bytes",
    "Memory limit of Redis (maxmemory); 0: none.",
    over=Over.EACH,
)
REDIS_KEYS = gauge("kvmesh_indexer_redis_keys", "Keys in all databases of Redis.", over=Over.EACH)
REDIS_EVICTED = counter(
    "kvmesh_indexer_redis_evicted_keys_total",
    "Keys evicted by Redis; any eviction makes the index wrong.",
    over=Over.EACH,
)
REDIS_TRACKED_KEYS = gauge(
    "kvmesh_indexer_redis_tracked_keys",
    "Keys tracked by Redis for pickers, some 140 bytes each.",
    over=Over.EACH,
)

# pools
POOL_ENDPOINT_INFO = gauge(
    "kvmesh_indexer_pool_endpoint_info",
    "1 for an endpoint's pool in the index.",
    "pool",
    "endpoint",
    over=Over.EACH,
)
POOL_CONFLICTS = gauge(
    "kvmesh_indexer_pool_conflicts",
    "Endpoints in several pools; indexed only for the first.",
    over=Over.EACH,
)
POOL_PROBLEMS = gauge("kvmesh_indexer_pool_problems", "Unusable documents.", "reason", over=Over.EACH)

METRICS = (BUILD, *(each for each in tuple(vars().values()) if isinstance(each, Metric) and each is not BUILD))

if __name__ == "__main__":
    sys.stdout.write(metrics_table(METRICS))
