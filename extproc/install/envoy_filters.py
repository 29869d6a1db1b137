"""The EnvoyFilters that make gateways or sidecars ask the picker, for one release of Istio. Pure; used by `render`."""

from collections.abc import Sequence
from typing import Any

from extproc.install.ext_proc_filter import (
    EXT_PROC,
    PICK_FILTER,
    TYPES,
    pick_filter,
    picker_host,
    response_filter,
    strip_filter,
)
from extproc.install.istio_release import Wiring, plan_wiring
from extproc.install.labels import object_meta
from extproc.install.plan import (
    PICKER,
    POOL_METADATA_KEY,
    BodyMode,
    ClientsTarget,
    FailureMode,
    GatewayTarget,
    InstallPlan,
    Mode,
    PoolTarget,
    RouteTarget,
)
from extproc.policy.values import Steering

HCM = "envoy.filters.network.http_connection_manager"
ROUTER = "envoy.filters.http.router"
BUFFER_BYTES = 32 << 20  # above the picker's own limit, which answers 413 with a JSON error
PRIORITY = 100  # after whatever else is inserted before the router: the pick comes last, close to it
ENDPOINT_KEY = {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}
SERVED_KEY = {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint-served"}]}
RETRY_ON = "connect-failure,refused-stream,reset-before-request"  # only what no pod has begun to work on


def envoy_filters(plan: InstallPlan) -> list[dict[str, Any]]:
    """Return one EnvoyFilter for each gateway, or for each group of clients."""
    wired = plan_wiring(plan)
    if plan.mode is Mode.SIDECAR:
        return [_for_clients(plan, wired, clients) for clients in plan.clients]
    return [_for_gateway(plan, wired, gateway) for gateway in plan.gateways]


def _for_gateway(plan: InstallPlan, wired: Wiring, gateway: GatewayTarget) -> dict[str, Any]:
    context = "GATEWAY"
    patches = _filters(plan, wired, context, listener={})
    for route in sorted(plan.routes, key=lambda each: each.route is not None):  # a route's own pool over its host's
        patches.append(_route(plan, wired, context, _gateway_match(wired, route), route.pool))
    for pool in plan.pools:
        patches.append(_cluster(wired, context, pool))
    if not wired.route_buffer_limit:
        patches.append(_listener(wired, context, listener={}))
    return _document(plan, f"{PICKER}-{gateway.name}", gateway.namespace, gateway.selector, patches)


def _for_clients(plan: InstallPlan, wired: Wiring, clients: ClientsTarget) -> dict[str, Any]:
    context = "SIDECAR_OUTBOUND"
    patches: list[dict[str, Any]] = []
    for port in sorted({pool.port for pool in plan.pools}):
        patches += _filters(plan, wired, context, listener={"portNumber": port})
    for pool in plan.pools:
        patches.append(_route(plan, wired, context, _sidecar_match(pool), pool))
        patches.append(_cluster(wired, context, pool))
    if not wired.route_buffer_limit:
        ports = sorted({pool.port for pool in plan.pools})
        patches += [_listener(wired, context, listener={"portNumber": port}) for port in ports]
    return _document(plan, f"{PICKER}-clients", clients.namespace, clients.selector, patches)


def _document(
    plan: InstallPlan, name: str, namespace: str, selector: Any, patches: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    meta = object_meta(name, namespace)
    # gateways that get clusters of routed services alone (PILOT_FILTER_GATEWAY_CLUSTER_CONFIG) keep the picker's
    meta["annotations"] = {"envoyfilter.istio.io/referenced-services": f"{plan.namespace}/{picker_host(plan)}"}
    return {
        "apiVersion": "networking.istio.io/v1alpha3",
        "kind": "EnvoyFilter",
        "metadata": meta,
        "spec": {
            "priority": PRIORITY,
            "workloadSelector": {"labels": dict(selector)},
            "configPatches": list(patches),
        },
    }


def _filters(plan: InstallPlan, wired: Wiring, context: str, *, listener: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the patches of the filter chain; what is inserted first later stands before what was inserted earlier."""
    first = {**listener, "filterChain": {"filter": {"name": HCM}}}
    before_router = {**listener, "filterChain": {"filter": {"name": HCM, "subFilter": {"name": ROUTER}}}}
    values = [("INSERT_FIRST", first, strip_filter()), ("INSERT_BEFORE", before_router, pick_filter(plan, wired))]
    if wired.body_mode is BodyMode.DUPLEX:
        values.append(("INSERT_FIRST", first, response_filter(plan)))
    return [
        _patch("HTTP_FILTER", wired, context, {"listener": where}, operation, value)
        for operation, where, value in values
    ]


def _gateway_match(wired: Wiring, route: RouteTarget) -> dict[str, Any]:
    """Return where a gateway's route is found.

    By domain where istiod can: it puts hosts with the same routes into one virtual host, named after one of them.
    """
    forwarding: dict[str, Any] = {"action": "ROUTE"}  # merged into a redirect, the patch would make it a bad route
    if route.route is not None:
        forwarding["name"] = route.route
    if wired.domain_name_match:
        return {"portNumber": route.port, "vhost": {"domainName": route.host, "route": forwarding}}
    return {"vhost": {"name": f"{route.host}:{route.port}", "route": forwarding}}


def _sidecar_match(pool: PoolTarget) -> dict[str, Any]:
    return {
        "name": str(pool.port),
        "vhost": {"name": f"{pool.host}:{pool.port}", "route": {"action": "ROUTE"}},
    }


def _route(plan: InstallPlan, wired: Wiring, context: str, where: dict[str, Any], pool: PoolTarget) -> dict[str, Any]:
    """Return the patch that switches the pick on for a route and gives it the time and the retries that it needs."""
    overrides: dict[str, Any] = {"grpc_initial_metadata": [{"key": POOL_METADATA_KEY, "value": pool.identity}]}
    if wired.route_failure_mode:
        overrides["failure_mode_allow"] = plan.failure_mode is FailureMode.FAIL_OPEN
    longest = f"{plan.longest_queue_seconds + plan.longest_stream_seconds}s"
    action: dict[str, Any] = {
        "timeout": longest,
        "idle_timeout": longest,  # nothing moves while a request waits in the picker's queue
        "retry_policy": _retries(wired),
    }
    value: dict[str, Any] = {
        "route": action,
        "typed_per_filter_config": {
            PICK_FILTER: {"@type": f"{EXT_PROC}.ExtProcPerRoute", "overrides": overrides},
        },
    }
    if wired.route_buffer_limit:
        value["request_body_buffer_limit"] = BUFFER_BYTES
    return _patch("HTTP_ROUTE", wired, context, {"routeConfiguration": where}, "MERGE", value)


def _retries(wired: Wiring) -> dict[str, Any]:
    """Walk the picker's list: it names three pods at least. ORIGINAL_DST has one address, tried again once."""
    return {
        "retry_on": RETRY_ON,
        "num_retries": 2 if wired.steering is Steering.OVERRIDE_HOST else 1,
        "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.05s"},
    }


def _cluster(wired: Wiring, context: str, pool: PoolTarget) -> dict[str, Any]:
    """Return the patch that makes a pool's cluster obey the pick."""
    value: dict[str, Any] = {"per_connection_buffer_limit_bytes": BUFFER_BYTES}
    if wired.steering is Steering.OVERRIDE_HOST:
        value["load_balancing_policy"] = {"policies": [{"typed_extension_config": _override_host(wired)}]}
    else:
        value["original_dst_lb_config"] = {"metadata_key": ENDPOINT_KEY}
        value["cleanup_interval"] = "60s"  # hosts appear by being dialled; 5 s would drop and re-create those in use
    where = {"cluster": {"service": pool.host, "portNumber": pool.port}}
    return _patch("CLUSTER", wired, context, where, "MERGE", value)


def _override_host(wired: Wiring) -> dict[str, Any]:
    least_request = {
        "name": "envoy.load_balancing_policies.least_request",
        "typed_config": {"@type": f"{TYPES}.extensions.load_balancing_policies.least_request.v3.LeastRequest"},
    }
    config: dict[str, Any] = {
        "@type": f"{TYPES}.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        # metadata only: clients can set headers, and naming both sources would try each dead pod twice
        "override_host_sources": [{"metadata": ENDPOINT_KEY}],
        "fallback_policy": {"policies": [{"typed_extension_config": least_request}]},
    }
    if wired.selected_host_key:
        config["selected_host_key"] = SERVED_KEY
    return {"name": "envoy.load_balancing_policies.override_host", "typed_config": config}


def _listener(wired: Wiring, context: str, *, listener: dict[str, Any]) -> dict[str, Any]:
    """Return the patch of the buffer, for the whole listener: routes have none of their own before Envoy 1.36."""
    where = {"listener": listener} if listener else {}
    return _patch("LISTENER", wired, context, where, "MERGE", {"per_connection_buffer_limit_bytes": BUFFER_BYTES})


def _patch(
    apply_to: str, wired: Wiring, context: str, where: dict[str, Any], operation: str, value: dict[str, Any]
) -> dict[str, Any]:
    return {
        "applyTo": apply_to,
        "match": {"context": context, "proxy": {"proxyVersion": wired.proxy_version}, **where},
        "patch": {"operation": operation, "value": value},
    }
