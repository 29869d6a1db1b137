"""The EnvoyFilters that make gateways or sidecars ask the picker. Pure.

Their HTTP filters are those of the files in envoy/, where comments give the reasons. A test compares them field by
field.
"""

from typing import Any

from operate.install.objects import Document, kube_object
from operate.install.parse_targets import PROXY_VERSIONS, SELECTED_HOST_KEY_FROM, planned_body_mode
from operate.install.plan import (
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

PICK_FILTER = "envoy.filters.http.ext_proc.kvmesh"  # differs from Istio's filter: routes refer to filters by name
RESPONSE_FILTER = "envoy.filters.http.ext_proc.kvmesh-response"
UNPICKED_FILTER = "envoy.filters.http.fault.kvmesh"
NOTE_FILTER = "kvmesh.note"
STRIP_FILTER = "kvmesh.strip-client-headers"
# set only by the picker and Envoy
CLIENT_MAY_NOT_SEND = (
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-subset",
    "x-gateway-destination-endpoint-served",
)
# The pick's note as a header between filters of the same proxy: istio-proxy is built without the inputs and matchers
# for metadata and can match only headers.
NOTE_HEADER = "x-kvmesh-note"
TYPES = "type.googleapis.com/envoy"
EXT_PROC = f"{TYPES}.extensions.filters.http.ext_proc.v3"
HEADER_MUTATION = f"{TYPES}.extensions.filters.http.header_mutation.v3.HeaderMutation"
RESPONSE_TIMEOUT = "10s"  # per message; with the default of 200 ms a short stall of the picker would lose a good answer
HCM = "envoy.filters.network.http_connection_manager"
ROUTER = "envoy.filters.http.router"
BUFFER_BYTES = 32 << 20
HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
PRIORITY = 100  # after other filters inserted before the router, so that the pick comes last
ENDPOINT_KEY = {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}
SERVED_KEY = {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint-served"}]}
REFUSE_UNPICKED: dict[str, Any] = {
    "@type": f"{TYPES}.extensions.filters.http.fault.v3.HTTPFault",
    "abort": {"http_status": 503, "percentage": {"numerator": 100}},
    "headers": [{"name": "x-gateway-destination-endpoint", "present_match": True, "invert_match": True}],
}
# The picker sets it on the responses it sees. This covers Envoy's own responses, as without a picker. Set per route,
# not in the connection manager, which may serve foreign routes. Envoy adds no header if the id is empty.
REQUEST_ID: dict[str, Any] = {
    "header": {"key": "x-request-id", "value": "%REQ(X-REQUEST-ID)%"},
    "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
}
RETRY_ON = "connect-failure,refused-stream,reset-before-request"  # safe: no pod has begun the request
RETRIES: dict[str, Any] = {  # walk the picker's list of at least three pods
    "retry_on": RETRY_ON,
    "num_retries": 2,
    "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.05s"},
}


def envoy_filters(plan: InstallPlan) -> list[Document]:
    """Return an EnvoyFilter per gateway, or per group of clients."""
    patches = _patches(plan)
    return [_envoy_filter(plan, target, patches) for target in plan.callers]


def _patches(plan: InstallPlan) -> list[dict[str, Any]]:
    listeners: list[dict[str, Any]] = [{}]
    if plan.mode is Mode.SIDECAR:
        context = "SIDECAR_OUTBOUND"
        listeners = [{"portNumber": port} for port in sorted({pool.port for pool in plan.pools})]
        routed = [
            patch
            for pool in plan.pools
            for patch in (_route(plan, context, _sidecar_match(pool), pool), _cluster(plan, context, pool))
        ]
    else:
        context = "GATEWAY"
        routes = sorted(plan.routes, key=lambda each: each.route is not None)  # a route overrides its host
        routed = [_route(plan, context, _gateway_match(route), route.pool) for route in routes]
        routed += [_cluster(plan, context, pool) for pool in plan.pools]
    routed.append(_picker_cluster(plan, context))
    patches = [patch for listener in listeners for patch in _filters(plan, context, listener=listener)]
    return [*patches, *routed]


def _envoy_filter(plan: InstallPlan, target: GatewayTarget | ClientsTarget, patches: list[dict[str, Any]]) -> Document:
    name = target.name if isinstance(target, GatewayTarget) else "clients"
    return kube_object(
        "EnvoyFilter",
        f"{PICKER}-{name}",
        target.namespace,
        # keeps the picker's cluster on gateways that get only routed clusters (PILOT_FILTER_GATEWAY_CLUSTER_CONFIG)
        annotations={"envoyfilter.istio.io/referenced-services": f"{plan.namespace}/{plan.picker_host}"},
        spec={"priority": PRIORITY, "workloadSelector": {"labels": dict(target.selector)}, "configPatches": patches},
    )


def _filters(plan: InstallPlan, context: str, *, listener: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the filter chain's patches; a later INSERT_FIRST comes before an earlier one.

    A response passes the chain in reverse: pick, note, the reader of the note, and the filter that removes it.
    """
    first = {**listener, "filterChain": {"filter": {"name": HCM}}}
    before_router = {**listener, "filterChain": {"filter": {"name": HCM, "subFilter": {"name": ROUTER}}}}
    values = [("INSERT_BEFORE", before_router, pick_filter(plan))]
    if refuses_unpicked(plan):
        values.append(("INSERT_BEFORE", before_router, unpicked_filter()))
    if planned_body_mode(plan) is BodyMode.DUPLEX:
        values += [("INSERT_FIRST", first, note_filter()), ("INSERT_FIRST", first, response_filter(plan))]
    values.append(("INSERT_FIRST", first, strip_filter()))
    return [_patch("HTTP_FILTER", context, {"listener": where}, operation, value) for operation, where, value in values]


def _gateway_match(route: RouteTarget) -> dict[str, Any]:
    """Matches by domain: istiod merges hosts with equal routes into one virtual host, named after one of them."""
    forwarding: dict[str, Any] = {"action": "ROUTE"}  # merged into a redirect, the patch would make an invalid route
    if route.route is not None:
        forwarding["name"] = route.route
    port = {} if route.port is None else {"portNumber": route.port}
    return {**port, "vhost": {"domainName": route.host, "route": forwarding}}


def _sidecar_match(pool: PoolTarget) -> dict[str, Any]:
    return {"name": str(pool.port), "vhost": {"name": f"{pool.host}:{pool.port}", "route": {"action": "ROUTE"}}}


def _route(plan: InstallPlan, context: str, where: dict[str, Any], pool: PoolTarget) -> dict[str, Any]:
    overrides = {
        "grpc_initial_metadata": [{"key": POOL_METADATA_KEY, "value": pool.identity}],
        # with duplex bodies Envoy cuts responses in either case
        "failure_mode_allow": plan.failure_mode is FailureMode.FAIL_OPEN or refuses_unpicked(plan),
    }
    switched: dict[str, Any] = {PICK_FILTER: {"@type": f"{EXT_PROC}.ExtProcPerRoute", "overrides": overrides}}
    if refuses_unpicked(plan):
        switched[UNPICKED_FILTER] = REFUSE_UNPICKED
    longest = f"{plan.longest_queue_seconds + plan.longest_stream_seconds}s"
    action: dict[str, Any] = {"idle_timeout": longest}  # no byte flows while a request is queued
    # istiod replaces durations, so a per-try timeout of the route cannot cut a generation
    retries = {"per_try_timeout": "0s"}
    if plan.route_settings is RouteSettings.REPLACE:
        action["timeout"] = longest
        retries = RETRIES | retries
    action["retry_policy"] = retries
    value: dict[str, Any] = {
        "route": action,
        "typed_per_filter_config": switched,
        "response_headers_to_add": [REQUEST_ID],
        "request_body_buffer_limit": 2 * BUFFER_BYTES,  # above the picker's own limits, which answer 413 in JSON
    }
    return _patch("HTTP_ROUTE", context, {"routeConfiguration": where}, "MERGE", value)


def _cluster(plan: InstallPlan, context: str, pool: PoolTarget) -> dict[str, Any]:
    value: dict[str, Any] = {
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "load_balancing_policy": {"policies": [{"typed_extension_config": _override_host(plan)}]},
    }
    where = {"cluster": {"service": pool.host, "portNumber": pool.port}}
    return _patch("CLUSTER", context, where, "MERGE", value)


def _picker_cluster(plan: InstallPlan, context: str) -> dict[str, Any]:
    """Return the patch that keeps a client from breaking the shared connections; reasons are in the files in envoy/.

    istiod replaces the protocol options as a whole, so those of the DestinationRule are repeated.
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
    return _patch("CLUSTER", context, where, "MERGE", value)


def _override_host(plan: InstallPlan) -> dict[str, Any]:
    least_request = {
        "name": "envoy.load_balancing_policies.least_request",
        "typed_config": {"@type": f"{TYPES}.extensions.load_balancing_policies.least_request.v3.LeastRequest"},
    }
    config: dict[str, Any] = {
        "@type": f"{TYPES}.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        # only metadata: clients can set headers, and with both sources each dead pod would be tried twice
        "override_host_sources": [{"metadata": ENDPOINT_KEY}],
        "fallback_policy": {"policies": [{"typed_extension_config": least_request}]},
    }
    if plan.istio.minor >= SELECTED_HOST_KEY_FROM:
        config["selected_host_key"] = SERVED_KEY
    return {"name": "envoy.load_balancing_policies.override_host", "typed_config": config}


def _patch(apply_to: str, context: str, where: dict[str, Any], operation: str, value: dict[str, Any]) -> dict[str, Any]:
    return {
        "applyTo": apply_to,
        "match": {"context": context, "proxy": {"proxyVersion": PROXY_VERSIONS}, **where},
        "patch": {"operation": operation, "value": value},
    }


def strip_filter() -> dict[str, Any]:
    """Return the filter that removes clients' endpoint headers, because only the picker steers, and the note."""
    mutations = {
        "request_mutations": [{"remove": name} for name in CLIENT_MAY_NOT_SEND],
        "response_mutations": [{"remove": NOTE_HEADER}],
    }
    return {"name": STRIP_FILTER, "typed_config": {"@type": HEADER_MUTATION, "mutations": mutations}}


def note_filter() -> dict[str, Any]:
    """Return the filter that copies the pick's note, if any, to a header that the response filter can match."""
    note = {"key": NOTE_HEADER, "value": "%DYNAMIC_METADATA(kvmesh:response)%"}
    shown = {"header": note, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
    # pods must not forge one
    mutations = {"response_mutations": [{"remove": NOTE_HEADER}, {"append": shown}]}
    return {"name": NOTE_FILTER, "typed_config": {"@type": HEADER_MUTATION, "mutations": mutations}}


def pick_filter(plan: InstallPlan) -> dict[str, Any]:
    """Return the filter that asks for an endpoint; disabled except on routes that enable it."""
    buffered = planned_body_mode(plan) is BodyMode.BUFFERED
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
        # enforced for buffered bodies, so it exceeds the longest wait in the queue
        "message_timeout": f"{plan.longest_queue_seconds + 60}s" if buffered else RESPONSE_TIMEOUT,
        "failure_mode_allow": False,  # routes override it
        "status_on_error": {"code": "ServiceUnavailable"},
        # the pool drawn by a weighted route, which the route's own metadata cannot tell
        "request_attributes": ["xds.cluster_name"],
        "response_attributes": ["upstream.address", "response.code_details"],
        "metadata_options": {
            "receiving_namespaces": {"untyped": ["envoy.lb"] if buffered else ["envoy.lb", "kvmesh"]},
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint", "envoy.filters.http.jwt_authn"]},
        },
    }
    if buffered:
        config["allow_mode_override"] = True  # lets the picker request a response's body; not allowed with duplex
    if plan.route_settings is RouteSettings.KEEP:
        # for x-envoy-max-retries: requests with transfer parameters must not be retried, whatever the route says
        config["mutation_rules"] = {"allow_envoy": True}
    return {"name": PICK_FILTER, "disabled": True, "typed_config": config}


def refuses_unpicked(plan: InstallPlan) -> bool:
    """Tell whether the pick's filter fails open only to avoid cutting responses in progress."""
    return planned_body_mode(plan) is BodyMode.BUFFERED and plan.failure_mode is FailureMode.FAIL_CLOSE


def unpicked_filter() -> dict[str, Any]:
    """Return the filter that rejects requests without a pick; disabled by default like the pick's."""
    return {"name": UNPICKED_FILTER, "disabled": True, "typed_config": REFUSE_UNPICKED}


def response_filter(plan: InstallPlan) -> dict[str, Any]:
    """Return the filter that reads responses for which the pick left a note; others skip it."""
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
                    "failure_mode_allow": True,  # the response is already computed
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
    """Refer to Istio's own cluster of the picker (mTLS, no limit of 1024 requests), without a timeout for streams."""
    host = plan.picker_host
    return {"envoy_grpc": {"cluster_name": f"outbound|{GRPC_PORT}||{host}", "authority": host}}


def _skip_without_note() -> dict[str, Any]:
    # the predicate on :status is needed: without it the match is decided on request headers, which have no note
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
