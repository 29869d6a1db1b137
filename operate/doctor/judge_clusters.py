"""Judges Envoy's clusters: those of the pods must follow the pick, and that of the picker must reach it."""

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

from extproc.pages.findings import Finding, error, warning
from extproc.policy.values import FAIL_CLOSE, FAIL_OPEN, Steering
from operate.doctor.facts import SERVING, EnvoyCluster, EnvoyFacts, ExtProcFilter, Facts

PICK_KEY = "x-gateway-destination-endpoint"
NAMESPACE = "envoy.lb"
EXAMPLES = "see envoy/local.yaml (override_host), envoy/buffered.yaml, envoy/original-dst.yaml"
DEFAULT_OUTBOUND_FRAMES = 10_000  # Envoy's default
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
OUTBOUND = "outbound|"  # prefix of istiod's service clusters


def with_filter(
    judge: Callable[[Facts, EnvoyFacts, ExtProcFilter], Iterator[Finding]],
) -> Callable[[Facts], Iterator[Finding]]:
    """Call `judge` with Envoy and the picker's filter. A missing filter is reported by `envoy_filter`."""

    @wraps(judge)
    def judge_facts(facts: Facts) -> Iterator[Finding]:
        if facts.envoy is not None and (picking := facts.envoy.picking_filter()) is not None:
            yield from judge(facts, facts.envoy, picking)

    return judge_facts


@with_filter
def envoy_steering(facts: Facts, envoy: EnvoyFacts, _: ExtProcFilter) -> Iterator[Finding]:
    """Envoy follows the pick."""
    wanted = facts.expected.steering
    other = Steering.ORIGINAL_DST if wanted is Steering.OVERRIDE_HOST else Steering.OVERRIDE_HOST
    candidates = _clusters_of_pool(facts, envoy) if facts.expected.pool else list(envoy.clusters)
    yield from _missing_clusters(facts, envoy)
    if facts.expected.pool and not candidates:
        return  # this Envoy does not serve the pool
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
    if missing := _named_clusters(facts, envoy) - {cluster.name for cluster in envoy.clusters}:
        yield error(
            envoy.url,
            f"routes for the pool lead to {', '.join(map(repr, sorted(missing)))}, which Envoy does not have: their "
            "requests are answered 503",
            fix="correct the route's backend, or see why Envoy was not told of the cluster (its Service, its pool)",
        )


def _disobedient(facts: Facts, envoy: EnvoyFacts, candidates: list[EnvoyCluster]) -> Iterator[Finding]:
    """Find clusters with the pool's pods that ignore the pick, next to one that follows it (weighted routes)."""
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
    if missing := [endpoint for endpoint in facts.expected.endpoints if endpoint not in reachable]:
        yield error(
            envoy.url,
            f"the cluster of the pods does not have {', '.join(missing)}: picks of these go to random pods",
            fix="add them to the cluster, written exactly as in the picker's --endpoints, or correct --endpoints",
        )


@with_filter
def envoy_failure_mode(facts: Facts, envoy: EnvoyFacts, picking: ExtProcFilter) -> Iterator[Finding]:
    """Without a picker, Envoy fails as the pool's policy says. Only `kvmesh install` can set this."""
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
    """Tell whether this Envoy routes to the pool."""
    return facts.envoy is not None and bool(_clusters_of_pool(facts, facts.envoy))


def _named_clusters(facts: Facts, envoy: EnvoyFacts) -> frozenset[str]:
    pool = facts.expected.pool
    return frozenset(name for route in envoy.pool_routes if pool and route.pool == pool for name in route.clusters)


def _clusters_of_pool(facts: Facts, envoy: EnvoyFacts) -> list[EnvoyCluster]:
    """Return the destinations of the pool's routes or, without such routes, the clusters with its pods."""
    expected = facts.expected
    named = _named_clusters(facts, envoy)
    endpoints = frozenset(expected.endpoints)
    return [each for each in envoy.clusters if (each.name in named if named else each.addresses & endpoints)]


@with_filter
def envoy_picker(_: Facts, envoy: EnvoyFacts, picking: ExtProcFilter) -> Iterator[Finding]:
    """Envoy reaches the picker over HTTP/2, with enough concurrent streams."""
    yield from missing_picker(envoy, picking.cluster)
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


def missing_picker(envoy: EnvoyFacts, name: str) -> Iterator[Finding]:
    """Report a cluster of the picker that is missing or has no address."""
    cluster = envoy.cluster(name)
    if cluster is None or not cluster.hosts:
        seen = "does not exist" if cluster is None else "has no address"
        yield error(envoy.url, f"the filter's cluster {name!r} {seen}", fix=_why_no_cluster(name))


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


def pod_clusters(facts: Facts, envoy: EnvoyFacts) -> list[EnvoyCluster]:
    """Return the clusters that follow picks or have the expected pods."""
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


def trusts_header(cluster: EnvoyCluster) -> bool:
    """Tell whether the cluster follows the header of a client."""
    by_address = cluster.config.get("original_dst_lb_config", {}).get("use_http_header") is True
    return by_address or any(source.get("header") == PICK_KEY for source in _override_sources(cluster))


def _why_no_cluster(name: str) -> str:
    """Return the fix if Envoy lacks the picker's cluster."""
    if not name.startswith(OUTBOUND):
        return "give the cluster of the picker its address (--host and --grpc-port of `kvmesh extproc`)"
    host = name.rpartition("|")[2]
    return (
        f"Istio has not told this proxy of the Service {host}: see that it exists and has ready pods, that no Sidecar "
        "of the proxy's namespace leaves its host out, that discoverySelectors cover its namespace, and that it is "
        'exported (annotation networking.istio.io/exportTo: "*")'
    )
