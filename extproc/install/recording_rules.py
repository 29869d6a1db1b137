"""What Prometheus computes once for alerts, dashboards and whoever asks often. Values; written by `rule_groups`.

Named as is usual: the labels that are left, the metric, what was done. All windows are five minutes.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One recording rule."""

    record: str
    expr: str


def _rate(counter: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) (rate({counter}[5m]))"


def _ratio(part: str, whole: str, *by: str) -> str:
    return f"{_rate(part, *by)} / ({_rate(whole, *by)} > 0)"


def _quantile(share: float, histogram: str, *by: str) -> str:
    return f"histogram_quantile({share}, {_rate(f'{histogram}_bucket', *by, 'le')})"


_SHED = _rate("kvmesh_shed_requests_total", "pool", "class")
RECORDINGS = (
    Recording(record="pool:kvmesh_decisions:rate5m", expr=_rate("kvmesh_decisions_total", "pool")),
    Recording(record="pool_outcome:kvmesh_decisions:rate5m", expr=_rate("kvmesh_decisions_total", "pool", "outcome")),
    Recording(
        record="pool:kvmesh_predicted_hit:ratio_rate5m",
        expr=_ratio("kvmesh_predicted_cached_tokens_total", "kvmesh_prompt_tokens_total", "pool"),
    ),
    Recording(
        record="pool_model:kvmesh_realised_hit:ratio_rate5m",
        expr=_ratio("kvmesh_realised_cached_tokens_total", "kvmesh_realised_prompt_tokens_total", "pool", "model"),
    ),
    Recording(
        record="pool_model:kvmesh_predicted_of_realised:ratio_rate5m",
        expr=_ratio("kvmesh_realised_predicted_tokens_total", "kvmesh_realised_prompt_tokens_total", "pool", "model"),
    ),
    Recording(
        record="pool_missing:kvmesh_degraded:ratio_rate5m",
        expr=f"{_rate('kvmesh_degraded_decisions_total', 'pool', 'missing')} / on (pool) group_left () "
        f"({_rate('kvmesh_picks_total', 'pool')} > 0)",
    ),
    Recording(
        record="pool_class:kvmesh_shed:ratio_rate5m",
        expr=f"{_SHED} / ({_SHED} + {_rate('kvmesh_admitted_requests_total', 'pool', 'class')} > 0)",
    ),
    Recording(
        record="pool_class:kvmesh_queue_seconds:p95_rate5m",
        expr=_quantile(0.95, "kvmesh_queue_seconds", "pool", "class"),
    ),
    Recording(
        record="pool:kvmesh_lookup_seconds:p99_rate5m",
        expr='histogram_quantile(0.99, sum by (pool, le) (rate(kvmesh_pick_phase_seconds_bucket{phase="lookup"}[5m])))',
    ),
    Recording(
        record="pool_model_role:kvmesh_ttft_seconds:p95_rate5m",
        expr=_quantile(0.95, "kvmesh_ttft_seconds", "pool", "model", "role"),
    ),
    Recording(
        record="pool_model_role:kvmesh_inter_token_seconds:p95_rate5m",
        expr=_quantile(0.95, "kvmesh_inter_token_seconds", "pool", "model", "role"),
    ),
    Recording(
        record="pool_endpoint:kvmesh_failures:ratio_rate5m",
        expr=_ratio("kvmesh_endpoint_failures_total", "kvmesh_picks_total", "pool", "endpoint"),
    ),
    Recording(
        record="pool:kvmesh_failures:ratio_rate5m",
        expr=_ratio("kvmesh_endpoint_failures_total", "kvmesh_picks_total", "pool"),
    ),
    Recording(
        record="pool_model:kvmesh_saved_prefill_seconds:rate5m",
        expr=_rate("kvmesh_saved_prefill_seconds_total", "pool", "model"),
    ),
)
