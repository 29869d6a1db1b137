"""The indexer's metrics: names, types, labels and meanings. `python -m kv_indexer.telemetry.metrics` prints the table.

The table in docs/reference/metrics.md is held to this by a test.
"""

import sys

from kvmesh.metrics.metric import BUILD, Metric, Over, counter, gauge, histogram, metrics_table

LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
ROUND_TRIP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5)

# streams
EVENTS = counter("kvmesh_indexer_events_total", "Events read, by type.", "type")
DECODE_ERRORS = counter(
    "kvmesh_indexer_decode_errors_total",
    "Events, batches and messages that could not be understood, by reason.",
    "reason",
)
NOT_INDEXED = counter(
    "kvmesh_indexer_events_not_indexed_total",
    "Events that were understood and are not in the index, by reason.",
    "reason",
)
BATCHES = counter("kvmesh_indexer_batches_total", "Event batches applied.", "endpoint", "dp_rank")
GAPS = counter("kvmesh_indexer_gaps_total", "Gaps in live sequences.", "endpoint", "dp_rank")
REPLAYED = counter("kvmesh_indexer_replayed_batches_total", "Batches got by replay.", "endpoint", "dp_rank")
STATE = gauge(
    "kvmesh_indexer_source_state",
    "1 for the state a stream is in.",
    "endpoint",
    "dp_rank",
    "state",
    over=Over.ONE,
)
BLOCKS = gauge("kvmesh_indexer_blocks", "Blocks indexed.", "endpoint", "dp_rank", "tier", over=Over.EACH)
LAG = gauge(
    "kvmesh_indexer_lag_seconds",
    "Age of the newest batch when it was applied.",
    "endpoint",
    "dp_rank",
    over=Over.ONE,
)
EVENT_LAG = histogram(
    "kvmesh_indexer_event_lag_seconds",
    "Age of the newest event of each batch when it was applied, of all streams.",
    bounds=LAG_SECONDS,
)
ORPHANS = gauge(
    "kvmesh_indexer_orphan_events",
    "Stores that wait for their parent block.",
    "endpoint",
    "dp_rank",
    over=Over.ONE,
)

# this indexer
READY = gauge("kvmesh_indexer_ready", "1 while the indexer is ready.", over=Over.EACH)
STREAMS_HELD = gauge("kvmesh_indexer_streams_held", "Streams that this indexer follows.")
POD_KEY_UNUSABLE = gauge(
    "kvmesh_indexer_pod_key_unusable",
    "1 while the file of --pod-key-file cannot be used: pods are shown the last good key.",
    over=Over.EACH,
)
FINDING = gauge(
    "kvmesh_indexer_finding",
    "1 while something is wrong with a pod although nothing has failed; docs/reference/findings.md says what to do.",
    "reason",
    "endpoint",
    over=Over.ONE,
)
FINDINGS = counter("kvmesh_indexer_findings_total", "Findings that have appeared.", "reason")

# Redis
REDIS_UP = gauge("kvmesh_indexer_redis_up", "1 while Redis can be written and read.", over=Over.EACH)
REDIS_EVICTION = gauge(
    "kvmesh_indexer_redis_eviction_policy",
    "1 for what Redis does when its memory is full; must be noeviction.",
    "policy",
    over=Over.EACH,
)
UNREADABLE = gauge(
    "kvmesh_indexer_unreadable_records", "Streams and slots in Redis that cannot be read.", over=Over.EACH
)
REDIS_ROUND_TRIP = histogram(
    "kvmesh_indexer_redis_round_trip_seconds",
    "Time until Redis had answered INFO, from the indexer.",
    bounds=ROUND_TRIP_SECONDS,
)
REDIS_FAILURES = counter(
    "kvmesh_indexer_redis_probe_failures_total", "Times that Redis did not answer INFO, or not in time."
)
REDIS_MEMORY = gauge(
    "kvmesh_indexer_redis_memory_bytes",
    "Memory that Redis uses for data and itself (used_memory).",
    over=Over.EACH,
)
REDIS_MEMORY_PEAK = gauge(
    "kvmesh_indexer_redis_memory_peak_bytes", "The most memory that Redis has used.", over=Over.EACH
)
REDIS_MEMORY_LIMIT = gauge(
    "kvmesh_indexer_redis_memory_limit_bytes",
    "Memory that Redis may use (maxmemory); 0: no limit.",
    over=Over.EACH,
)
REDIS_FRAGMENTATION = gauge(
    "kvmesh_indexer_redis_fragmentation_ratio",
    "Memory that the system gave Redis, divided by what it uses.",
    over=Over.EACH,
)
REDIS_KEYS = gauge("kvmesh_indexer_redis_keys", "Keys in all of Redis' databases, ours and others'.", over=Over.EACH)
REDIS_EVICTED = counter(
    "kvmesh_indexer_redis_evicted_keys_total",
    "Keys that Redis has evicted; any makes the index lie.",
    over=Over.EACH,
)
REDIS_OPERATIONS = counter(
    "kvmesh_indexer_redis_operations_total",
    "Commands that Redis has processed, whoever sent them.",
    over=Over.EACH,
)
REDIS_CLIENTS = gauge("kvmesh_indexer_redis_clients", "Connections to Redis.", over=Over.EACH)
REDIS_TRACKED_KEYS = gauge(
    "kvmesh_indexer_redis_tracked_keys",
    "Keys that Redis remembers to tell pickers of, some 140 bytes each.",
    over=Over.EACH,
)
REDIS_REPLICAS = gauge("kvmesh_indexer_redis_replicas", "Replicas that follow Redis.", over=Over.EACH)

# pools
POOL_ENDPOINTS = gauge(
    "kvmesh_indexer_pool_endpoints",
    "Endpoints, by whether they are ready.",
    "pool",
    "ready",
    over=Over.EACH,
)
POOL_STREAMS = gauge("kvmesh_indexer_pool_streams", "Streams that this indexer follows, by state.", "pool", "state")
POOL_BLOCKS = gauge(
    "kvmesh_indexer_pool_blocks", "Blocks indexed, by whichever indexer.", "pool", "tier", over=Over.EACH
)
POOL_FINDINGS = gauge("kvmesh_indexer_pool_findings", "Findings of this indexer that stand.", "pool", "reason")
POOL_ENDPOINT_INFO = gauge(
    "kvmesh_indexer_pool_endpoint_info",
    "1 for the pool that an endpoint is indexed for.",
    "pool",
    "endpoint",
    over=Over.EACH,
)
POOL_CONFLICTS = gauge(
    "kvmesh_indexer_pool_conflicts",
    "Endpoints in several pools; they are indexed for the first alone.",
    over=Over.EACH,
)
POOL_PROBLEMS = gauge("kvmesh_indexer_pool_problems", "Documents that cannot be used.", "reason", over=Over.EACH)

METRICS = (BUILD, *(each for each in tuple(vars().values()) if isinstance(each, Metric) and each is not BUILD))

if __name__ == "__main__":
    sys.stdout.write(metrics_table(METRICS))
