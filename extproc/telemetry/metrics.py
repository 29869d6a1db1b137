"""The picker's metrics: names, types, labels and meanings. `python -m extproc.telemetry.metrics` prints the table.

The values of labels are closed sets of ours or configured names. A test holds the table in
docs/reference/metrics.md to this.
"""

import sys

from extproc.telemetry import scale_metrics
from kvmesh.metrics.metric import BUILD, Metric, Over, counter, gauge, histogram, metrics_table

OTHER = "other"  # the value of a label beyond a bound of names

# vLLM's own (vllm/v1/metrics/loggers.py, 0.32): what comes from there is counted exactly
TTFT_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
INTER_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
PHASE_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
    *(2.5, 5.0, 10.0, 30.0, 60.0),  # nothing but the queue takes so long
)
QUEUE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
FIRST_POD_BOUNDS = (1.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 240.0, 300.0, 600.0)
# the halves: what is exact has a bucket of its own, around 0, so that a quantile of it is drawn as 0
ERROR_TOKENS = (-4096.0, -1024.0, -256.0, -64.0, -16.0, -0.5, 0.5, 16.0, 64.0, 256.0, 1024.0, 4096.0)

# requests
DECISIONS = counter("kvmesh_decisions_total", "Requests by what became of them.", "outcome")
DEGRADED = counter("kvmesh_degraded_decisions_total", "Decisions made without one of their inputs.", "missing")
PHASES = histogram(
    "kvmesh_pick_phase_seconds",
    "Time a pick spent in each phase; in the queue: of the requests that waited.",
    "phase",
    bounds=PHASE_SECONDS,
)
PROMPT_TOKENS = counter("kvmesh_prompt_tokens_total", "Tokens of routed prompts.")
PREDICTED_TOKENS = counter(
    "kvmesh_predicted_cached_tokens_total", "Prompt tokens that the chosen endpoint was expected to hold."
)
REGRET_TOKENS = counter(
    "kvmesh_regret_tokens_total",
    "Cached prompt tokens that were given up: held by the best endpoint and not by the one picked.",
)
TOKEN_SOURCES = counter(
    "kvmesh_prompt_token_sources_total",
    "Requests by what made their prompts' tokens: the model's folder, its pods, the client, or nothing but text; "
    'the model is "(unknown)" where none is configured or learned by the name that was asked for.',
    "model",
    "source",
)
TOKEN_STATES = gauge(
    "kvmesh_token_states",
    "1: what is known of the tokens that a model's folder makes, compared with its pods: exact, unverified, differs.",
    "model",
    "state",
)
UNROUTED = counter("kvmesh_unrouted_requests_total", "Requests that belong to no pool, by reason.", "reason")
UNFINISHED_BODY_BYTES = gauge(
    "kvmesh_unfinished_body_bytes", "Bytes held of request bodies that have not ended (max_unfinished_body_bytes)."
)
UPLOADS_GAVE_WAY = counter(
    "kvmesh_uploads_gave_way_total", "Request bodies that were answered 503 because all of them held too much."
)
WAITING_BODY_BYTES = gauge(
    "kvmesh_waiting_body_bytes", "Bytes held of requests that wait for a pool's first pod (max_waiting_body_bytes)."
)
WAITING_BODIES_GAVE_WAY = counter(
    "kvmesh_waiting_bodies_gave_way_total",
    "Requests that were answered 503 because all that wait for a first pod held too much.",
)
RESPONSES_MISSED = counter(
    "kvmesh_responses_missed_total", "Responses that were to be read or changed and were not.", "why"
)
ALERT_HIT_RATIO = gauge(
    "kvmesh_alert_hit_ratio",
    "Share of prompt tokens that is to be found in caches, below which the policy wants an alert; 0: none.",
    over=Over.EACH,
)

# what was predicted, and what came true
REALISED_REQUESTS = counter(
    "kvmesh_realised_requests_total", "Responses whose usage was compared with what was predicted.", "model"
)
REALISED_PROMPT_TOKENS = counter(
    "kvmesh_realised_prompt_tokens_total", "Prompt tokens of the responses that were compared.", "model"
)
REALISED_PREDICTED_TOKENS = counter(
    "kvmesh_realised_predicted_tokens_total",
    "Prompt tokens of the responses that were compared, predicted to be cached.",
    "model",
)
REALISED_CACHED_TOKENS = counter(
    "kvmesh_realised_cached_tokens_total",
    "Prompt tokens of the responses that were compared, found in the pod's cache.",
    "model",
)
REALISED_REGRET_TOKENS = counter(
    "kvmesh_realised_regret_tokens_total",
    "Tokens that another endpoint held beyond the one picked, of compared responses.",
    "model",
)
PREDICTION_ERROR = histogram(
    "kvmesh_prediction_error_tokens",
    "Cached tokens as the pod reports them less those predicted.",
    "model",
    bounds=ERROR_TOKENS,
)

# what each endpoint was sent
PICKS = counter("kvmesh_picks_total", "Requests sent to each endpoint.", "endpoint")
OPEN_BOOKINGS = gauge("kvmesh_open_bookings", "Exchanges that have not ended.", "endpoint")
POD_RESPONSES = counter(
    "kvmesh_pod_responses_total",
    "Ended exchanges by the pod's status; none: it ended before the pod answered.",
    "endpoint",
    "status",
)
REROUTED = counter(
    "kvmesh_rerouted_picks_total", "Requests that Envoy's retry took to another pod than the one picked.", "endpoint"
)
ENDPOINT_FAILURES = counter(
    "kvmesh_endpoint_failures_total",
    "Requests that an endpoint failed: a 5xx of its own, broken off, or not reached.",
    "endpoint",
)
PREFILL_PROMPTS = counter(
    "kvmesh_prefill_prompts_total",
    "Prompts that a prefill pod could compute, by where they are: remote, local, or fell-back (legs that failed).",
    "where",
)
PREFILL_LEGS = counter(
    "kvmesh_prefill_legs_total", "Requests to prefill pods by how they ended.", "endpoint", "outcome"
)
PREFILL_LEG_SECONDS = histogram(
    "kvmesh_prefill_leg_seconds", "Time from a prefill leg's request to its answer.", bounds=QUEUE_SECONDS
)
PREFILL_RACES = counter(
    "kvmesh_prefill_races_total",
    "Prompts that two prefill pods computed at once, by who was first: first (the better one by its estimate), second, "
    "or none (both failed, or the client left).",
    "winner",
)
PREFILL_RACE_LOST_SECONDS = counter(
    "kvmesh_prefill_race_lost_seconds_total", "Time that legs have taken which lost a race, until they were ended."
)
PREFILL_RACE_LOST_TOKENS = counter(
    "kvmesh_prefill_race_lost_tokens_total",
    "Prompt tokens that legs have computed which lost a race; of one that was ended early by the time that it had.",
)
KV_LINK_RATE = gauge(
    "kvmesh_kv_link_bytes_per_second",
    "How fast caches come to a decode pod from others, each by itself, by what it reports of late.",
    "endpoint",
)
ENDPOINT_FULL = counter("kvmesh_endpoint_full_answers_total", "503 of an endpoint itself: it has no room.", "endpoint")
FINDING = gauge(
    "kvmesh_extproc_finding",
    "1 while something is wrong with an endpoint although nothing has failed (docs/reference/findings.md).",
    "reason",
    "endpoint",
    over=Over.EACH,
)
MODEL_FINDING = gauge(
    "kvmesh_extproc_model_finding",
    "1 while a model's tokens or predictions are wrong, or it is routed on text only (docs/reference/findings.md).",
    "reason",
    "model",
    over=Over.EACH,
)

# the endpoints as the picker sees them
ENDPOINT_INFO = gauge("kvmesh_endpoint_info", "1 for each endpoint, with its role.", "endpoint", "role", over=Over.EACH)
ENDPOINT_STATE = gauge(
    "kvmesh_endpoint_state", "1 for the state that an endpoint is in.", "endpoint", "state", over=Over.EACH
)
ENDPOINT_REPORTING = gauge(
    "kvmesh_endpoint_reporting",
    "1 while an endpoint's last report is fresh enough to be believed.",
    "endpoint",
    over=Over.EACH,
)
ENDPOINT_WANTS_KEY = gauge(
    "kvmesh_endpoint_wants_key",
    "1 while an endpoint does not list its models for want of a key, or of the right one (401, 403; --pod-key-file).",
    "endpoint",
    over=Over.EACH,
)
ENDPOINT_WAITING = gauge(
    "kvmesh_endpoint_waiting_requests",
    "Requests that wait for their turn at the endpoint, as it reports.",
    "endpoint",
    over=Over.EACH,
)
ENDPOINT_FETCHING = gauge(
    "kvmesh_endpoint_fetching_requests",
    "Requests that wait there for a cache that is on its way, which is no queue, as it reports.",
    "endpoint",
    over=Over.EACH,
)
ENDPOINT_RUNNING = gauge(
    "kvmesh_endpoint_running_requests",
    "Requests that run at the endpoint, as it reports.",
    "endpoint",
    over=Over.EACH,
)
ENDPOINT_KV_USAGE = gauge(
    "kvmesh_endpoint_kv_usage_ratio",
    "Share of an endpoint's cache blocks in use (0 to 1), as it reports.",
    "endpoint",
    over=Over.EACH,
)
ENDPOINT_REPORT_AGE = gauge(
    "kvmesh_endpoint_report_age_seconds", "Age of an endpoint's last report.", "endpoint", over=Over.EACH
)
ENDPOINT_HIT_TOKENS = counter(
    "kvmesh_endpoint_prefix_hit_tokens_total",
    "Prompt tokens that an endpoint found in its cache since it started.",
    "endpoint",
    over=Over.EACH,
)
ENDPOINT_QUERY_TOKENS = counter(
    "kvmesh_endpoint_prefix_query_tokens_total",
    "Prompt tokens that an endpoint looked for in its cache since it started.",
    "endpoint",
    over=Over.EACH,
)
KV_FETCHED_BYTES = counter(
    "kvmesh_endpoint_kv_fetched_bytes_total",
    "Bytes that an endpoint has fetched of other pods' caches since it started; of those that have fetched any.",
    "endpoint",
    "role",
    over=Over.EACH,
)
KV_FETCH_SECONDS = counter(
    "kvmesh_endpoint_kv_fetch_seconds_total",
    "Time of an endpoint's fetches since it started, of all together, which may be under way at the same time.",
    "endpoint",
    "role",
    over=Over.EACH,
)
ENDPOINT_PACE = gauge(
    "kvmesh_endpoint_prefill_seconds_per_token",
    "What a prompt token costs at an endpoint, as learned from its reports.",
    "endpoint",
    over=Over.EACH,
)
ENDPOINT_STREAM = gauge(
    "kvmesh_endpoint_stream_seconds",
    "What one more stream adds to the inter-token time at an endpoint, as learned from its reports.",
    "endpoint",
    over=Over.EACH,
)
ENDPOINT_NEXT_STREAM = gauge(
    "kvmesh_endpoint_next_stream_inter_token_seconds",
    "Expected inter-token time at an endpoint once it runs one stream more, as learned from its reports.",
    "endpoint",
    over=Over.EACH,
)
ENDPOINT_PREEMPTIONS = counter(
    "kvmesh_endpoint_preemptions_total",
    "Streams that the endpoint has pushed back since it started, as it reports.",
    "endpoint",
    over=Over.EACH,
)
ESTIMATE_BIAS = gauge(
    "kvmesh_ttft_estimate_bias_seconds",
    "Mean of expected less real TTFT, lately; above 0: too pessimistic.",
    "endpoint",
    over=Over.EACH,
)
ESTIMATE_ERROR = gauge(
    "kvmesh_ttft_estimate_error_seconds",
    "Mean distance between the expected and the real time to the first token, lately.",
    "endpoint",
    over=Over.EACH,
)
TTFT = histogram(
    "kvmesh_ttft_seconds",
    "Time to the first token as the pods measure it, by their model name and role, since this picker saw them first.",
    "model",
    "role",
    bounds=TTFT_SECONDS,
    over=Over.EACH,
)
INTER_TOKEN = histogram(
    "kvmesh_inter_token_seconds",
    "Time from one token to the next as the pods measure it, by their model name and role, since this picker saw them "
    "first.",
    "model",
    "role",
    bounds=INTER_TOKEN_SECONDS,
    over=Over.EACH,
)

# models, as clients ask for them, and the arms of their splits
MODEL_REQUESTS = counter(
    "kvmesh_model_requests_total",
    "Ended exchanges by model as the client asked for it, arm of its split, and the pod's status.",
    "model",
    "arm",
    "status",
)
MODEL_REQUEST_SECONDS = histogram(
    "kvmesh_model_request_seconds",
    "Time from the pick to the end of the exchange, by model as the client asked for it and arm.",
    "model",
    "arm",
    bounds=TTFT_SECONDS,
)
MODEL_FIRST_TOKEN_SECONDS = histogram(
    "kvmesh_model_first_token_seconds",
    "Time from the pick to the first bytes of a stream's body, of those that were read (a sample).",
    "model",
    "arm",
    bounds=TTFT_SECONDS,
)
MODEL_PROMPT_TOKENS = counter(
    "kvmesh_model_prompt_tokens_total", "Tokens of routed prompts, by model and arm.", "model", "arm"
)
MODEL_PREDICTED_TOKENS = counter(
    "kvmesh_model_predicted_cached_tokens_total",
    "Prompt tokens that the endpoint was expected to hold, by model and arm.",
    "model",
    "arm",
)
MODEL_GENERATED_TOKENS = counter(
    "kvmesh_model_generated_tokens_total",
    "Generated tokens of the responses whose usage was read (a sample), by model and arm.",
    "model",
    "arm",
)
MODEL_USAGES = counter("kvmesh_model_usages_total", "Responses whose usage was read, by model and arm.", "model", "arm")
# models as they are served
EXPECTED_TTFT = histogram(
    "kvmesh_expected_ttft_seconds",
    "Time to the first token that each pick expected at its endpoint, by model as it is served.",
    "model",
    bounds=TTFT_SECONDS,
)
SAVED_SECONDS = counter(
    "kvmesh_saved_prefill_seconds_total",
    "What computing the predicted cached tokens would have taken, at the endpoint's learned pace.",
    "model",
)
REALISED_SAVED_SECONDS = counter(
    "kvmesh_realised_saved_prefill_seconds_total",
    "What computing the tokens that pods found cached would have taken, of compared responses (a sample).",
    "model",
)
SAVED_MONEY = counter(
    "kvmesh_saved_money_total",
    "kvmesh_saved_prefill_seconds_total at the price of a GPU hour in the policy of that time.",
    "model",
    "currency",
)
GPU_HOUR_PRICE = gauge(
    "kvmesh_gpu_hour_price", "Price of an endpoint's hour in the policy.", "currency", over=Over.EACH
)

# admission
ADMITTED = counter("kvmesh_admitted_requests_total", "Requests sent to an endpoint, by priority class.", "class")
SHED = counter("kvmesh_shed_requests_total", "Requests refused for load, by class and reason.", "class", "reason")
IGNORED_OBJECTIVES = counter(
    "kvmesh_ignored_objectives_total",
    "Requests whose objective header did not count: unknown to the policy, or not trusted to raise.",
    "why",
)
QUEUED = gauge("kvmesh_queued_requests", "Requests that wait for room at an endpoint.", "class")
QUEUE_LEFT = counter("kvmesh_queue_left_total", "Requests that left the queue, by class and how.", "class", "outcome")
QUEUE_WAITS = histogram(
    "kvmesh_queue_seconds",
    "Time that requests spent in the queue, however it ended.",
    "class",
    bounds=QUEUE_SECONDS,
)
PROMISE_HELD = counter(
    "kvmesh_inter_token_held_picks_total",
    "Picks that a promised inter-token time has kept from an endpoint, each once, by class and how: elsewhere (another "
    "endpoint had room), or no-room (none had when it was looked for).",
    "class",
    "how",
)
FIRST_POD_WAITING = gauge(
    "kvmesh_first_pod_waiting_requests", "Requests that wait for the first pod of a pool without a ready one.", "class"
)
FIRST_POD_WAITS = counter(
    "kvmesh_first_pod_waits_total",
    "Requests that have waited for a pool's first pod, by class and how.",
    "class",
    "outcome",
)
FIRST_POD_SECONDS = histogram(
    "kvmesh_first_pod_seconds",
    "Time that requests waited for a pool's first pod and for room at it, however it ended.",
    "class",
    bounds=FIRST_POD_BOUNDS,
)
STEP_CHANGES = counter(
    "kvmesh_degradation_changes_total",
    "Steps of degradation that were entered or left.",
    "class",
    "step",
    "change",
)
STEPS = gauge("kvmesh_degradation_step", "1 while a step is in force.", "class", "step", over=Over.EACH)
SHADOW = gauge(
    "kvmesh_shadow", "1: the policy only counts what it would refuse, degrade, offload or scale.", over=Over.EACH
)
SHADOW_DECISIONS = counter(
    "kvmesh_shadow_decisions_total",
    "What a policy in shadow would have done to requests that were sent on instead; several may be of one request.",
    "class",
    "rule",
    "action",
    "reason",
)
SHADOW_REFUSED = counter(
    "kvmesh_shadow_refused_requests_total",
    "Requests that a policy in shadow would have refused, by the first reason.",
    "class",
    "reason",
)
SHADOW_STEPS = gauge(
    "kvmesh_shadow_degradation_step", "1 while a step would be in force.", "class", "step", over=Over.EACH
)
SHADOW_QUOTA_REFUSALS = counter(
    "kvmesh_shadow_tenant_quota_refusals_total",
    "Requests that a quota in shadow would have refused, by the tenant that it names and its limit.",
    "tenant",
    "limit",
)
CLASS_TARGET = gauge(
    "kvmesh_class_ttft_target_seconds",
    "Time to the first token that the policy promises a class.",
    "class",
    over=Over.EACH,
)
CLASS_INTER_TOKEN_TARGET = gauge(
    "kvmesh_class_inter_token_target_seconds",
    "Mean time from one token to the next that the policy promises a class.",
    "class",
    over=Over.EACH,
)
CLASS_PRIORITY = gauge("kvmesh_class_priority", "A class's priority; higher ones go first.", "class", over=Over.EACH)

# what is promised, and what came true
SLO_OBJECTIVE = gauge(
    "kvmesh_slo_objective_ratio",
    "Share of a class's requests that are to be within all targets (attainment).",
    "class",
    over=Over.EACH,
)
SLO_SAMPLE_SHARE = gauge(
    "kvmesh_slo_sample_ratio", "Share of the answers that are read and judged; 0: no promise is judged.", over=Over.EACH
)
SLO_PROMISED = counter(
    "kvmesh_slo_promised_requests_total",
    "Requests for text that were sent on or refused for want of room, judged or not.",
    "class",
)
SLO_JUDGED = counter(
    "kvmesh_slo_judged_requests_total",
    "Requests of a class that were judged: the sample's size, each counted once.",
    "class",
)
SLO_REQUESTS = counter(
    "kvmesh_slo_requests_total",
    "Requests by what became of a target (ttft, inter-token, all): met, late, refused, failed. An answer of the sample "
    "counts for all that it stands for. The promise is the class's, or what the request's own headers ask for.",
    *("class", "tenant", "model", "role", "target", "promise", "outcome"),
)
SLO_HEADERS_IGNORED = counter(
    "kvmesh_ignored_slo_headers_total",
    "Headers with targets that did not count: unreadable, or looser than what the class is promised.",
    "why",
)
SLO_POD_OBSERVED = counter(
    "kvmesh_slo_pod_observations_total",
    "First tokens (ttft), or times from token to token, that pods have measured, by their model name and role; the "
    "same for every class.",
    *("class", "model", "role", "target"),
    over=Over.EACH,
)
SLO_POD_WITHIN = counter(
    "kvmesh_slo_pod_observations_within_total",
    "Those of kvmesh_slo_pod_observations_total within a class's target: an estimate by interpolation in the bucket, "
    "with the least and the most that the bucket allows.",
    *("class", "model", "role", "target", "bound"),
    over=Over.EACH,
)

CLASS_PROMPT_TOKENS = counter(
    "kvmesh_class_prompt_tokens_total",
    "Prompt tokens that came, by class: cached or uncached where they went, as expected; refused ones as many as the "
    "class's average request has uncached.",
    "class",
    "part",
)

# tenants and quotas
TENANT_REQUESTS = counter(
    "kvmesh_tenant_requests_total",
    "Requests by tenant (named in a quota of the policy; none, other), class, and what became of them: admitted, or "
    "shed for load.",
    "tenant",
    "class",
    "outcome",
)
TENANT_PROMPT_TOKENS = counter("kvmesh_tenant_prompt_tokens_total", "Tokens of routed prompts, by tenant.", "tenant")
TENANT_PREDICTED_TOKENS = counter(
    "kvmesh_tenant_predicted_cached_tokens_total",
    "Prompt tokens that the endpoint was expected to hold, by tenant.",
    "tenant",
)
TENANT_QUEUE_SECONDS = counter(
    "kvmesh_tenant_queue_seconds_total", "Time that requests spent in the queue, by tenant.", "tenant"
)
QUOTA_DECISIONS = counter(
    "kvmesh_quota_decisions_total",
    "Requests decided on by a quota: allowed, or the limit that refused; shared, or by a share (local).",
    "outcome",
    "source",
)
TENANT_QUOTA_DECISIONS = counter(
    "kvmesh_tenant_quota_decisions_total",
    "Requests decided on by a quota, by the tenant that it names; other: quotas for each tenant by itself.",
    "tenant",
    "outcome",
)
QUOTA_WRITES_FAILING = gauge(
    "kvmesh_quota_writes_failing",
    "1 while what requests have used cannot be written to Redis.",
    over=Over.EACH,
)
QUOTA_OPEN_REQUESTS = gauge("kvmesh_quota_open_requests", "Open requests here that have a quota.")

# the index, records, the process
INDEX_PROBLEM = gauge(
    "kvmesh_index_problem", "1 while the last lookup could not rely on the prefix index.", over=Over.EACH
)
LOOKUP_BLOCKS = counter(
    "kvmesh_index_lookup_blocks_total",
    "Blocks that were looked up: asked of Redis, or known here because Redis tells of changes.",
    "source",
)
TRACKED_BLOCKS = gauge("kvmesh_index_tracked_blocks", "Blocks whose changes Redis tells this replica of.")
ACCESS_LOG_LINES = counter(
    "kvmesh_access_log_lines_total",
    "Lines of the access log by target (stdout, file, stream): written, or dropped because it was too slow.",
    "target",
    "outcome",
)
TRACE_SPANS = counter(
    "kvmesh_trace_spans_total",
    "Spans by what became of them: exported, or dropped because the collector did not take them.",
    "outcome",
)
POD_KEY_UNUSABLE = gauge(
    "kvmesh_pod_key_unusable",
    "1 while the file of --pod-key-file cannot be used: pods are shown the last good key.",
    over=Over.EACH,
)
READY = gauge(
    "kvmesh_ready",
    "1 while traffic may come, 0 before the start is done and while stopping.",
    over=Over.EACH,
)

_OWN = tuple(each for each in tuple(vars().values()) if isinstance(each, Metric) and each is not BUILD)
METRICS = (BUILD, *_OWN, *scale_metrics.METRICS)

if __name__ == "__main__":
    sys.stdout.write(metrics_table(METRICS))
