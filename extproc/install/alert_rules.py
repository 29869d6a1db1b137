"""What somebody must look at, as Prometheus' alerts. Values; written by `rule_groups`, each explained in operations.md.

A symptom that users feel is critical: it wakes somebody. What costs cache hits or head-room waits for the morning.
"""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How urgent it is."""

    CRITICAL = "critical"  # requests fail: at once, also at night
    WARNING = "warning"  # today
    INFO = "info"  # somebody should know


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert; its paragraph in docs/operations.md has its name as heading."""

    name: str
    expr: str
    for_minutes: float
    severity: Severity
    summary: str

    @property
    def anchor(self) -> str:
        """Return the heading's name in an address."""
        return self.name.lower()


PICKERS = (
    Alert(
        name="KvmeshNoPickerReady",
        expr="absent(kvmesh_ready == 1)",
        for_minutes=1,
        severity=Severity.CRITICAL,
        summary="No picker is ready: requests follow the pools' failure mode.",
    ),
    Alert(
        name="KvmeshNoReadyEndpoint",
        expr='sum by (pool) (rate(kvmesh_decisions_total{outcome="no-ready-endpoint"}[5m])) > 0',
        for_minutes=1,
        severity=Severity.CRITICAL,
        summary="Requests of pool {{ $labels.pool }} are refused: none of its endpoints is ready.",
    ),
    Alert(
        name="KvmeshPoolFails",
        expr="pool:kvmesh_failures:ratio_rate5m > 0.05",
        for_minutes=5,
        severity=Severity.CRITICAL,
        summary="{{ $value | humanizePercentage }} of the requests that pool {{ $labels.pool }} was sent have failed.",
    ),
    Alert(
        name="KvmeshReplicaDown",
        expr='up{job=~"kvmesh-.*"} == 0',
        for_minutes=5,
        severity=Severity.WARNING,
        summary="{{ $labels.job }} at {{ $labels.instance }} does not answer Prometheus.",
    ),
    Alert(
        name="KvmeshPicksDegraded",
        expr="pool_missing:kvmesh_degraded:ratio_rate5m > 0.1",
        for_minutes=5,
        severity=Severity.WARNING,
        summary="{{ $value | humanizePercentage }} of the picks of pool {{ $labels.pool }} go without "
        "{{ $labels.missing }}.",
    ),
    Alert(
        name="KvmeshLookupSlow",
        expr="pool:kvmesh_lookup_seconds:p99_rate5m > 0.015",
        for_minutes=5,
        severity=Severity.WARNING,
        summary="Lookups in the index take {{ $value | humanizeDuration }} (p99), close to their deadline.",
    ),
)

PODS = (
    Alert(
        name="KvmeshEndpointFails",
        expr="pool_endpoint:kvmesh_failures:ratio_rate5m > 0.2",
        for_minutes=5,
        severity=Severity.WARNING,
        summary="{{ $labels.endpoint }} fails {{ $value | humanizePercentage }} of its requests.",
    ),
    Alert(
        name="KvmeshEndpointSilent",
        expr="max by (pool, endpoint) (kvmesh_endpoint_reporting) == 0",
        for_minutes=2,
        severity=Severity.WARNING,
        summary="{{ $labels.endpoint }} does not report: no picker has a fresh /metrics of it.",
    ),
    Alert(
        name="KvmeshEndpointRefuses",
        expr="sum by (pool, endpoint) (rate(kvmesh_endpoint_full_answers_total[5m])) > 0",
        for_minutes=10,
        severity=Severity.WARNING,
        summary="{{ $labels.endpoint }} answers 503 by itself: it is fuller than the picker believes.",
    ),
    Alert(
        name="KvmeshRequestsRerouted",
        expr="sum by (pool) (rate(kvmesh_rerouted_picks_total[5m])) / "
        "(sum by (pool) (rate(kvmesh_picks_total[5m])) > 0) > 0.05",
        for_minutes=10,
        severity=Severity.WARNING,
        summary="Envoy takes {{ $value | humanizePercentage }} of the requests to another pod than the one picked.",
    ),
)

INDEX = (
    Alert(
        name="KvmeshNoIndexerReady",
        expr="absent(kvmesh_indexer_ready == 1)",
        for_minutes=5,
        severity=Severity.WARNING,
        summary="No indexer is ready: the index ages, pickers route on what they remember.",
    ),
    Alert(
        name="KvmeshNoEvents",
        expr="sum(rate(kvmesh_prompt_tokens_total[10m])) > 0 unless sum(rate(kvmesh_indexer_batches_total[10m])) > 0",
        for_minutes=10,
        severity=Severity.WARNING,
        summary="Prompts are served, and not one KV event of any pod was applied.",
    ),
    Alert(
        name="KvmeshSourceNotLive",
        expr='max by (endpoint, dp_rank, state) (kvmesh_indexer_source_state{state=~"lost|degraded"}) == 1',
        for_minutes=10,
        severity=Severity.WARNING,
        summary="The stream of {{ $labels.endpoint }} (rank {{ $labels.dp_rank }}) is {{ $labels.state }}.",
    ),
    Alert(
        name="KvmeshIndexBehind",
        expr="max by (endpoint) (kvmesh_indexer_lag_seconds) > 5 "
        "and on (endpoint) sum by (endpoint) (rate(kvmesh_indexer_batches_total[5m])) > 0",
        for_minutes=5,
        severity=Severity.WARNING,
        summary="Events of {{ $labels.endpoint }} are {{ $value | humanizeDuration }} old when they are applied.",
    ),
    Alert(
        name="KvmeshEventsNotUnderstood",
        expr="sum by (reason) (increase(kvmesh_indexer_decode_errors_total[10m])) > 0",
        for_minutes=5,
        severity=Severity.WARNING,
        summary="Events cannot be understood: {{ $labels.reason }}.",
    ),
    Alert(
        name="KvmeshFinding",
        expr="max by (reason, endpoint) (kvmesh_indexer_finding) == 1 "
        "or max by (reason, endpoint) (kvmesh_extproc_finding) == 1",
        for_minutes=5,
        severity=Severity.WARNING,
        summary="{{ $labels.endpoint }}: {{ $labels.reason }}, although nothing has failed.",
    ),
    Alert(
        name="KvmeshModelFinding",
        expr="max by (pool, reason, model) (kvmesh_extproc_model_finding) == 1",
        for_minutes=5,
        severity=Severity.WARNING,
        summary="Predictions for the model {{ $labels.model }} do not come true: {{ $labels.reason }}.",
    ),
    Alert(
        name="KvmeshPredictionsOff",
        expr="abs(pool_model:kvmesh_realised_hit:ratio_rate5m - pool_model:kvmesh_predicted_of_realised:ratio_rate5m)"
        " > 0.2",
        for_minutes=10,
        severity=Severity.WARNING,
        summary="Of the model {{ $labels.model }}, pods find {{ $value | humanizePercentage }} of the prompt tokens "
        "more or less in their caches than predicted.",
    ),
    Alert(
        name="KvmeshHitRatioLow",
        expr="pool_model:kvmesh_realised_hit:ratio_rate5m "
        "< on (pool) group_left () (max by (pool) (kvmesh_alert_hit_ratio) > 0)",
        for_minutes=15,
        severity=Severity.WARNING,
        summary="Of the model {{ $labels.model }}, pods find {{ $value | humanizePercentage }} of the prompt tokens in "
        "their caches: less than the policy's alert_hit_ratio.",
    ),
    Alert(
        name="KvmeshPoolProblem",
        expr="max by (reason) (kvmesh_indexer_pool_problems) > 0",
        for_minutes=5,
        severity=Severity.WARNING,
        summary="{{ $value }} documents of pools cannot be used: {{ $labels.reason }}.",
    ),
    Alert(
        name="KvmeshPoolConflict",
        expr="max(kvmesh_indexer_pool_conflicts) > 0",
        for_minutes=5,
        severity=Severity.WARNING,
        summary="{{ $value }} endpoints are in several pools and are indexed for the first alone.",
    ),
)

REDIS = (
    Alert(
        name="KvmeshRedisDown",
        expr="max(kvmesh_indexer_redis_up) == 0",
        for_minutes=2,
        severity=Severity.CRITICAL,
        summary="No indexer can write to Redis: no pick sees the caches, replicas do not see each other's load.",
    ),
    Alert(
        name="KvmeshRedisMayEvict",
        expr='max by (policy) (kvmesh_indexer_redis_eviction_policy{policy!="noeviction"}) == 1',
        for_minutes=1,
        severity=Severity.WARNING,
        summary="Redis' maxmemory-policy is {{ $labels.policy }}: evicted keys make the index lie.",
    ),
    Alert(
        name="KvmeshRedisEvicted",
        expr="max(increase(kvmesh_indexer_redis_evicted_keys_total[30m])) > 0",
        for_minutes=0,
        severity=Severity.WARNING,
        summary="Redis has evicted {{ $value }} keys: the index lies until it is rebuilt.",
    ),
    Alert(
        name="KvmeshRedisAlmostFull",
        expr="max(kvmesh_indexer_redis_memory_bytes / (kvmesh_indexer_redis_memory_limit_bytes > 0)) > 0.85",
        for_minutes=5,
        severity=Severity.WARNING,
        summary="Redis uses {{ $value | humanizePercentage }} of its memory; a full one takes no new blocks.",
    ),
    Alert(
        name="KvmeshUnreadableRecords",
        expr="max(kvmesh_indexer_unreadable_records) > 0",
        for_minutes=5,
        severity=Severity.WARNING,
        summary="{{ $value }} records in Redis cannot be read and are not believed.",
    ),
    Alert(
        name="KvmeshQuotaWritesFail",
        expr="max by (pool) (kvmesh_quota_writes_failing) == 1",
        for_minutes=2,
        severity=Severity.WARNING,
        summary="What requests have used of their quotas cannot be written: each replica allows its share.",
    ),
)

CLASSES = (
    Alert(
        name="KvmeshClassShed",
        expr="pool_class:kvmesh_shed:ratio_rate5m > 0.1",
        for_minutes=10,
        severity=Severity.WARNING,
        summary="{{ $value | humanizePercentage }} of the class {{ $labels.class }} are refused for load.",
    ),
    Alert(
        name="KvmeshPromiseBroken",
        expr="pool_class:kvmesh_queue_seconds:p95_rate5m "
        "> on (pool, class) max by (pool, class) (kvmesh_class_ttft_target_seconds)",
        for_minutes=5,
        severity=Severity.WARNING,
        summary="The class {{ $labels.class }} waits {{ $value | humanizeDuration }} in the queue (p95): longer than "
        "the first token that it is promised.",
    ),
    Alert(
        name="KvmeshQueueNeverEmpty",
        expr="sum by (pool, class) (kvmesh_queued_requests) > 0",
        for_minutes=15,
        severity=Severity.INFO,
        summary="Requests of the class {{ $labels.class }} always wait for room: the pool is too small.",
    ),
    Alert(
        name="KvmeshStepInForce",
        expr="max by (pool, class, step) (kvmesh_degradation_step) == 1",
        for_minutes=15,
        severity=Severity.INFO,
        summary="The class {{ $labels.class }} is served less ({{ $labels.step }}) all the time.",
    ),
)

ALERTS = {"pickers": PICKERS, "pods": PODS, "index": INDEX, "redis": REDIS, "classes": CLASSES}
