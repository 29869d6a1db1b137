"""The dashboard of a single pod: what it is sent, what it answers, what the index believes of it, what it says itself.

The last row is vLLM's own metrics: Prometheus must scrape the pods, with the pod's address as `instance` (its default).
"""

from extproc.install.dashboards.panels import Dashboard, Kind, Panel, Query, Row, Unit, Variable, per_second, quantile

ENDPOINT = Variable(
    name="endpoint", label="Endpoint", values="label_values(kvmesh_open_bookings, endpoint)", has_all=False
)
_HERE, _VLLM = 'endpoint="$endpoint"', 'instance="$endpoint"'
_PICKS = per_second("kvmesh_picks_total", where=_HERE)

SENT = Row(
    title="What it is sent",
    panels=(
        Panel(
            title="Picks",
            says="Requests that were sent here, and those that Envoy's retries took elsewhere.",
            queries=(
                Query(expr=_PICKS, legend="picked"),
                Query(expr=per_second("kvmesh_rerouted_picks_total", where=_HERE), legend="rerouted"),
            ),
            unit=Unit.REQUESTS_A_SECOND,
        ),
        Panel(
            title="Share of all picks",
            says="An even share is 1 ÷ pods. Much more: it holds what everybody asks for.",
            queries=(
                Query(
                    expr=f"{_PICKS} / {per_second('kvmesh_picks_total', where='')}",
                    legend="share",
                ),
            ),
            unit=Unit.SHARE,
        ),
        Panel(
            title="Open exchanges",
            says="Requests that were sent here and have not ended, over all pickers.",
            queries=(Query(expr=f"sum(kvmesh_open_bookings{{{_HERE}}})", legend="open"),),
        ),
        Panel(
            title="Answers",
            says="By status; none: the exchange ended before the pod had answered.",
            queries=(Query(expr=per_second("kvmesh_pod_responses_total", "status", where=_HERE), legend="{{status}}"),),
            unit=Unit.REQUESTS_A_SECOND,
            stacked=True,
        ),
        Panel(
            title="Failures",
            says="Requests that it failed: a 5xx of its own, broken off, or not reached. It is avoided for a while.",
            queries=(Query(expr=per_second("kvmesh_endpoint_failures_total", where=_HERE), legend="failed"),),
            unit=Unit.REQUESTS_A_SECOND,
        ),
        Panel(
            title="Error of the expected first token",
            says="Mean distance between the expected and the real time to the first token, lately; the bias is above 0 "
            "where more was expected than came.",
            queries=(
                Query(expr=f"max(kvmesh_ttft_estimate_error_seconds{{{_HERE}}})", legend="error"),
                Query(expr=f"max(kvmesh_ttft_estimate_bias_seconds{{{_HERE}}})", legend="bias"),
            ),
            unit=Unit.SECONDS,
        ),
    ),
)

SEEN = Row(
    title="How the pickers see it",
    panels=(
        Panel(
            title="State",
            says="Replicas by the state that they see it in.",
            queries=(Query(expr=f"sum by (state) (kvmesh_endpoint_state{{{_HERE}}})", legend="{{state}}"),),
            stacked=True,
        ),
        Panel(
            title="Age of its report",
            says="Beyond stale_after_seconds the pod counts as unknown, never as idle.",
            queries=(Query(expr=f"max(kvmesh_endpoint_report_age_seconds{{{_HERE}}})", legend="age"),),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="Learned pace of its prefill",
            says="Prompt tokens that it computes in a second, as its reports have shown.",
            queries=(Query(expr=f"1 / max(kvmesh_endpoint_prefill_seconds_per_token{{{_HERE}}})", legend="pace"),),
            unit=Unit.A_SECOND,
        ),
    ),
)

INDEX = Row(
    title="What the index believes of it",
    panels=(
        Panel(
            title="Blocks",
            says="By tier.",
            queries=(
                Query(
                    expr=f"sum by (tier) (max by (dp_rank, tier) (kvmesh_indexer_blocks{{{_HERE}}}))", legend="{{tier}}"
                ),
            ),
            stacked=True,
        ),
        Panel(
            title="Event batches",
            says="Applied, got by replay, and gaps in the sequence.",
            queries=(
                Query(expr=per_second("kvmesh_indexer_batches_total", where=_HERE), legend="applied"),
                Query(expr=per_second("kvmesh_indexer_replayed_batches_total", where=_HERE), legend="replayed"),
                Query(expr=per_second("kvmesh_indexer_gaps_total", where=_HERE), legend="gaps"),
            ),
            unit=Unit.A_SECOND,
        ),
        Panel(
            title="Lag",
            says="Age of the newest batch when it was applied.",
            queries=(
                Query(expr=f"max by (dp_rank) (kvmesh_indexer_lag_seconds{{{_HERE}}})", legend="rank {{dp_rank}}"),
            ),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="State of its streams",
            says="Of each of its streams.",
            queries=(Query(expr=f"max by (dp_rank, state) (kvmesh_indexer_source_state{{{_HERE}}}) == 1"),),
            kind=Kind.TABLE,
            width=12,
            height=6,
        ),
        Panel(
            title="Findings",
            says="What stands; docs/findings.md says what to do. Empty is good.",
            queries=(
                Query(
                    expr=f"max by (reason) (kvmesh_indexer_finding{{{_HERE}}} or kvmesh_extproc_finding{{{_HERE}}})"
                    " == 1"
                ),
            ),
            kind=Kind.TABLE,
            width=12,
            height=6,
        ),
    ),
)


def _vllm(name: str, title: str, says: str, *, unit: Unit = Unit.COUNT) -> Panel:
    """Return a panel of one of vLLM's gauges."""
    return Panel(
        title=title,
        says=says,
        queries=(Query(expr=f"sum by (engine) (vllm:{name}{{{_VLLM}}})", legend="engine {{engine}}"),),
        unit=unit,
    )


ITSELF = Row(
    title="What it says itself (vLLM's metrics)",
    panels=(
        _vllm("num_requests_running", "Running", "Sequences in its batches."),
        _vllm("num_requests_waiting", "Waiting", "Requests in its own queue: the picker means to keep it short."),
        _vllm(
            "kv_cache_usage_perc", "KV cache in use", "Share of its blocks that running requests hold.", unit=Unit.SHARE
        ),
        Panel(
            title="Prompt tokens found in its cache",
            says="Its own count, over all requests, also those that kvmesh did not send.",
            queries=(
                Query(
                    expr=f"{per_second('vllm:prefix_cache_hits_total', where=_VLLM)} / "
                    f"{per_second('vllm:prefix_cache_queries_total', where=_VLLM)}",
                    legend="found",
                ),
            ),
            unit=Unit.SHARE,
        ),
        Panel(
            title="Time to the first token",
            says="As it measures it: without the picker's queue and the network.",
            queries=tuple(
                Query(
                    expr=quantile(share, "vllm:time_to_first_token_seconds", where=_VLLM), legend=f"p{share * 100:.0f}"
                )
                for share in (0.5, 0.95, 0.99)
            ),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="Time between tokens",
            says="As it measures it.",
            queries=tuple(
                Query(
                    expr=quantile(share, "vllm:inter_token_latency_seconds", where=_VLLM), legend=f"p{share * 100:.0f}"
                )
                for share in (0.5, 0.95, 0.99)
            ),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="Tokens",
            says="Prompt tokens that it took in, and tokens that it generated.",
            queries=(
                Query(expr=per_second("vllm:prompt_tokens_total", where=_VLLM), legend="prompt"),
                Query(expr=per_second("vllm:generation_tokens_total", where=_VLLM), legend="generated"),
            ),
            unit=Unit.A_SECOND,
        ),
        Panel(
            title="Preemptions",
            says="Sequences that were thrown out of a full cache and computed again.",
            queries=(Query(expr=per_second("vllm:num_preemptions_total", where=_VLLM), legend="preempted"),),
            unit=Unit.A_SECOND,
        ),
    ),
)

ONE_POD = Dashboard(
    uid="kvmesh-pod",
    title="kvmesh / One pod",
    says="What a single pod is sent, what it answers, what the index believes of it, and what it says itself.",
    variables=(ENDPOINT,),
    rows=(SENT, SEEN, INDEX, ITSELF),
)
