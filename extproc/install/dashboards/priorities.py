"""The dashboard for whoever is refused, and for whoever answers them: classes, queue, steps, quotas."""

from extproc.install.dashboards.panels import (
    IN_POOL,
    POOL,
    Dashboard,
    Panel,
    Query,
    Row,
    Unit,
    Variable,
    per_second,
    quantile,
)

CLASS = Variable(name="class", label="Class", values="label_values(kvmesh_admitted_requests_total, class)")
_HERE = f'{IN_POOL}, class=~"$class"'
_TENANT_TOKENS = per_second("kvmesh_tenant_prompt_tokens_total", "tenant")
_SHED, _ADMITTED = "kvmesh_shed_requests_total", "kvmesh_admitted_requests_total"

CLASSES = Row(
    title="Classes",
    panels=(
        Panel(
            title="Sent on, by class",
            says="Requests that got an endpoint, at once or after a wait.",
            queries=(Query(expr=per_second(_ADMITTED, "class", where=_HERE), legend="{{class}}"),),
            unit=Unit.REQUESTS_A_SECOND,
            stacked=True,
        ),
        Panel(
            title="Refused for load, by class and reason",
            says="shed: no endpoint can meet the target. queue-full, queue-timeout, displaced: docs/queue.md.",
            queries=(Query(expr=per_second(_SHED, "class", "reason", where=_HERE), legend="{{class}}: {{reason}}"),),
            unit=Unit.REQUESTS_A_SECOND,
            stacked=True,
        ),
        Panel(
            title="Share refused, by class",
            says="Of all requests of a class. Only sheddable classes may appear here.",
            queries=(
                Query(
                    expr=f"{per_second(_SHED, 'class', where=_HERE)} / ({per_second(_SHED, 'class', where=_HERE)} + "
                    f"{per_second(_ADMITTED, 'class', where=_HERE)})",
                    legend="{{class}}",
                ),
            ),
            unit=Unit.SHARE,
        ),
    ),
)

QUEUE = Row(
    title="The queue",
    panels=(
        Panel(
            title="Waiting",
            says="Requests that wait at the pickers for room at an endpoint.",
            queries=(Query(expr=f"sum by (class) (kvmesh_queued_requests{{{_HERE}}})", legend="{{class}}"),),
            stacked=True,
        ),
        Panel(
            title="Time in the queue",
            says="Of the requests that waited, however their wait ended, beside the time to the first token that each "
            "class is promised.",
            queries=(
                Query(expr=quantile(0.5, "kvmesh_queue_seconds", "class", where=_HERE), legend="p50 {{class}}"),
                Query(expr=quantile(0.95, "kvmesh_queue_seconds", "class", where=_HERE), legend="p95 {{class}}"),
                Query(
                    expr=f"max by (class) (kvmesh_class_ttft_target_seconds{{{_HERE}}})", legend="promised {{class}}"
                ),
            ),
            unit=Unit.SECONDS,
        ),
        Panel(
            title="How waits end",
            says="Requests that left the queue, by how: sent on, out of time, displaced, or gone with their client.",
            queries=(
                Query(
                    expr=per_second("kvmesh_queue_left_total", "class", "outcome", where=_HERE),
                    legend="{{class}}: {{outcome}}",
                ),
            ),
            unit=Unit.REQUESTS_A_SECOND,
        ),
    ),
)

STEPS = Row(
    title="What is taken away before anybody is refused",
    panels=(
        Panel(
            title="Steps in force",
            says="Replicas in which a step of degradation is in force, by class (docs/degradation.md).",
            queries=(
                Query(expr=f"sum by (class, step) (kvmesh_degradation_step{{{_HERE}}})", legend="{{class}}: {{step}}"),
            ),
        ),
        Panel(
            title="Steps entered and left",
            says="Many a minute: enter and leave are too close to each other.",
            queries=(
                Query(
                    expr=f"sum by (class, step, change) (increase(kvmesh_degradation_changes_total{{{_HERE}}}[5m]))",
                    legend="{{class}}: {{step}} {{change}}",
                ),
            ),
        ),
        Panel(
            title="Pods that refuse by themselves",
            says="503 of an endpoint: it is fuller than the picker believes.",
            queries=(Query(expr=per_second("kvmesh_endpoint_full_answers_total", "endpoint"), legend="{{endpoint}}"),),
            unit=Unit.REQUESTS_A_SECOND,
        ),
    ),
)

QUOTAS = Row(
    title="Quotas and tenants",
    panels=(
        Panel(
            title="Decisions of quotas",
            says="allowed, or the limit that refused; shared: by Redis; local: by this replica's share, without Redis.",
            queries=(
                Query(
                    expr=per_second("kvmesh_quota_decisions_total", "outcome", "source"),
                    legend="{{outcome}} ({{source}})",
                ),
            ),
            unit=Unit.REQUESTS_A_SECOND,
            stacked=True,
        ),
        Panel(
            title="Open requests under a quota",
            says="Requests under way that count against a tenant's concurrency.",
            queries=(Query(expr=f"sum(kvmesh_quota_open_requests{{{IN_POOL}}})", legend="open"),),
        ),
        Panel(
            title="Refusals of quotas, by tenant",
            says="By the limit that refused. Only tenants that the policy names appear by name.",
            queries=(
                Query(
                    expr=per_second(
                        "kvmesh_tenant_quota_decisions_total",
                        "tenant",
                        "outcome",
                        where=f'{IN_POOL}, outcome!="allowed"',
                    ),
                    legend="{{tenant}}: {{outcome}}",
                ),
            ),
            unit=Unit.REQUESTS_A_SECOND,
            stacked=True,
        ),
        Panel(
            title="Prompt tokens by tenant",
            says="What each tenant sends. Only tenants that the policy names appear by name.",
            queries=(Query(expr=_TENANT_TOKENS, legend="{{tenant}}"),),
            unit=Unit.A_SECOND,
            stacked=True,
        ),
        Panel(
            title="Cached share by tenant",
            says="Share of a tenant's prompt tokens that were expected in a cache: whose prompts repeat themselves.",
            queries=(
                Query(
                    expr=f"{per_second('kvmesh_tenant_predicted_cached_tokens_total', 'tenant')} / {_TENANT_TOKENS}",
                    legend="{{tenant}}",
                ),
            ),
            unit=Unit.SHARE,
        ),
        Panel(
            title="Fairness",
            says="Jain's index of the tenants' tokens: 1 where all get the same, 1 ÷ tenants where one gets all.",
            queries=(
                Query(
                    expr=f"sum({_TENANT_TOKENS}) ^ 2 / (count({_TENANT_TOKENS}) * sum(({_TENANT_TOKENS}) ^ 2))",
                    legend="fairness",
                ),
            ),
            unit=Unit.SHARE,
        ),
        Panel(
            title="Time in the queue by tenant",
            says="Seconds waited a second: as many of the tenant's requests wait at one time, on average.",
            queries=(Query(expr=per_second("kvmesh_tenant_queue_seconds_total", "tenant"), legend="{{tenant}}"),),
            unit=Unit.PLAIN,
        ),
        Panel(
            title="Objectives that did not count",
            says="Requests that named a class which the policy does not know, or may not raise themselves to it.",
            queries=(Query(expr=per_second("kvmesh_ignored_objectives_total", "why"), legend="{{why}}"),),
            unit=Unit.REQUESTS_A_SECOND,
        ),
    ),
)

PRIORITIES = Dashboard(
    uid="kvmesh-priorities",
    title="kvmesh / Priorities and shedding",
    says=__doc__,
    variables=(POOL, CLASS),
    rows=(CLASSES, QUEUE, STEPS, QUOTAS),
)
