"""The dashboard for whoever asks whether the index tells the truth: predictions, events, sources, and Redis itself."""

from extproc.install.dashboards.panels import (
    POOL,
    Dashboard,
    Kind,
    Panel,
    Query,
    RedisQuery,
    Row,
    Unit,
    per_second,
    quantile,
)

_BLOCKS = "max by (endpoint, dp_rank, tier) (kvmesh_indexer_blocks)"  # every indexer shows all of them

TRUTH = Row(
    title="Does it tell the truth?",
    panels=(
        Panel(
            title="Found beside predicted",
            says="Cached prompt tokens as the pods report them, as a share of those that were predicted. 1: exact. "
            "Below: the index holds what pods have lost. Above: pods hold what the index does not know.",
            queries=(
                Query(
                    expr=f"{per_second('kvmesh_realised_cached_tokens_total', 'model')} / "
                    f"({per_second('kvmesh_realised_predicted_tokens_total', 'model')} > 0)",
                    legend="{{model}}",
                ),
            ),
            unit=Unit.COUNT,
        ),
        Panel(
            title="Error of a prediction, tokens",
            says="Cached tokens as the pod reports them less those predicted, one request at a time.",
            queries=tuple(
                Query(
                    expr=quantile(share, "kvmesh_prediction_error_tokens", "model"),
                    legend=f"p{share * 100:.0f} {{{{model}}}}",
                )
                for share in (0.05, 0.5, 0.95)
            ),
            unit=Unit.COUNT,
        ),
        Panel(
            title="Hits given up for load",
            says="Share of the tokens that some pod held where another one was picked: the holder was too busy.",
            queries=(
                Query(
                    expr=f"{per_second('kvmesh_regret_tokens_total')} / ({per_second('kvmesh_regret_tokens_total')} + "
                    f"{per_second('kvmesh_predicted_cached_tokens_total')})",
                    legend="given up",
                ),
            ),
            unit=Unit.SHARE,
        ),
    ),
)

EVENTS = Row(
    title="Events",
    panels=(
        Panel(
            title="Events by type",
            says="What pods tell of their caches. Nothing at all while prompts are served: see the finding no-events.",
            queries=(Query(expr=per_second("kvmesh_indexer_events_total", "type", where=""), legend="{{type}}"),),
            unit=Unit.A_SECOND,
        ),
        Panel(
            title="Age of an event when it was applied",
            says="Over all streams: how fresh the index is.",
            queries=tuple(
                Query(expr=quantile(share, "kvmesh_indexer_event_lag_seconds", where=""), legend=f"p{share * 100:.0f}")
                for share in (0.5, 0.95, 0.99)
            ),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="Lag",
            says="Age of the newest batch when it was applied, by endpoint: how far the index is behind the pod.",
            queries=(Query(expr="max by (endpoint) (kvmesh_indexer_lag_seconds)", legend="{{endpoint}}"),),
            unit=Unit.SECONDS,
            yellow=1,
            red=5,
        ),
        Panel(
            title="Left out",
            says="Events that could not be understood, and those that were understood and are not in the index.",
            queries=(
                Query(
                    expr=per_second("kvmesh_indexer_decode_errors_total", "reason", where=""),
                    legend="not understood: {{reason}}",
                ),
                Query(
                    expr=per_second("kvmesh_indexer_events_not_indexed_total", "reason", where=""),
                    legend="not indexed: {{reason}}",
                ),
            ),
            unit=Unit.A_SECOND,
        ),
        Panel(
            title="Batches by endpoint",
            says="Event batches that were applied.",
            queries=(
                Query(expr=per_second("kvmesh_indexer_batches_total", "endpoint", where=""), legend="{{endpoint}}"),
            ),
            unit=Unit.A_SECOND,
        ),
        Panel(
            title="Gaps and replays",
            says="Holes in a pod's sequence, and batches that were got again from its replay buffer.",
            queries=(
                Query(expr=per_second("kvmesh_indexer_gaps_total", where=""), legend="gaps"),
                Query(expr=per_second("kvmesh_indexer_replayed_batches_total", where=""), legend="replayed batches"),
            ),
            unit=Unit.A_SECOND,
        ),
    ),
)

SOURCES = Row(
    title="Sources",
    panels=(
        Panel(
            title="Streams by state",
            says="live: exact. replaying: catches up. degraded: true as far as it goes. lost: nobody hears the pod.",
            queries=(
                Query(
                    expr="sum by (state) (max by (endpoint, dp_rank, state) (kvmesh_indexer_source_state))",
                    legend="{{state}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            title="Blocks by endpoint and tier",
            says="Blocks that the index believes each pod to hold.",
            queries=(Query(expr=f"sum by (endpoint, tier) ({_BLOCKS})", legend="{{endpoint}} {{tier}}"),),
            stacked=True,
        ),
        Panel(
            title="Copies of a block",
            says="Blocks that all pods hold together ÷ different blocks (the keys in Redis). 1: nothing is held twice; "
            "rises where a prefix is spread over pods, by choice or for want of room. Keys are counted every ten "
            "seconds: a short peak is only that.",
            queries=(Query(expr=f"sum({_BLOCKS}) / max(kvmesh_indexer_redis_keys)", legend="copies"),),
        ),
        Panel(
            title="Findings",
            says="What stands, by reason and endpoint; docs/findings.md says what to do. Empty is good.",
            queries=(Query(expr="max by (reason, endpoint) (kvmesh_indexer_finding) == 1"),),
            kind=Kind.TABLE,
        ),
    ),
)

REDIS = Row(
    title="Redis, asked itself",
    panels=(
        Panel(
            title="Memory",
            says="used_memory beside maxmemory (0: no limit). A full Redis refuses stores; it must never evict.",
            queries=(RedisQuery(command=("info", "memory"), fields=("used_memory", "used_memory_peak", "maxmemory")),),
            unit=Unit.BYTES,
            kind=Kind.NUMBER,
            width=9,
            height=4,
        ),
        Panel(
            title="Keys",
            says="All keys of this database; nearly all are blocks.",
            queries=(RedisQuery(command=("dbsize",)),),
            kind=Kind.NUMBER,
            width=3,
            height=4,
        ),
        Panel(
            title="Work",
            says="Commands a second, and keys that were evicted: one is too many.",
            queries=(
                RedisQuery(
                    command=("info", "stats"),
                    fields=("instantaneous_ops_per_sec", "evicted_keys", "rejected_connections"),
                ),
            ),
            kind=Kind.NUMBER,
            width=9,
            height=4,
        ),
        Panel(
            title="Last beat",
            says="Redis' unix seconds when an indexer last wrote; nothing: no indexer has been able to for 5 s.",
            queries=(RedisQuery(command=("get", "{kv2}heartbeat")),),
            unit=Unit.PLAIN,
            kind=Kind.NUMBER,
            width=3,
            height=4,
        ),
        Panel(
            title="Sources in the registry",
            says="Slot by slot: whose blocks, which tier, which epoch, and whether it is being swept.",
            queries=(RedisQuery(command=("hgetall", "{kv2}slots")),),
            kind=Kind.TABLE,
            width=12,
        ),
        Panel(
            title="Indexers",
            says="Who is alive until when, and which streams each could follow.",
            queries=(RedisQuery(command=("hgetall", "{kv2}indexers")),),
            kind=Kind.TABLE,
            width=12,
        ),
        Panel(
            title="Where Redis spends its time",
            says="Calls and microseconds by command: mget is the pickers' lookups, evalsha the indexers' writes.",
            queries=(RedisQuery(command=("info", "commandstats")),),
            kind=Kind.TABLE,
            width=12,
        ),
        Panel(
            title="Registry",
            says="The version grows with each change of a source's state; epochs and fences are the last ones given.",
            queries=(RedisQuery(command=("hgetall", "{kv2}registry")),),
            kind=Kind.TABLE,
            width=12,
        ),
    ),
)

LINK = Row(
    title="Redis, as kvmesh sees it",
    panels=(
        Panel(
            title="Lookup",
            says="How long a pick waits for the index. Its deadline is 20 ms; beyond it the pick does without.",
            queries=tuple(
                Query(
                    expr=quantile(share, "kvmesh_pick_phase_seconds", "phase", where='pool=~"$pool", phase="lookup"'),
                    legend=f"p{share * 100:.0f}",
                )
                for share in (0.5, 0.95, 0.99)
            ),
            unit=Unit.SECONDS,
            yellow=0.01,
            red=0.02,
        ),
        Panel(
            title="Memory and limit",
            says="A full Redis refuses stores; lookups and removals go on.",
            queries=(
                Query(expr="max(kvmesh_indexer_redis_memory_bytes)", legend="used"),
                Query(expr="max(kvmesh_indexer_redis_memory_limit_bytes)", legend="limit (0: none)"),
            ),
            unit=Unit.BYTES,
        ),
        Panel(
            title="Keys and evictions",
            says="Nearly all keys are blocks. An evicted key makes the index lie: maxmemory-policy must be noeviction.",
            queries=(
                Query(expr="max(kvmesh_indexer_redis_keys)", legend="keys"),
                Query(
                    expr="max(increase(kvmesh_indexer_redis_evicted_keys_total[$__rate_interval]))", legend="evicted"
                ),
            ),
        ),
        Panel(
            title="Round trip from the indexer",
            says="Of a small command every ten seconds.",
            queries=tuple(
                Query(
                    expr=quantile(share, "kvmesh_indexer_redis_round_trip_seconds", where=""),
                    legend=f"p{share * 100:.0f}",
                )
                for share in (0.5, 0.99)
            ),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="Redis can be written",
            says="1 while an indexer can write and read; at least one must.",
            queries=(Query(expr="sum by (instance) (kvmesh_indexer_redis_up)", legend="{{instance}}"),),
            highest=1,
        ),
    ),
)

CACHE_AND_INDEX = Dashboard(
    uid="kvmesh-cache",
    title="kvmesh / Cache and index",
    says=__doc__,
    variables=(POOL,),
    rows=(TRUTH, EVENTS, SOURCES, LINK, REDIS),
)
