"""The EnvoyFilters that make gateways or sidecars ask the picker, for one release of Istio. Pure.

The HTTP filters in them are those of the files in envoy/. A test compares them field by
field: what the picker needs is written there, with the reasons.
"""

from typing import Any

from extproc.install.istio_release import Wiring, plan_wiring
from extproc.install.objects import Document, kube_object
from extproc.install.plan import (
    GRPC_PORT,
    PICKER,
    PICKER_IDLE_TIMEOUT,
    POOL_METADATA_KEY,
    BodyMode,
    ClientsTarget,
    FailureMode,
    GatewayTarget,
    InstallPlan,
    Mode,
    PoolTarget,
    RouteSettings,
    RouteTarget,
)
from extproc.policy.values import Steering

PICK_FILTER = "envoy.filters.http.ext_proc.kvmesh"  # not Istio's own name: routes refer to filters by name
RESPONSE_FILTER = "envoy.filters.http.ext_proc.kvmesh-response"
UNPICKED_FILTER = "envoy.filters.http.fault.kvmesh"
NOTE_FILTER = "kvmesh.note"
STRIP_FILTER = "kvmesh.strip-client-headers"
# what only the picker and Envoy may say
CLIENT_MAY_NOT_SEND = (
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-subset",
    "x-gateway-destination-endpoint-served",
)
# The pick's note as a header, between the filters of one proxy. istio-proxy cannot match metadata: it is built without
# the inputs and matchers for it. Headers it can.
NOTE_HEADER = "x-kvmesh-note"
TYPES = "type.googleapis.com/envoy"
EXT_PROC = f"{TYPES}.extensions.filters.http.ext_proc.v3"
HEADER_MUTATION = f"{TYPES}.extensions.filters.http.header_mutation.v3.HeaderMutation"
RESPONSE_TIMEOUT = "10s"  # per message; at the default of 200 ms a picker held up for a moment would cost a good answer
HCM = "envoy.filters.network.http_connection_manager"
ROUTER = "envoy.filters.http.router"
BUFFER_BYTES = 32 << 20  # above the picker's own limit, which answers 413 with a JSON error
HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
HTTP_PORT = 80
PRIORITY = 100  # after whatever else is inserted before the router: the pick comes last, close to it
ENDPOINT_KEY = {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}
SERVED_KEY = {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint-served"}]}
REFUSE_UNPICKED: dict[str, Any] = {
    "@type": f"{TYPES}.extensions.filters.http.fault.v3.HTTPFault",
    "abort": {"http_status": 503, "percentage": {"numerator": 100}},
    "headers": [{"name": "x-gateway-destination-endpoint", "present_match": True, "invert_match": True}],
}
# The picker sets it on all answers that it sees. This is for Envoy's own, as when no picker is there; not by the
# connection manager, whose listener may have other routes. Without an id Envoy adds no header.
REQUEST_ID: dict[str, Any] = {
    "header": {"key": "x-request-id", "value": "%REQ(X-REQUEST-ID)%"},
    "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
}
RETRY_ON = "connect-failure,refused-stream,reset-before-request"  # only what no pod has begun to work on


def envoy_filters(plan: InstallPlan) -> list[Document]:
    """Return one EnvoyFilter for each gateway, or for each group of clients."""
    patches = _patches(plan, plan_wiring(plan))
    return [_envoy_filter(plan, target, patches) for target in plan.callers]


def _patches(plan: InstallPlan, wired: Wiring) -> list[dict[str, Any]]:
    listeners: list[dict[str, Any]] = [{}]
    if plan.mode is Mode.SIDECAR:
        context = "SIDECAR_OUTBOUND"
        listeners = [{"portNumber": port} for port in sorted({pool.port for pool in plan.pools})]
        routed = [
            patch
            for pool in plan.pools
            for patch in (_route(plan, wired, context, _sidecar_match(pool), pool), _cluster(wired, context, pool))
        ]
    else:
        context = "GATEWAY"
        routes = sorted(plan.routes, key=lambda each: each.route is not None)  # a route's own pool over its host's
        routed = [_route(plan, wired, context, _gateway_match(wired, route), route.pool) for route in routes]
        routed += [_cluster(wired, context, pool) for pool in plan.pools]
    routed.append(_picker_cluster(plan, wired, context))
    patches = [patch for listener in listeners for patch in _filters(plan, wired, context, listener=listener)]
    buffers = [] if wired.route_buffer_limit else [_listener(wired, context, listener=each) for each in listeners]
    return [*patches, *routed, *buffers]


def _envoy_filter(plan: InstallPlan, target: GatewayTarget | ClientsTarget, patches: list[dict[str, Any]]) -> Document:
    name = target.name if isinstance(target, GatewayTarget) else "clients"
    return kube_object(
        "EnvoyFilter",
        f"{PICKER}-{name}",
        target.namespace,
        # gateways that get clusters of routed services alone (PILOT_FILTER_GATEWAY_CLUSTER_CONFIG) keep the picker's
        annotations={"envoyfilter.istio.io/referenced-services": f"{plan.namespace}/{plan.picker_host}"},
        spec={
            "priority": PRIORITY,
            "workloadSelector": {"labels": dict(target.selector)},
            "configPatches": patches,
        },
    )


def _filters(plan: InstallPlan, wired: Wiring, context: str, *, listener: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the patches of the filter chain; what is inserted first later stands before what was inserted earlier.

    A response passes the chain from its end: the pick, the note, who reads the note, and who takes it off.
    """
    first = {**listener, "filterChain": {"filter": {"name": HCM}}}
    before_router = {**listener, "filterChain": {"filter": {"name": HCM, "subFilter": {"name": ROUTER}}}}
    values = [("INSERT_BEFORE", before_router, pick_filter(plan, wired))]
    if refuses_unpicked(plan, wired):
        values.append(("INSERT_BEFORE", before_router, unpicked_filter()))
    if wired.body_mode is BodyMode.DUPLEX:
        values += [("INSERT_FIRST", first, note_filter()), ("INSERT_FIRST", first, response_filter(plan))]
    values.append(("INSERT_FIRST", first, strip_filter()))
    return [
        _patch("HTTP_FILTER", wired, context, {"listener": where}, operation, value)
        for operation, where, value in values
    ]


def _gateway_match(wired: Wiring, route: RouteTarget) -> dict[str, Any]:
    """Return where a gateway's route is found.

    By domain where istiod can: it puts hosts with the same routes into one virtual host, named after one of them.
    Older ones find a route by its own name, in whatever virtual host, and a host by the name of the virtual host.
    """
    forwarding: dict[str, Any] = {"action": "ROUTE"}  # merged into a redirect, the patch would make it a bad route
    if route.route is not None:
        forwarding["name"] = route.route
    if wired.domain_name_match:
        port = {} if route.port is None else {"portNumber": route.port}
        return {**port, "vhost": {"domainName": route.host, "route": forwarding}}
    if route.route is not None:
        return {"vhost": {"route": forwarding}}
    return {"vhost": {"name": f"{route.host}:{route.port or HTTP_PORT}", "route": forwarding}}


def _sidecar_match(pool: PoolTarget) -> dict[str, Any]:
    return {
        "name": str(pool.port),
        "vhost": {"name": f"{pool.host}:{pool.port}", "route": {"action": "ROUTE"}},
    }


def _route(plan: InstallPlan, wired: Wiring, context: str, where: dict[str, Any], pool: PoolTarget) -> dict[str, Any]:
    """Return the patch that switches the pick on for a route and gives it the time that it needs."""
    overrides: dict[str, Any] = {"grpc_initial_metadata": [{"key": POOL_METADATA_KEY, "value": pool.identity}]}
    if wired.route_failure_mode:
        overrides["failure_mode_allow"] = _goes_on_without_picker(plan, wired)
    switched: dict[str, Any] = {PICK_FILTER: {"@type": f"{EXT_PROC}.ExtProcPerRoute", "overrides": overrides}}
    if refuses_unpicked(plan, wired):
        switched[UNPICKED_FILTER] = REFUSE_UNPICKED
    longest = f"{plan.longest_queue_seconds + plan.longest_stream_seconds}s"
    action: dict[str, Any] = {"idle_timeout": longest}  # nothing moves while a request waits in the picker's queue
    # istiod replaces durations: whatever the route says of one try, it does not cut a generation
    retries = {"per_try_timeout": "0s"}
    if plan.route_settings is RouteSettings.REPLACE:
        action["timeout"] = longest
        retries = _retries(wired) | retries
    action["retry_policy"] = retries
    value: dict[str, Any] = {
        "route": action,
        "typed_per_filter_config": switched,
        "response_headers_to_add": [REQUEST_ID],
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


def _picker_cluster(plan: InstallPlan, wired: Wiring, context: str) -> dict[str, Any]:
    """Return the patch that lets no client cut the connections that all share, as in the files; the reasons are there.

    istiod replaces the protocol options as a whole, so what the DestinationRule says of them is said again.
    """
    options = {
        "@type": f"{TYPES}.extensions.upstreams.http.v3.HttpProtocolOptions",
        "common_http_protocol_options": {"idle_timeout": PICKER_IDLE_TIMEOUT},
        "explicit_http_config": {
            "http2_protocol_options": {
                "connection_keepalive": {"interval": "30s", "timeout": "20s"},
                "max_outbound_frames": 1000000,
                "max_outbound_control_frames": 10000,
                "max_concurrent_streams": 256,
            }
        },
    }
    value = {"typed_extension_protocol_options": {HTTP_OPTIONS: options}}
    where = {"cluster": {"service": plan.picker_host, "portNumber": GRPC_PORT}}
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


def strip_filter() -> dict[str, Any]:
    """Return the filter that drops what a client says about endpoints, since only the picker steers; and the note."""
    mutations = {
        "request_mutations": [{"remove": name} for name in CLIENT_MAY_NOT_SEND],
        "response_mutations": [{"remove": NOTE_HEADER}],
    }
    return {"name": STRIP_FILTER, "typed_config": {"@type": HEADER_MUTATION, "mutations": mutations}}


def note_filter() -> dict[str, Any]:
    """Return the filter that shows the pick's note, if there is one, to the filter that decides by headers."""
    note = {"key": NOTE_HEADER, "value": "%DYNAMIC_METADATA(kvmesh:response)%"}
    shown = {"header": note, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
    # a pod may not leave one
    mutations = {"response_mutations": [{"remove": NOTE_HEADER}, {"append": shown}]}
    return {"name": NOTE_FILTER, "typed_config": {"@type": HEADER_MUTATION, "mutations": mutations}}


def pick_filter(plan: InstallPlan, wiring: Wiring) -> dict[str, Any]:
    """Return the filter that asks for an endpoint; it is off but for the routes that switch it on."""
    buffered = wiring.body_mode is BodyMode.BUFFERED
    config: dict[str, Any] = {
        "@type": f"{EXT_PROC}.ExternalProcessor",
        "stat_prefix": "kvmesh",
        "grpc_service": _picker_service(plan),
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED" if buffered else "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": "NONE",
            "response_trailer_mode": "SEND",
        },
        # enforced for buffered bodies: above the longest wait in the picker's queue
        "message_timeout": f"{plan.longest_queue_seconds + 60}s" if buffered else RESPONSE_TIMEOUT,
        "failure_mode_allow": _goes_on_without_picker(plan, wiring) and not wiring.route_failure_mode,
        # which pool a weighted route has drawn: the route's own word for the pool cannot tell
        "request_attributes": ["xds.cluster_name"],
        "response_attributes": ["upstream.address", "response.code_details"],
        "metadata_options": {
            "receiving_namespaces": {"untyped": ["envoy.lb"] if buffered else ["envoy.lb", "kvmesh"]},
            "forwarding_namespaces": {"untyped": _forwarded(wiring)},
        },
    }
    if buffered:
        config["allow_mode_override"] = True  # how the picker asks for a response's body; duplex forbids it
    if plan.route_settings is RouteSettings.KEEP:
        # for x-envoy-max-retries: no second pod may get a request with transfer parameters, whatever the route retries
        config["mutation_rules"] = {"allow_envoy": True}
    if wiring.status_on_error:
        config["status_on_error"] = {"code": "ServiceUnavailable"}
    return {"name": PICK_FILTER, "disabled": True, "typed_config": config}


def refuses_unpicked(plan: InstallPlan, wired: Wiring) -> bool:
    """Tell whether the pick's filter fails open only so that answers under way are not cut."""
    return wired.body_mode is BodyMode.BUFFERED and plan.failure_mode is FailureMode.FAIL_CLOSE


def _goes_on_without_picker(plan: InstallPlan, wired: Wiring) -> bool:
    """Tell whether the pick's filter fails open. Beside a duplex body Envoy cuts answers all the same."""
    return plan.failure_mode is FailureMode.FAIL_OPEN or refuses_unpicked(plan, wired)


def unpicked_filter() -> dict[str, Any]:
    """Return the filter that refuses requests for which nobody has picked; off as the pick's."""
    return {"name": UNPICKED_FILTER, "disabled": True, "typed_config": REFUSE_UNPICKED}


def response_filter(plan: InstallPlan) -> dict[str, Any]:
    """Return the filter that reads the responses for which the pick left a note; skipped by all others."""
    return {
        "name": RESPONSE_FILTER,
        "typed_config": {
            "@type": f"{TYPES}.extensions.common.matching.v3.ExtensionWithMatcher",
            "xds_matcher": _skip_without_note(),
            "extension_config": {
                "name": "envoy.filters.http.ext_proc",
                "typed_config": {
                    "@type": f"{EXT_PROC}.ExternalProcessor",
                    "stat_prefix": "kvmesh_response",
                    "grpc_service": _picker_service(plan),
                    "processing_mode": {
                        "request_header_mode": "SKIP",
                        "request_body_mode": "NONE",
                        "request_trailer_mode": "SKIP",
                        "response_header_mode": "SEND",
                        "response_body_mode": "NONE",
                        "response_trailer_mode": "SEND",
                    },
                    "allow_mode_override": True,
                    "message_timeout": RESPONSE_TIMEOUT,
                    "failure_mode_allow": True,  # the answer is there and paid for
                    "response_attributes": ["upstream.address"],
                    "metadata_options": {
                        "receiving_namespaces": {"untyped": ["kvmesh"]},
                        "forwarding_namespaces": {"untyped": ["kvmesh"]},
                    },
                },
            },
        },
    }


def _picker_service(plan: InstallPlan) -> dict[str, Any]:
    """Name Istio's own cluster of the picker: mTLS, no limit of 1024 requests. A timeout would cut answers."""
    host = plan.picker_host
    return {"envoy_grpc": {"cluster_name": f"outbound|{GRPC_PORT}||{host}", "authority": host}}


def _forwarded(wiring: Wiring) -> list[str]:
    served = ["envoy.lb"] if wiring.steering is Steering.OVERRIDE_HOST else []
    return [*served, "envoy.lb.subset_hint", "envoy.filters.http.jwt_authn"]


def _skip_without_note() -> dict[str, Any]:
    # the first predicate: without it the request headers, which have no note, would decide
    without = {"not_matcher": _has_response_header("note", NOTE_HEADER)}
    predicate = {"and_matcher": {"predicate": [_has_response_header("status", ":status"), without]}}
    skip = {
        "name": "skip",
        "typed_config": {"@type": f"{TYPES}.extensions.filters.common.matcher.action.v3.SkipFilter"},
    }
    return {"matcher_list": {"matchers": [{"predicate": predicate, "on_match": {"action": skip}}]}}


def _has_response_header(name: str, header: str) -> dict[str, Any]:
    matched = {"@type": f"{TYPES}.type.matcher.v3.HttpResponseHeaderMatchInput", "header_name": header}
    return {
        "single_predicate": {
            "input": {"name": name, "typed_config": matched},
            "value_match": {"safe_regex": {"google_re2": {}, "regex": ".+"}},
        }
    }
