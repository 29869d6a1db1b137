"""The picker's metrics of desired and reported replicas; `metrics` includes them in its table."""

from kvmesh.metrics.metric import Metric, Over, gauge

# only for roles in the policy's `autoscale`
WANTED_REPLICAS = gauge("kvmesh_wanted_replicas", "Desired pods of a role (autoscale).", "role", over=Over.EACH)
SCALE_TO_REPLICAS = gauge(
    "kvmesh_scale_to_replicas",
    "Replicas reported to autoscalers: the desired number, or in shadow the current one.",
    "role",
    over=Over.EACH,
)
READY_REPLICAS = gauge("kvmesh_ready_replicas", "Ready pods of a role.", "role", over=Over.EACH)
SCALE_STATE = gauge(
    "kvmesh_scale_state",
    "1 for the state of the desired replicas: ok, or the reason for doubt or a hold.",
    "role",
    "state",
    over=Over.EACH,
)
SATURATION = gauge(
    "kvmesh_saturation_ratio", "Work of a role in busy pods, for each ready pod.", "role", over=Over.EACH
)
BUSY_PODS = gauge(
    "kvmesh_busy_pods", "Pods kept busy by a role's work: prefill or decode.", "role", "work", over=Over.EACH
)
QUEUED_TOKENS = gauge(
    "kvmesh_queued_prompt_tokens",
    "Estimated uncached prompt tokens that wait for pods of a role, in all pickers and pods.",
    "role",
    over=Over.EACH,
)
TOKEN_RATE = gauge(
    "kvmesh_tokens_per_second",
    "Recent tokens a second of a role: input (uncached, also waiting or refused), cached, output.",
    "role",
    "kind",
    over=Over.EACH,
)
VARIANT_WANTED_REPLICAS = gauge(
    "kvmesh_variant_wanted_replicas",
    "Desired pods of a role's variant (autoscale.<role>.variants).",
    "role",
    "variant",
    over=Over.EACH,
)
VARIANT_SCALE_TO_REPLICAS = gauge(
    "kvmesh_variant_scale_to_replicas",
    "Replicas of a variant reported to autoscalers; in shadow the current number.",
    "role",
    "variant",
    over=Over.EACH,
)
POD_CAPACITY = gauge(
    "kvmesh_pod_capacity_tokens_per_second",
    'Tokens a second of a pod within the targets: prefill (prompt) or decode (generated); by variant, "" without.',
    "role",
    "variant",
    "work",
    over=Over.EACH,
)
PODS_COST = gauge(
    "kvmesh_pods_cost_per_hour",
    "Hourly cost of a role's current pods, in the policy's currency.",
    "role",
    over=Over.EACH,
)
TOKENS_COST = gauge(
    "kvmesh_cost_per_million_tokens",
    "Cost of a million tokens in the last minutes: all (prompts, also cached, and answers), or output.",
    "role",
    "tokens",
    over=Over.EACH,
)
PREFILL_LEAN = gauge("kvmesh_prefill_lean_ratio", "Share of prompts in a role's work.", "role", over=Over.EACH)

METRICS = tuple(each for each in tuple(vars().values()) if isinstance(each, Metric))
