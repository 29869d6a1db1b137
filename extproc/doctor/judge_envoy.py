"""Judges Envoy's configuration: it must show the picker every prompt, obey the pick, and cut no long generation.

Why each setting is as it is stands beside it in `envoy/*.yaml`.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

from extproc.doctor.facts import SERVING, EnvoyCluster, EnvoyFacts, ExtProcFilter, Facts
from extproc.doctor.findings import Finding, error, unchecked, warning
from extproc.doctor.judge_xds import why_no_cluster
from extproc.install.envoy_filters import UNPICKED_FILTER
from extproc.policy.pool_config import FAIL_CLOSE, FAIL_OPEN
from extproc.policy.values import Steering

PICK_KEY = "x-gateway-destination-endpoint"
NAMESPACE = "envoy.lb"
SAFE_RETRIES = ("connect-failure", "refused-stream", "reset-before-request")  # of what no pod has begun
# of gRPC's statuses, which no answer to these requests has
_GRPC_RETRIES = ("cancelled", "deadline-exceeded", "internal", "resource-exhausted", "unavailable")
_BY_STATUS = "retriable-status-codes"
EXAMPLES = "see envoy/local.yaml (override_host), envoy/buffered.yaml, envoy/original-dst.yaml"
DUPLEX, BUFFERED = "FULL_DUPLEX_STREAMED", "BUFFERED"
DEFAULT_BUFFER_BYTES = 1 << 20
DEFAULT_OUTBOUND_FRAMES = 10_000  # Envoy's
LONGEST_GENERATION_SECONDS = 600.0  # with its wait in a queue; a timeout above cuts none that anybody waits for
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def _with_filter(
    judge: Callable[[Facts, EnvoyFacts, ExtProcFilter], Iterator[Finding]],
) -> Callable[[Facts], Iterator[Finding]]:
    """Judge Envoy and the filter that asks the picker; where there is none, `envoy_filter` says so."""

    @wraps(judge)
    def judge_facts(facts: Facts) -> Iterator[Finding]:
        if facts.envoy is not None and (picking := facts.envoy.picking_filter()) is not None:
            yield from judge(facts, facts.envoy, picking)

    return judge_facts


def envoy_filter(facts: Facts) -> Iterator[Finding]:
    """Envoy answers its admin page and has an ext_proc filter that sees requests."""
    envoy = facts.envoy
    if envoy is None:
        return
    if envoy.problem:
        yield unchecked(envoy.url, envoy.problem, fix="check the URL given as --envoy-admin (Istio: port 15000)")
    elif envoy.picking_filter() is None and envoy.asked_by_routes:
        for name in sorted(envoy.asked_by_routes):
            yield from _missing_picker(envoy, name)
    elif envoy.picking_filter() is None:
        seen = "no ext_proc filter" if not envoy.filters else "no ext_proc filter with request_header_mode: SEND"
        yield error(envoy.url, f"{seen} in any listener: requests do not pass the picker", fix=EXAMPLES)


@_with_filter
def envoy_mode(_: Facts, envoy: EnvoyFacts, picking: ExtProcFilter) -> Iterator[Finding]:
    """The filter shows the picker the whole request and the end of the exchange, and takes its answer."""
    body = picking.mode("request_body_mode")
    if body not in (DUPLEX, BUFFERED):
        yield error(
            envoy.url,
            f"request_body_mode is {body}: the picker does not see whole prompts",
            fix=f"set processing_mode.request_body_mode: {DUPLEX} (or {BUFFERED} before Envoy 1.34)",
        )
    elif body == BUFFERED:
        yield from _buffered(envoy, picking)
    for name in ("response_header_mode", "response_trailer_mode"):
        if picking.mode(name) != "SEND":
            yield error(
                envoy.url,
                f"{name} is {picking.mode(name)}: the picker takes requests for ended that still run",
                fix=f"set processing_mode.{name}: SEND",
            )
    if picking.mode("response_body_mode") != "NONE":
        yield warning(
            envoy.url,
            f"response_body_mode is {picking.mode('response_body_mode')}: every generated token passes the picker",
            fix="set processing_mode.response_body_mode: NONE; sampled responses are asked for as envoy/*.yaml show",
        )
    namespaces = picking.config.get("metadata_options", {}).get("receiving_namespaces", {}).get("untyped", [])
    if NAMESPACE not in namespaces:
        yield error(
            envoy.url,
            "the filter drops the picker's metadata: the pick is ignored and requests go to random pods",
            fix=f"set metadata_options.receiving_namespaces.untyped: [{NAMESPACE}, kvmesh]",
        )
    if picking.fails_open and UNPICKED_FILTER not in envoy.enabling_filters:
        yield warning(
            envoy.url,
            "failure_mode_allow is true: without a picker, requests spread over all pods and nobody notices",
            fix="set failure_mode_allow: false and status_on_error: {code: ServiceUnavailable}",
        )


def _buffered(envoy: EnvoyFacts, picking: ExtProcFilter) -> Iterator[Finding]:
    if "message_timeout" not in picking.config:
        yield warning(
            envoy.url,
            f"{BUFFERED} bodies with the default message_timeout of 200 ms: a request with a slow pick is refused",
            fix="set message_timeout: 360s: longer than any request may wait in the picker (docs/guides/priorities.md)",
        )
    limit = picking.listener.get("per_connection_buffer_limit_bytes", DEFAULT_BUFFER_BYTES)
    of_listener = limit if isinstance(limit, int) else DEFAULT_BUFFER_BYTES
    least = min(
        (of_listener if each.buffer_bytes is None else each.buffer_bytes for each in envoy.pool_routes),
        default=of_listener,
    )
    if least <= DEFAULT_BUFFER_BYTES:
        yield warning(
            envoy.url,
            f"{BUFFERED} bodies where {least:,} bytes are held: longer prompts are answered 413",
            fix="set the listener's per_connection_buffer_limit_bytes: 33554432 (routes: request_body_buffer_limit)",
        )


@_with_filter
def envoy_timeouts(facts: Facts, envoy: EnvoyFacts, picking: ExtProcFilter) -> Iterator[Finding]:
    """No timeout cuts a long generation."""
    timeout = picking.config.get("grpc_service", {}).get("timeout")
    if _seconds(timeout) > 0:
        yield error(
            envoy.url,
            f"grpc_service.timeout is {timeout}: it bounds the whole exchange, not the picker's first answer",
            fix="remove grpc_service.timeout; message_timeout is the one for answers",
        )
    if "stream_idle_timeout" not in picking.manager or _seconds(picking.manager["stream_idle_timeout"]) > 0:
        yield warning(
            envoy.url,
            f"stream_idle_timeout is {picking.manager.get('stream_idle_timeout', '5 minutes, the default')}: it cuts "
            "requests that wait for a long prefill",
            fix="set stream_idle_timeout: 0s on the connection manager",
        )
    pods = {cluster.name for cluster in _pod_clusters(facts, envoy)}
    cut = {
        str(route.get("timeout", "15 s, the default"))
        for route in envoy.routes
        if route.get("cluster") in pods and ("timeout" not in route or _cuts(route["timeout"]))
    }
    if cut:
        yield warning(
            envoy.url,
            f"a route to the pods has a timeout of {', '.join(sorted(cut))}: it cuts long generations",
            fix="set timeout: 0s on the route",
        )
    policies = [route.get("retry_policy") or {} for route in envoy.routes if route.get("cluster") in pods]
    if cut := {str(each["per_try_timeout"]) for each in policies if _cuts(each.get("per_try_timeout"))}:
        yield warning(
            envoy.url,
            f"a route to the pods gives each try {', '.join(sorted(cut))} (per_try_timeout): it cuts long generations "
            "and sends them to another pod, from their beginning",
            fix="remove the per-try timeout (VirtualService retries.perTryTimeout, HTTPRoute timeouts.backendRequest)",
        )


@_with_filter
def envoy_retries(facts: Facts, envoy: EnvoyFacts, picking: ExtProcFilter) -> Iterator[Finding]:
    """No retry gives transfer parameters to a second pod that the first one has used: it would answer other words.

    The picker forbids retries of such requests by a header of Envoy's, which counts where the filter may set those.
    """
    if facts.picker is None or not facts.picker.prefill_pods:
        return
    rules = picking.config.get("mutation_rules") or {}
    if rules.get("allow_envoy") and not rules.get("disallow_all"):
        return
    if rules.get("disallow_is_error"):
        yield error(
            envoy.url,
            "the filter ends requests with headers that the picker may not set (mutation_rules.disallow_is_error): all "
            "whose prompts another pod has computed, which have x-envoy-max-retries",
            fix="set mutation_rules.allow_envoy, or remove disallow_is_error",
        )
    pods = {cluster.name for cluster in _pod_clusters(facts, envoy)}
    policies = [route.get("retry_policy") or {} for route in envoy.routes if route.get("cluster") in pods]
    unsafe = {word for policy in policies for word in _retried_after_an_answer(policy)}
    if unsafe:
        yield error(
            envoy.url,
            f"a route to the pods is retried on {', '.join(sorted(unsafe))}, and prefill pods compute prompts: what "
            "one decode pod has fetched is gone, and the next one answers with other words",
            fix=f"retry on {', '.join(SAFE_RETRIES)} only (`kvmesh install --route-settings replace`), or set "
            "mutation_rules.allow_envoy of the filter: then the picker forbids these retries",
        )


def _retried_after_an_answer(policy: Mapping[str, Any]) -> Iterator[str]:
    """Return the conditions of a retry policy that a pod which has begun may fulfil."""
    for word in map(str.strip, str(policy.get("retry_on", "")).split(",")):
        if word == _BY_STATUS:
            codes = policy.get("retriable_status_codes", ())  # Istio names the condition, and no code
            yield from (f"status {code}" for code in codes)
        elif word and word not in (*SAFE_RETRIES, *_GRPC_RETRIES):
            yield word


@_with_filter
def envoy_header(facts: Facts, envoy: EnvoyFacts, picking: ExtProcFilter) -> Iterator[Finding]:
    """Clients cannot choose their pod."""
    if PICK_KEY in _removed_headers(picking):
        return
    trusts = any(_trusts_header(cluster) for cluster in _pod_clusters(facts, envoy))
    say = error if trusts else warning
    seen = f"the client's own header {PICK_KEY} is not removed"
    yield say(
        envoy.url,
        f"{seen}, and Envoy follows it: clients choose their pod" if trusts else f"{seen}: pods and logs see it",
        fix=f"remove {PICK_KEY} in early_header_mutation_extensions of the connection manager, and steer by metadata",
    )


@_with_filter
def envoy_steering(facts: Facts, envoy: EnvoyFacts, _: ExtProcFilter) -> Iterator[Finding]:
    """Envoy goes where the picker says."""
    wanted = facts.expected.steering
    other = Steering.ORIGINAL_DST if wanted is Steering.OVERRIDE_HOST else Steering.OVERRIDE_HOST
    candidates = _clusters_of_pool(facts, envoy) if facts.expected.pool else list(envoy.clusters)
    yield from _missing_clusters(facts, envoy)
    if facts.expected.pool and not candidates:
        return  # this Envoy does not lead there
    clusters = [cluster for cluster in candidates if _steering(cluster) is wanted]
    if not clusters:
        if any(_steering(cluster) is other for cluster in candidates):
            yield error(
                envoy.url,
                f"the picker has --steering {wanted.value}, and Envoy's cluster of the pods is made for {other.value}",
                fix=f"run the picker with --steering {other.value}, or change the cluster: {EXAMPLES}",
            )
        else:
            yield error(
                envoy.url,
                "no cluster obeys the pick (neither an override_host policy nor ORIGINAL_DST): pods are chosen at "
                "random",
                fix=f"give the cluster of the pods the policy envoy.load_balancing_policies.override_host: {EXAMPLES}",
            )
        return
    yield from _disobedient(facts, envoy, candidates)
    if wanted is Steering.OVERRIDE_HOST:
        yield from _sources_and_members(facts, envoy, clusters)


def _missing_clusters(facts: Facts, envoy: EnvoyFacts) -> Iterator[Finding]:
    missing = _named_clusters(facts, envoy) - {cluster.name for cluster in envoy.clusters}
    if missing:
        yield error(
            envoy.url,
            f"routes for the pool lead to {', '.join(map(repr, sorted(missing)))}, which Envoy does not have: their "
            "requests are answered 503",
            fix="correct the route's backend, or see why Envoy was not told of the cluster (its Service, its pool)",
        )


def _disobedient(facts: Facts, envoy: EnvoyFacts, candidates: list[EnvoyCluster]) -> Iterator[Finding]:
    """Find a cluster with the pool's pods that picks by itself, beside one that does not: part of a weighted route."""
    named, endpoints = _named_clusters(facts, envoy), frozenset(facts.expected.endpoints)
    for cluster in candidates:
        if cluster.name in named and cluster.addresses & endpoints and _steering(cluster) is None:
            yield error(
                envoy.url,
                f"cluster {cluster.name!r}, which routes for the pool lead to, does not obey the pick",
                fix=f"give it the policy envoy.load_balancing_policies.override_host: {EXAMPLES}",
            )


def _sources_and_members(facts: Facts, envoy: EnvoyFacts, clusters: list[EnvoyCluster]) -> Iterator[Finding]:
    for cluster in clusters:
        if not any(_names_pick(source) for source in _override_sources(cluster)):
            yield error(
                envoy.url,
                f"the override_host policy of cluster {cluster.name!r} does not read the picker's answer",
                fix=f"set override_host_sources: [{{metadata: {{key: {NAMESPACE}, path: [{{key: {PICK_KEY}}}]}}}}]",
            )
    reachable = frozenset().union(*(cluster.addresses for cluster in clusters))
    missing = [endpoint for endpoint in facts.expected.endpoints if endpoint not in reachable]
    if missing:
        yield error(
            envoy.url,
            f"the cluster of the pods does not have {', '.join(missing)}: picks of these go to random pods",
            fix="add them to the cluster, written exactly as in the picker's --endpoints, or correct --endpoints",
        )


@_with_filter
def envoy_failure_mode(facts: Facts, envoy: EnvoyFacts, picking: ExtProcFilter) -> Iterator[Finding]:
    """While no picker answers, Envoy does what the pool's policy says: only `kvmesh install` tells it so."""
    expected = facts.expected
    if not expected.failure_mode:
        return
    routes = [route for route in envoy.pool_routes if route.pool == expected.pool]
    default = picking.fails_open
    modes = {
        (default if route.fails_open is None else route.fails_open and not picking.refuses_unpicked): route.name
        for route in routes
    }
    if not routes and _clusters_of_pool(facts, envoy):
        modes = {default: ""}
    for fails_open, name in sorted(modes.items()):
        mode = FAIL_OPEN if fails_open else FAIL_CLOSE
        if mode == expected.failure_mode:
            continue
        where = f"route {name!r}" if name else "the filter"
        effect = "requests go to any pod, by chance" if fails_open else "requests are refused"
        yield warning(
            envoy.url,
            f"the policy says failureMode {expected.failure_mode}, and {where} is made for {mode}: while no picker "
            f"answers, {effect}",
            fix=f"run `kvmesh install` with the flags of before and --failure-mode {expected.failure_mode} (for all "
            f"pools of that installation), or set failureMode: {mode} in the policy",
        )


def leads_to_pool(facts: Facts) -> bool:
    """Tell whether requests for the pool pass this Envoy."""
    return facts.envoy is not None and bool(_clusters_of_pool(facts, facts.envoy))


def _named_clusters(facts: Facts, envoy: EnvoyFacts) -> frozenset[str]:
    """Return the clusters that routes lead to which name the pool."""
    pool = facts.expected.pool
    return frozenset(name for route in envoy.pool_routes if pool and route.pool == pool for name in route.clusters)


def _clusters_of_pool(facts: Facts, envoy: EnvoyFacts) -> list[EnvoyCluster]:
    """Return the clusters that routes of the pool lead to; without such routes, those that have its pods."""
    expected = facts.expected
    named = _named_clusters(facts, envoy)
    endpoints = frozenset(expected.endpoints)
    return [each for each in envoy.clusters if (each.name in named if named else each.addresses & endpoints)]


@_with_filter
def envoy_picker(_: Facts, envoy: EnvoyFacts, picking: ExtProcFilter) -> Iterator[Finding]:
    """Envoy reaches the picker, over HTTP/2, with as many streams as there are requests."""
    yield from _missing_picker(envoy, picking.cluster)
    cluster = envoy.cluster(picking.cluster)
    if cluster is None:
        return
    for host in cluster.hosts:
        health = envoy.picker_health.get(host.address, SERVING)
        fix = f"see that the picker listens at {host.address} (--host, --grpc-port) and that Envoy may reach it"
        if health != SERVING:
            yield error(host.address, f"where Envoy looks for the picker, gRPC health is: {health}", fix=fix)
        elif not host.healthy:
            yield error(host.address, "Envoy takes the picker there for unhealthy", fix=fix)
        elif host.connections_failed and host.connections_failed >= host.connections_made:
            yield error(host.address, f"Envoy failed to connect {host.connections_failed} times", fix=fix)
    yield from _picker_cluster(envoy, cluster)


def _missing_picker(envoy: EnvoyFacts, name: str) -> Iterator[Finding]:
    cluster = envoy.cluster(name)
    if cluster is None or not cluster.hosts:
        seen = "does not exist" if cluster is None else "has no address"
        yield error(envoy.url, f"the filter's cluster {name!r} {seen}", fix=why_no_cluster(name))


def _picker_cluster(envoy: EnvoyFacts, cluster: EnvoyCluster) -> Iterator[Finding]:
    options = cluster.config.get("typed_extension_protocol_options", {}).get(_HTTP_OPTIONS, {})
    explicit = options.get("explicit_http_config", {})
    http2 = explicit.get("http2_protocol_options", cluster.config.get("http2_protocol_options"))
    if http2 is None:
        yield error(
            envoy.url,
            f"cluster {cluster.name!r} of the picker does not speak HTTP/2, which gRPC needs",
            fix="set explicit_http_config: {http2_protocol_options: {}} in its typed_extension_protocol_options",
        )
    elif (frames := int(http2.get("max_outbound_frames", DEFAULT_OUTBOUND_FRAMES))) <= DEFAULT_OUTBOUND_FRAMES:
        yield warning(
            envoy.url,
            f"cluster {cluster.name!r} of the picker lets {frames} frames wait: one client with a body in small pieces "
            "has Envoy close the connection that all share",
            fix="set max_outbound_frames: 1000000 in its http2_protocol_options",
        )
    thresholds = cluster.config.get("circuit_breakers", {}).get("thresholds", [])
    most = max((int(each.get("max_requests", 1024)) for each in thresholds), default=1024)
    if most <= 1024:
        yield warning(
            envoy.url,
            f"cluster {cluster.name!r} of the picker takes {most} requests at a time: the rest is answered 503",
            fix="set circuit_breakers.thresholds: [{max_requests: 1000000, max_connections: 1000000, …}] there",
        )


def _pod_clusters(facts: Facts, envoy: EnvoyFacts) -> list[EnvoyCluster]:
    endpoints = frozenset(facts.expected.endpoints)
    return [cluster for cluster in envoy.clusters if _steering(cluster) is not None or cluster.addresses & endpoints]


def _steering(cluster: EnvoyCluster) -> Steering | None:
    if cluster.config.get("type") == "ORIGINAL_DST":
        return Steering.ORIGINAL_DST
    return Steering.OVERRIDE_HOST if _override_policy(cluster) is not None else None


def _override_policy(cluster: EnvoyCluster) -> Mapping[str, Any] | None:
    for policy in cluster.config.get("load_balancing_policy", {}).get("policies", []):
        config: Mapping[str, Any] = policy.get("typed_extension_config", {}).get("typed_config", {})
        if str(config.get("@type", "")).endswith("override_host.v3.OverrideHost"):
            return config
    return None


def _override_sources(cluster: EnvoyCluster) -> list[Mapping[str, Any]]:
    policy = _override_policy(cluster) or {}
    return list(policy.get("override_host_sources", []))


def _names_pick(source: Mapping[str, Any]) -> bool:
    metadata = source.get("metadata", {})
    path = [segment.get("key") for segment in metadata.get("path", [])]
    return (metadata.get("key"), path) == (NAMESPACE, [PICK_KEY]) or source.get("header") == PICK_KEY


def _trusts_header(cluster: EnvoyCluster) -> bool:
    by_address = cluster.config.get("original_dst_lb_config", {}).get("use_http_header") is True
    return by_address or any(source.get("header") == PICK_KEY for source in _override_sources(cluster))


def _removed_headers(picking: ExtProcFilter) -> list[str]:
    """Return what is removed before the filter: early in the connection manager, or by a mutation filter."""
    extensions = picking.manager.get("early_header_mutation_extensions", [])
    mutations = [each.get("typed_config", {}).get("mutations", []) for each in extensions]
    for entry in picking.manager.get("http_filters", []):
        if entry.get("name") == picking.name:
            break
        mutations.append(entry.get("typed_config", {}).get("mutations", {}).get("request_mutations", []))
    return [str(one.get("remove", "")).lower() for of_one in mutations for one in of_one if isinstance(one, Mapping)]


def _cuts(duration: object) -> bool:
    """Tell whether a timeout may end a generation: 0 is none, and what `kvmesh install` sets is 20 minutes."""
    return 0 < _seconds(duration) < LONGEST_GENERATION_SECONDS


def _seconds(duration: object) -> float:
    """Read a protobuf duration as JSON has it: `15s`."""
    try:
        return float(str(duration).removesuffix("s")) if duration is not None else 0.0
    except ValueError:
        return 0.0
