"""The picker's metrics of how many pods are wanted: a part of `metrics`, whose table has them, too."""

from kvmesh.metrics.metric import Metric, Over, counter, gauge

# how many pods are wanted, of roles that a policy's `autoscale` names
WANTED_REPLICAS = gauge(
    "kvmesh_wanted_replicas", "Pods that the load of a role wants (the policy's autoscale).", "role", over=Over.EACH
)
SCALE_TO_REPLICAS = gauge(
    "kvmesh_scale_to_replicas",
    "What an autoscaler is to go by: kvmesh_wanted_replicas, or in shadow the present number of pods.",
    "role",
    over=Over.EACH,
)
READY_REPLICAS = gauge("kvmesh_ready_replicas", "Pods of a role that may get requests.", "role", over=Over.EACH)
SCALE_STATE = gauge(
    "kvmesh_scale_state",
    "1 for what the wanted number rests on: ok, or why it is held or doubtful.",
    "role",
    "state",
    over=Over.EACH,
)
SATURATION = gauge(
    "kvmesh_saturation_ratio", "Work of a role in busy pods, for each ready pod.", "role", over=Over.EACH
)
BUSY_PODS = gauge(
    "kvmesh_busy_pods", "Pods that the work of a role keeps busy: prefill or decode.", "role", "work", over=Over.EACH
)
QUEUED_TOKENS = gauge(
    "kvmesh_queued_prompt_tokens",
    "Uncached prompt tokens that wait for pods of a role, in all pickers and at the pods; estimated.",
    "role",
    over=Over.EACH,
)
TOKEN_RATE = gauge(
    "kvmesh_tokens_per_second",
    "Tokens a second of a role, lately: input (uncached, with what waits or was refused), cached, output.",
    "role",
    "kind",
    over=Over.EACH,
)
EXTERNAL_METRICS_SERVED = gauge(
    "kvmesh_external_metrics_served",
    "1: the external-metrics API is served; 0: its certificate is missing, or it cannot be read who may ask.",
    over=Over.EACH,
)
EXTERNAL_METRICS_ANSWERS = counter(
    "kvmesh_external_metrics_answers_total", "Answers of the external-metrics API, by HTTP status.", "code"
)
VARIANT_WANTED_REPLICAS = gauge(
    "kvmesh_variant_wanted_replicas",
    "Pods of a variant of a role that are wanted (the policy's autoscale.<role>.variants).",
    "role",
    "variant",
    over=Over.EACH,
)
VARIANT_SCALE_TO_REPLICAS = gauge(
    "kvmesh_variant_scale_to_replicas",
    "What an autoscaler of a variant's pods is to go by; in shadow the present number.",
    "role",
    "variant",
    over=Over.EACH,
)
POD_CAPACITY = gauge(
    "kvmesh_pod_capacity_tokens_per_second",
    'What a pod does within the promises: prefill (prompt tokens) or decode (generated ones); by variant, "" without.',
    "role",
    "variant",
    "work",
    over=Over.EACH,
)
PODS_COST = gauge(
    "kvmesh_pods_cost_per_hour",
    "What the pods of a role that are there cost an hour, in the policy's currency.",
    "role",
    over=Over.EACH,
)
TOKENS_COST = gauge(
    "kvmesh_cost_per_million_tokens",
    "What a million tokens costs as served in the last minutes: all (prompts, cached too, and answers), or output.",
    "role",
    "tokens",
    over=Over.EACH,
)
PREFILL_LEAN = gauge(
    "kvmesh_prefill_lean_ratio", "What share of a role's work in busy pods is prompts.", "role", over=Over.EACH
)

METRICS = tuple(each for each in tuple(vars().values()) if isinstance(each, Metric))
