"""The dashboard for every day: what is served, how fast, what the cache saves, and whether anything is wrong."""

from extproc.install.dashboards.panels import (
    IN_POOL,
    POOL,
    Dashboard,
    Kind,
    Panel,
    Query,
    Row,
    Unit,
    per_second,
    quantile,
    quantiles,
)

_ALL, _ROUTED = (
    per_second("kvmesh_decisions_total"),
    per_second("kvmesh_decisions_total", where=f'{IN_POOL}, outcome="routed"'),
)
_PROMPTS = per_second("kvmesh_prompt_tokens_total")

GLANCE = Row(
    title="At a glance",
    panels=(
        Panel(
            title="Requests",
            says="Requests that asked the picker for an endpoint, refused ones included.",
            queries=(Query(expr=_ALL),),
            unit=Unit.REQUESTS_A_SECOND,
            kind=Kind.NUMBER,
            width=3,
            height=4,
        ),
        Panel(
            title="Sent to a pod",
            says="Share of the requests that got an endpoint; the others were refused, see Outcomes below.",
            queries=(Query(expr=f"{_ROUTED} / {_ALL}"),),
            unit=Unit.SHARE,
            kind=Kind.NUMBER,
            width=3,
            height=4,
            yellow=0.99,
            red=0.95,
        ),
        Panel(
            title="Found in caches",
            says="Share of prompt tokens that the picked pods were expected to hold: work that was not done again.",
            queries=(Query(expr=f"{per_second('kvmesh_predicted_cached_tokens_total')} / {_PROMPTS}"),),
            unit=Unit.SHARE,
            kind=Kind.NUMBER,
            width=3,
            height=4,
        ),
        Panel(
            title="Pods that report",
            says="Endpoints whose report is fresh enough to be believed.",
            queries=(Query(expr=f"sum(max by (endpoint) (kvmesh_endpoint_reporting{{{IN_POOL}}}))"),),
            kind=Kind.NUMBER,
            width=3,
            height=4,
        ),
        Panel(
            title="Waiting",
            says="Requests that wait at the pickers for room at an endpoint.",
            queries=(Query(expr=f"sum(kvmesh_queued_requests{{{IN_POOL}}})"),),
            kind=Kind.NUMBER,
            width=3,
            height=4,
            yellow=1,
            red=100,
        ),
        Panel(
            title="Picks without an input",
            says="Share of the picks that had to do without the index, a report or the prompt's tokens.",
            queries=(
                Query(
                    expr=f"(sum(rate(kvmesh_degraded_decisions_total{{{IN_POOL}}}[$__rate_interval])) or vector(0))"
                    f" / {_ROUTED}"
                ),
            ),
            unit=Unit.SHARE,
            kind=Kind.NUMBER,
            width=3,
            height=4,
            yellow=0.01,
            red=0.1,
        ),
        Panel(
            title="Findings",
            says="What is wrong although nothing has failed; docs/findings.md says what to do.",
            queries=(
                Query(
                    expr="count(max by (reason, endpoint) (kvmesh_indexer_finding) == 1 or max by (reason, endpoint) "
                    f"(kvmesh_extproc_finding{{{IN_POOL}}}) == 1 or max by (reason, model) "
                    f"(kvmesh_extproc_model_finding{{{IN_POOL}}}) == 1) or vector(0)"
                ),
            ),
            kind=Kind.NUMBER,
            width=3,
            height=4,
            yellow=1,
            red=5,
        ),
        Panel(
            title="Replicas ready",
            says="Pickers and indexers that say that they are ready.",
            queries=(
                Query(expr="sum(max by (instance) (kvmesh_ready))", legend="pickers"),
                Query(expr="sum(kvmesh_indexer_ready)", legend="indexers"),
            ),
            kind=Kind.NUMBER,
            width=3,
            height=4,
        ),
    ),
)

TRAFFIC = Row(
    title="Traffic",
    panels=(
        Panel(
            title="Outcomes",
            says="What became of requests: routed, or the reason of the refusal.",
            queries=(Query(expr=per_second("kvmesh_decisions_total", "outcome"), legend="{{outcome}}"),),
            unit=Unit.REQUESTS_A_SECOND,
            stacked=True,
        ),
        Panel(
            title="Picks by endpoint",
            says="Where requests were sent. Cache-aware routing is meant to be uneven; one line alone is not.",
            queries=(Query(expr=per_second("kvmesh_picks_total", "endpoint"), legend="{{endpoint}}"),),
            unit=Unit.REQUESTS_A_SECOND,
            stacked=True,
        ),
        Panel(
            title="Answers of the pods",
            says="Ended exchanges by the pod's status; none: the exchange ended before the pod had answered.",
            queries=(Query(expr=per_second("kvmesh_pod_responses_total", "status"), legend="{{status}}"),),
            unit=Unit.REQUESTS_A_SECOND,
            stacked=True,
        ),
    ),
)

USERS = Row(
    title="What users feel, from the pods' own histograms",
    panels=(
        Panel(
            title="Time to the first token",
            says="By model and role: where prefill and decode run apart, a prefill pod's share and a decode pod's.",
            queries=quantiles("kvmesh_ttft_seconds", "model", "role"),
            unit=Unit.SECONDS,
            width=12,
        ),
        Panel(
            title="Time between tokens",
            says="By model and role. Rises with the number of sequences that a pod decodes at one time.",
            queries=quantiles("kvmesh_inter_token_seconds", "model", "role"),
            unit=Unit.SECONDS,
            width=12,
        ),
        Panel(
            title="First token: expected beside real",
            says="What picks expected, and what pods measured. Far apart: shedding and waits go by wrong numbers.",
            queries=(
                Query(expr=quantile(0.5, "kvmesh_expected_ttft_seconds", "model"), legend="expected p50 {{model}}"),
                Query(expr=quantile(0.5, "kvmesh_ttft_seconds", "model"), legend="real p50 {{model}}"),
                Query(expr=quantile(0.95, "kvmesh_expected_ttft_seconds", "model"), legend="expected p95 {{model}}"),
                Query(expr=quantile(0.95, "kvmesh_ttft_seconds", "model"), legend="real p95 {{model}}"),
            ),
            unit=Unit.SECONDS,
            width=12,
        ),
        Panel(
            title="Load of the pods",
            says="Requests that each reports as running and as waiting.",
            queries=(
                Query(
                    expr=f"max by (endpoint) (kvmesh_endpoint_running_requests{{{IN_POOL}}})",
                    legend="{{endpoint}} running",
                ),
                Query(
                    expr=f"max by (endpoint) (kvmesh_endpoint_waiting_requests{{{IN_POOL}}})",
                    legend="{{endpoint}} waiting",
                ),
            ),
            width=12,
        ),
    ),
)

SAVED = Row(
    title="What the cache saves",
    panels=(
        Panel(
            title="Prefill saved in this time",
            says="Seconds of prefill that were not needed: tokens expected in caches at the pace of the pod picked. "
            "With several GPUs a pod, GPU seconds are as many times more.",
            queries=(Query(expr=f"sum(increase(kvmesh_saved_prefill_seconds_total{{{IN_POOL}}}[$__range]))"),),
            unit=Unit.SECONDS,
            kind=Kind.NUMBER,
            width=4,
        ),
        Panel(
            title="Money saved in this time",
            says="The same at the price of a GPU hour of the policy (observability.gpuHourPrice); empty without.",
            queries=(
                Query(
                    expr=f"sum by (currency) (increase(kvmesh_saved_money_total{{{IN_POOL}}}[$__range]))",
                    legend="{{currency}}",
                ),
            ),
            kind=Kind.NUMBER,
            width=4,
        ),
        Panel(
            title="Prefill saved, second by second",
            says="1: the caches do the work of one pod that computes prompts all the time. By model.",
            queries=(Query(expr=per_second("kvmesh_saved_prefill_seconds_total", "model"), legend="{{model}}"),),
            unit=Unit.PLAIN,
            stacked=True,
            width=16,
        ),
        Panel(
            title="Prompt tokens",
            width=12,
            says="All tokens of routed prompts, those expected in the picked pod's cache, those given up: "
            "held by another pod that was too busy.",
            queries=(
                Query(expr=_PROMPTS, legend="all"),
                Query(expr=per_second("kvmesh_predicted_cached_tokens_total"), legend="expected in the cache"),
                Query(expr=per_second("kvmesh_regret_tokens_total"), legend="given up for load"),
            ),
            unit=Unit.A_SECOND,
        ),
        Panel(
            title="Found beside predicted, by model",
            width=12,
            says="Share of prompt tokens that the pods found in their caches, as their responses say, beside the "
            "prediction. Apart from each other: the index does not tell the truth.",
            queries=(
                Query(
                    expr=f"{per_second('kvmesh_realised_cached_tokens_total', 'model')} / "
                    f"{per_second('kvmesh_realised_prompt_tokens_total', 'model')}",
                    legend="found {{model}}",
                ),
                Query(
                    expr=f"{per_second('kvmesh_realised_predicted_tokens_total', 'model')} / "
                    f"{per_second('kvmesh_realised_prompt_tokens_total', 'model')}",
                    legend="predicted {{model}}",
                ),
            ),
            unit=Unit.SHARE,
        ),
    ),
)

ARMS = Row(
    title="Splits: arm beside arm",
    panels=(
        Panel(
            title="Requests by arm",
            says="Ended exchanges by the model that clients asked for and the arm that they got.",
            queries=(
                Query(expr=per_second("kvmesh_model_requests_total", "model", "arm"), legend="{{model}} → {{arm}}"),
            ),
            unit=Unit.REQUESTS_A_SECOND,
        ),
        Panel(
            title="Errors by arm",
            says="Share of an arm's exchanges that did not end with 2xx.",
            queries=(
                Query(
                    expr="1 - "
                    + per_second("kvmesh_model_requests_total", "model", "arm", where=f'{IN_POOL}, status="2xx"')
                    + " / "
                    + per_second("kvmesh_model_requests_total", "model", "arm"),
                    legend="{{model}} → {{arm}}",
                ),
            ),
            unit=Unit.SHARE,
        ),
        Panel(
            title="Time of a request, by arm (p50, p95)",
            says="The whole exchange as the picker saw it.",
            queries=(
                Query(
                    expr=quantile(0.5, "kvmesh_model_request_seconds", "model", "arm"), legend="p50 {{model}} → {{arm}}"
                ),
                Query(
                    expr=quantile(0.95, "kvmesh_model_request_seconds", "model", "arm"),
                    legend="p95 {{model}} → {{arm}}",
                ),
            ),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="First token, by arm (p95)",
            says="From the pick to the first bytes of the body, of the streamed responses that were read: a sample.",
            queries=(
                Query(
                    expr=quantile(0.95, "kvmesh_model_first_token_seconds", "model", "arm"),
                    legend="{{model}} → {{arm}}",
                ),
            ),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="Cached share, by arm",
            says="Share of an arm's prompt tokens that were expected in the picked pod's cache.",
            queries=(
                Query(
                    expr=f"{per_second('kvmesh_model_predicted_cached_tokens_total', 'model', 'arm')} / "
                    f"{per_second('kvmesh_model_prompt_tokens_total', 'model', 'arm')}",
                    legend="{{model}} → {{arm}}",
                ),
            ),
            unit=Unit.SHARE,
        ),
        Panel(
            title="Tokens an answer, by arm",
            says="Generated tokens of the responses whose usage was read: a sample. An arm that says more costs more.",
            queries=(
                Query(
                    expr=f"{per_second('kvmesh_model_generated_tokens_total', 'model', 'arm')} / "
                    f"{per_second('kvmesh_model_usages_total', 'model', 'arm')}",
                    legend="{{model}} → {{arm}}",
                ),
            ),
        ),
    ),
)

PICKER = Row(
    title="The picker",
    panels=(
        Panel(
            title="Time of a pick, by phase (p99)",
            says="What the picker adds to a request: reading it, tokens, the lookup in Redis, the decision, the queue.",
            queries=(Query(expr=quantile(0.99, "kvmesh_pick_phase_seconds", "phase"), legend="{{phase}}"),),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="Inputs that were missing",
            says="Picks that did without one of their inputs, by its name (docs/picking.md). The request was served.",
            queries=(Query(expr=per_second("kvmesh_degraded_decisions_total", "missing"), legend="{{missing}}"),),
            unit=Unit.REQUESTS_A_SECOND,
            stacked=True,
        ),
        Panel(
            title="CPU",
            says="Cores that each replica uses. A picker is one process and can use one.",
            queries=(
                Query(
                    expr='rate(process_cpu_seconds_total{job=~"kvmesh-.*"}[$__rate_interval])',
                    legend="{{job}} {{instance}}",
                ),
            ),
            unit=Unit.COUNT,
        ),
    ),
)

OVERVIEW = Dashboard(
    uid="kvmesh-overview",
    title="kvmesh / Overview",
    says=__doc__,
    variables=(POOL,),
    rows=(GLANCE, TRAFFIC, USERS, SAVED, ARMS, PICKER),
)
