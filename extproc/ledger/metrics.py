"""The picker's metrics: names, types, labels and meanings. `python -m extproc.ledger.metrics` prints the table.

Label values are closed sets of ours or configured names. A test compares the table in docs/reference/metrics.md.
"""

import sys

from extproc.ledger import scale_metrics
from kvmesh.metrics.metric import BUILD, Metric, Over, counter, gauge, histogram, metrics_table

OTHER = "other"  # the label value for names above a limit

# vLLM's own bounds (vllm/v1/metrics/loggers.py, 0.32), so that its histograms are added without error
TTFT_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
INTER_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
PHASE_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
    *(2.5, 5.0, 10.0, 30.0, 60.0),  # only the queue takes this long
)
QUEUE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
FIRST_POD_BOUNDS = (1.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 240.0, 300.0, 600.0)
# the halves: an exact prediction has its own bucket around 0, so that its quantiles are drawn as 0
ERROR_TOKENS = (-4096.0, -1024.0, -256.0, -64.0, -16.0, -0.5, 0.5, 16.0, 64.0, 256.0, 1024.0, 4096.0)

# requests
DECISIONS = counter("kvmesh_decisions_total", "Requests by outcome.", "outcome")
DEGRADED = counter("kvmesh_degraded_decisions_total", "Decisions without one of their inputs.", "missing")
PHASES = histogram(
    "kvmesh_pick_phase_seconds",
    "Time of a pick by phase; queue: of requests that waited.",
    "phase",
    bounds=PHASE_SECONDS,
)
PROMPT_TOKENS = counter("kvmesh_prompt_tokens_total", "Tokens of routed prompts.")
PREDICTED_TOKENS = counter("kvmesh_predicted_cached_tokens_total", "Predicted cached tokens at the picked endpoint.")
REGRET_TOKENS = counter(
    "kvmesh_regret_tokens_total",
    "Cached prompt tokens given up: held by the best endpoint, not by the picked one.",
)
TOKEN_SOURCES = counter(
    "kvmesh_prompt_token_sources_total",
    'Requests by token source: the model\'s folder, its pods, the client, or text; model "(unknown)" for a '
    "name that is neither configured nor learned.",
    "model",
    "source",
)
TOKEN_STATES = gauge(
    "kvmesh_token_states",
    "1 for the state of a folder's tokens versus its pods': exact, unverified, differs.",
    "model",
    "state",
)
UNROUTED = counter("kvmesh_unrouted_requests_total", "Requests without a pool, by reason.", "reason")
UNFINISHED_BODY_BYTES = gauge(
    "kvmesh_unfinished_body_bytes", "Bytes held of request bodies that have not ended (--max-held-body-bytes)."
)
UPLOADS_GAVE_WAY = counter(
    "kvmesh_uploads_gave_way_total", "Request bodies answered 503 at the limit of all unfinished ones."
)
WAITING_BODY_BYTES = gauge("kvmesh_waiting_body_bytes", "Bytes held of waiting requests (--max-held-body-bytes).")
WAITING_BODIES_GAVE_WAY = counter(
    "kvmesh_waiting_bodies_gave_way_total",
    "Waits ended by the memory limit of all waiting requests.",
)
RESPONSES_MISSED = counter(
    "kvmesh_responses_missed_total", "Responses that could not be read or changed as planned.", "why"
)
ALERT_HIT_RATIO = gauge(
    "kvmesh_alert_hit_ratio",
    "Policy's alert threshold for the share of cached prompt tokens; 0: none.",
    over=Over.EACH,
)

# predictions, and their realisation
REALISED_REQUESTS = counter(
    "kvmesh_realised_requests_total", "Responses whose usage was compared with the prediction.", "model"
)
REALISED_PROMPT_TOKENS = counter("kvmesh_realised_prompt_tokens_total", "Prompt tokens of compared responses.", "model")
REALISED_PREDICTED_TOKENS = counter(
    "kvmesh_realised_predicted_tokens_total",
    "Predicted cached prompt tokens of compared responses.",
    "model",
)
REALISED_CACHED_TOKENS = counter(
    "kvmesh_realised_cached_tokens_total",
    "Cached prompt tokens of compared responses, by the pod's usage.",
    "model",
)
REALISED_REGRET_TOKENS = counter(
    "kvmesh_realised_regret_tokens_total",
    "Regret tokens of compared responses.",
    "model",
)
PREDICTION_ERROR = histogram(
    "kvmesh_prediction_error_tokens",
    "Cached tokens by the pod's usage minus predicted ones.",
    "model",
    bounds=ERROR_TOKENS,
)

# requests by endpoint
PICKS = counter("kvmesh_picks_total", "Requests sent to each endpoint.", "endpoint")
OPEN_BOOKINGS = gauge("kvmesh_open_bookings", "Open exchanges.", "endpoint")
POD_RESPONSES = counter(
    "kvmesh_pod_responses_total",
    "Ended exchanges by the pod's status; none: ended before the pod's answer.",
    "endpoint",
    "status",
)
REROUTED = counter("kvmesh_rerouted_picks_total", "Requests that Envoy's retry moved to another pod.", "endpoint")
ENDPOINT_FAILURES = counter(
    "kvmesh_endpoint_failures_total",
    "Requests that failed at an endpoint: its own 5xx, a broken or a failed connection.",
    "endpoint",
)
PREFILL_PROMPTS = counter(
    "kvmesh_prefill_prompts_total",
    "Prompts that could use a prefill pod: remote, local, or fell-back (after a failed prefill request).",
    "where",
)
PREFILL_LEGS = counter("kvmesh_prefill_legs_total", "Prefill requests by outcome.", "endpoint", "outcome")
PREFILL_LEG_SECONDS = histogram("kvmesh_prefill_leg_seconds", "Duration of prefill requests.", bounds=QUEUE_SECONDS)
PREFILL_RACES = counter(
    "kvmesh_prefill_races_total",
    "Prompts raced on two prefill pods, by winner: first (the better estimate), second, or none (both "
    "failed, or the client left).",
    "winner",
)
PREFILL_RACE_LOST_TOKENS = counter(
    "kvmesh_prefill_race_lost_tokens_total",
    "Prompt tokens computed by prefill requests that lost a race; estimated from the time if ended early.",
)
KV_LINK_RATE = gauge(
    "kvmesh_kv_link_bytes_per_second",
    "Recent speed of single KV transfers to a decode pod.",
    "endpoint",
)
ENDPOINT_FULL = counter("kvmesh_endpoint_full_answers_total", "429 or 503 of an endpoint: it has no room.", "endpoint")
MODEL_FINDING = gauge(
    "kvmesh_extproc_model_finding",
    "1 while a finding about a model's tokens or predictions lasts (docs/reference/findings.md).",
    "reason",
    "model",
    over=Over.EACH,
)

# the endpoints as the picker sees them
ENDPOINT_INFO = gauge("kvmesh_endpoint_info", "1 for each endpoint, with its role.", "endpoint", "role", over=Over.EACH)
ENDPOINT_STATE = gauge(
    "kvmesh_endpoint_state", "1 for the current state of an endpoint.", "endpoint", "state", over=Over.EACH
)
ENDPOINT_REPORTING = gauge(
    "kvmesh_endpoint_reporting",
    "1 while an endpoint's last report is fresh.",
    "endpoint",
    over=Over.EACH,
)
ENDPOINT_WANTS_KEY = gauge(
    "kvmesh_endpoint_wants_key",
    "1 while an endpoint refuses to list its models without a valid key (401, 403; --pod-key-file).",
    "endpoint",
    over=Over.EACH,
)
ENDPOINT_WAITING = gauge(
    "kvmesh_endpoint_waiting_requests",
    "Reported waiting requests of an endpoint.",
    "endpoint",
    over=Over.EACH,
)
ENDPOINT_FETCHING = gauge(
    "kvmesh_endpoint_fetching_requests",
    "Requests that wait for a KV transfer, as reported; not part of the queue.",
    "endpoint",
    over=Over.EACH,
)
ENDPOINT_RUNNING = gauge(
    "kvmesh_endpoint_running_requests",
    "Reported running requests of an endpoint.",
    "endpoint",
    over=Over.EACH,
)
ENDPOINT_KV_USAGE = gauge(
    "kvmesh_endpoint_kv_usage_ratio",
    "Reported share of an endpoint's cache blocks in use, 0 to 1.",
    "endpoint",
    over=Over.EACH,
)
ENDPOINT_REPORT_AGE = gauge(
    "kvmesh_endpoint_report_age_seconds", "Age of an endpoint's last report.", "endpoint", over=Over.EACH
)
KV_FETCHED_BYTES = counter(
    "kvmesh_endpoint_kv_fetched_bytes_total",
    "Bytes of other pods' caches that an endpoint has fetched since its start.",
    "endpoint",
    "role",
    over=Over.EACH,
)
KV_FETCH_SECONDS = counter(
    "kvmesh_endpoint_kv_fetch_seconds_total",
    "Total time of an endpoint's KV fetches since its start; parallel ones add up.",
    "endpoint",
    "role",
    over=Over.EACH,
)
ENDPOINT_PACE = gauge(
    "kvmesh_endpoint_prefill_seconds_per_token",
    "Estimated time of a prompt token at an endpoint.",
    "endpoint",
    over=Over.EACH,
)
ENDPOINT_STREAM = gauge(
    "kvmesh_endpoint_stream_seconds",
    "Estimated increase of an endpoint's inter-token time by one more stream.",
    "endpoint",
    over=Over.EACH,
)
ENDPOINT_NEXT_STREAM = gauge(
    "kvmesh_endpoint_next_stream_inter_token_seconds",
    "Estimated inter-token time at an endpoint with one more stream.",
    "endpoint",
    over=Over.EACH,
)
ENDPOINT_PREEMPTIONS = counter(
    "kvmesh_endpoint_preemptions_total",
    "Reported preemptions of an endpoint since its start.",
    "endpoint",
    over=Over.EACH,
)
ANSWER_LENGTH_ERROR = gauge(
    "kvmesh_answer_length_error_tokens",
    "Recent mean error of the expected length of answers.",
    "model",
    over=Over.EACH,
)
ESTIMATE_BIAS = gauge(
    "kvmesh_ttft_estimate_bias_seconds",
    "Recent mean of expected minus real TTFT; above 0: too pessimistic.",
    "endpoint",
    over=Over.EACH,
)
ESTIMATE_ERROR = gauge(
    "kvmesh_ttft_estimate_error_seconds",
    "Recent mean error of the expected TTFT.",
    "endpoint",
    over=Over.EACH,
)
TTFT = histogram(
    "kvmesh_ttft_seconds",
    "TTFT measured by the pods, by their model name and role, since this picker first saw them.",
    "model",
    "role",
    bounds=TTFT_SECONDS,
    over=Over.EACH,
)
INTER_TOKEN = histogram(
    "kvmesh_inter_token_seconds",
    "Inter-token time measured by the pods, by their model name and role, since this picker first saw them.",
    "model",
    "role",
    bounds=INTER_TOKEN_SECONDS,
    over=Over.EACH,
)

# models by the clients' names, and the arms of their splits
MODEL_REQUESTS = counter(
    "kvmesh_model_requests_total",
    "Ended exchanges by the client's model name, variant of its split, and the pod's status.",
    "model",
    "arm",
    "status",
)
MODEL_REQUEST_SECONDS = histogram(
    "kvmesh_model_request_seconds",
    "Time from the pick to the end of the exchange, by the client's model name and variant.",
    "model",
    "arm",
    bounds=TTFT_SECONDS,
)
MODEL_FIRST_TOKEN_SECONDS = histogram(
    "kvmesh_model_first_token_seconds",
    "Time from the pick to a stream's first bytes, of read responses (a sample).",
    "model",
    "arm",
    bounds=TTFT_SECONDS,
)
MODEL_PROMPT_TOKENS = counter(
    "kvmesh_model_prompt_tokens_total", "Tokens of routed prompts, by model and variant of a split.", "model", "arm"
)
MODEL_PREDICTED_TOKENS = counter(
    "kvmesh_model_predicted_cached_tokens_total",
    "Predicted cached tokens, by model and variant of a split.",
    "model",
    "arm",
)
MODEL_GENERATED_TOKENS = counter(
    "kvmesh_model_generated_tokens_total",
    "Generated tokens of read responses (a sample), by model and variant.",
    "model",
    "arm",
)
MODEL_USAGES = counter("kvmesh_model_usages_total", "Read responses, by model and variant of a split.", "model", "arm")
# models by the pods' names
EXPECTED_TTFT = histogram(
    "kvmesh_expected_ttft_seconds",
    "Expected TTFT of each pick, by served model.",
    "model",
    bounds=TTFT_SECONDS,
)
SAVED_SECONDS = counter(
    "kvmesh_saved_prefill_seconds_total",
    "Prefill time saved by predicted cached tokens, at the endpoint's estimated pace.",
    "model",
)
REALISED_SAVED_SECONDS = counter(
    "kvmesh_realised_saved_prefill_seconds_total",
    "Prefill time saved by cached tokens of compared responses (a sample).",
    "model",
)
SAVED_MONEY = counter(
    "kvmesh_saved_money_total",
    "kvmesh_saved_prefill_seconds_total at the policy's price of a pod's hour.",
    "model",
    "currency",
)

# admission
ADMITTED = counter("kvmesh_admitted_requests_total", "Requests sent to an endpoint, by priority class.", "class")
SHED = counter("kvmesh_shed_requests_total", "Requests refused for load, by class and reason.", "class", "reason")
IGNORED_OBJECTIVES = counter(
    "kvmesh_ignored_objectives_total",
    "Requests with an ignored objective header: unknown to the policy, or not trusted to raise.",
    "why",
)
QUEUED = gauge("kvmesh_queued_requests", "Requests that wait for room at an endpoint.", "class")
QUEUE_LEFT = counter(
    "kvmesh_queue_left_total", "Requests that left the queue, by class and outcome.", "class", "outcome"
)
QUEUE_WAITS = histogram(
    "kvmesh_queue_seconds",
    "Time in the queue, with any outcome.",
    "class",
    bounds=QUEUE_SECONDS,
)
PROMISE_HELD = counter(
    "kvmesh_inter_token_held_picks_total",
    "Picks kept from an endpoint by an inter-token target, by class: elsewhere (another endpoint had room) or no-room.",
    "class",
    "how",
)
FIRST_POD_WAITING = gauge("kvmesh_first_pod_waiting_requests", "Requests that wait for a pool's first pod.", "class")
FIRST_POD_WAITS = counter(
    "kvmesh_first_pod_waits_total",
    "Ended waits for a pool's first pod, by class and outcome.",
    "class",
    "outcome",
)
FIRST_POD_SECONDS = histogram(
    "kvmesh_first_pod_seconds",
    "Wait for a pool's first pod and for room there, with any outcome.",
    "class",
    bounds=FIRST_POD_BOUNDS,
)
STEP_CHANGES = counter(
    "kvmesh_degradation_changes_total",
    "Changes of degradation steps.",
    "class",
    "step",
    "change",
)
STEPS = gauge("kvmesh_degradation_step", "1 while a degradation step is in force.", "class", "step", over=Over.EACH)
SHADOW = gauge(
    "kvmesh_shadow",
    "1 for a policy in shadow: it only counts what it would refuse, degrade, offload or scale.",
    over=Over.EACH,
)
SHADOW_DECISIONS = counter(
    "kvmesh_shadow_decisions_total",
    "Actions that a policy in shadow would have taken; a request may have several.",
    "class",
    "rule",
    "action",
    "reason",
)
SHADOW_REFUSED = counter(
    "kvmesh_shadow_refused_requests_total",
    "Requests that a policy in shadow would have refused, by first reason.",
    "class",
    "reason",
)
SHADOW_STEPS = gauge(
    "kvmesh_shadow_degradation_step", "1 while a degradation step would be in force.", "class", "step", over=Over.EACH
)
SHADOW_QUOTA_REFUSALS = counter(
    "kvmesh_shadow_tenant_quota_refusals_total",
    "Requests that a quota in shadow would have refused, by its tenant and limit.",
    "tenant",
    "limit",
)
CLASS_TARGET = gauge(
    "kvmesh_class_ttft_target_seconds",
    "TTFT target of a class.",
    "class",
    over=Over.EACH,
)
CLASS_INTER_TOKEN_TARGET = gauge(
    "kvmesh_class_inter_token_target_seconds",
    "Inter-token target of a class.",
    "class",
    over=Over.EACH,
)

# SLOs, and their attainment
SLO_OBJECTIVE = gauge(
    "kvmesh_slo_objective_ratio",
    "Policy's share of a class's requests within all targets (attainment).",
    "class",
    over=Over.EACH,
)
SLO_SAMPLE_SHARE = gauge(
    "kvmesh_slo_sample_ratio", "Share of answers that are read and judged; 0: none.", over=Over.EACH
)
SLO_PROMISED = counter(
    "kvmesh_slo_promised_requests_total",
    "Requests for text that were sent on or refused for lack of room, judged or not.",
    "class",
)
SLO_JUDGED = counter(
    "kvmesh_slo_judged_requests_total",
    "Judged requests of a class: the sample's size.",
    "class",
)
SLO_REQUESTS = counter(
    "kvmesh_slo_requests_total",
    "Requests by outcome of a target (ttft, inter-token, all): met, late, refused, failed; a sampled "
    "answer counts for all that it represents. The target is the class's or the request's own.",
    *("class", "tenant", "model", "role", "target", "promise", "outcome"),
)
SLO_HEADERS_IGNORED = counter(
    "kvmesh_ignored_slo_headers_total",
    "Ignored target headers: unreadable, or looser than the class's target.",
    "why",
)
SLO_POD_OBSERVED = counter(
    "kvmesh_slo_pod_observations_total",
    "First tokens (ttft) or inter-token times measured by pods, by their model name and role; the same "
    "for every class.",
    *("class", "model", "role", "target"),
    over=Over.EACH,
)
SLO_POD_WITHIN = counter(
    "kvmesh_slo_pod_observations_within_total",
    "kvmesh_slo_pod_observations_total within a class's target: estimate by interpolation in the bucket, "
    "with lower and upper bound.",
    *("class", "model", "role", "target", "bound"),
    over=Over.EACH,
)

CLASS_PROMPT_TOKENS = counter(
    "kvmesh_class_prompt_tokens_total",
    "Prompt tokens by class: cached or uncached at the picked endpoint, as expected; of refused requests "
    "the class's mean uncached tokens.",
    "class",
    "part",
)

# tenants and quotas
TENANT_REQUESTS = counter(
    "kvmesh_tenant_requests_total",
    "Requests by tenant (named in a quota; none, other), class, and outcome: admitted, or shed for load.",
    "tenant",
    "class",
    "outcome",
)
TENANT_PROMPT_TOKENS = counter("kvmesh_tenant_prompt_tokens_total", "Tokens of routed prompts, by tenant.", "tenant")
TENANT_PREDICTED_TOKENS = counter(
    "kvmesh_tenant_predicted_cached_tokens_total",
    "Predicted cached tokens, by tenant.",
    "tenant",
)
TENANT_QUEUE_SECONDS = counter("kvmesh_tenant_queue_seconds_total", "Time in the queue, by tenant.", "tenant")
QUOTA_DECISIONS = counter(
    "kvmesh_quota_decisions_total",
    "Quota decisions: allowed, or the exceeded limit; shared, or by a local share.",
    "outcome",
    "source",
)
TENANT_QUOTA_DECISIONS = counter(
    "kvmesh_tenant_quota_decisions_total",
    "Quota decisions by the quota's tenant; other: quotas for each tenant.",
    "tenant",
    "outcome",
)
QUOTA_WRITES_FAILING = gauge(
    "kvmesh_quota_writes_failing",
    "1 while quota use cannot be written to Redis.",
    over=Over.EACH,
)
QUOTA_OPEN_REQUESTS = gauge("kvmesh_quota_open_requests", "Open requests with a quota in this replica.")

# the index, records, the process
INDEX_PROBLEM = gauge("kvmesh_index_problem", "1 after a lookup without a reliable prefix index.", over=Over.EACH)
LOOKUP_BLOCKS = counter(
    "kvmesh_index_lookup_blocks_total",
    "Blocks of lookups: read from Redis, or known from reported changes.",
    "source",
)
TRACKED_BLOCKS = gauge("kvmesh_index_tracked_blocks", "Blocks whose changes Redis reports to this replica.")
ACCESS_LOG_LINES = counter(
    "kvmesh_access_log_lines_total",
    "Access log lines by target (stdout, file, stream): written, or dropped by a slow target.",
    "target",
    "outcome",
)
TRACE_SPANS = counter(
    "kvmesh_trace_spans_total",
    "Spans by outcome: exported, or dropped by the collector.",
    "outcome",
)
POD_KEY_UNUSABLE = gauge(
    "kvmesh_pod_key_unusable",
    "1 while the file of --pod-key-file is unusable; the last good key is in use.",
    over=Over.EACH,
)
READY = gauge(
    "kvmesh_ready",
    "1 while ready for traffic, 0 during start and stop.",
    over=Over.EACH,
)

_OWN = tuple(each for each in tuple(vars().values()) if isinstance(each, Metric) and each is not BUILD)
METRICS = (BUILD, *_OWN, *scale_metrics.METRICS)

if __name__ == "__main__":
    sys.stdout.write(metrics_table(METRICS))
