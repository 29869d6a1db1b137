"""The clusters that istiod makes of a Service and its DestinationRule, as a gateway or a client's sidecar gets them.

Called by `base`. Of a DestinationRule it reads what an installation of ours may set, and refuses what it cannot judge.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.istiod.decode import UNITS_SECONDS
from tests.istiod.envoy_api import CLUSTER, new, pack

MAX = 4294967295  # what Istio sets in place of Envoy's 1024
HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
TLS = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
RAW = "type.googleapis.com/envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer"
LB_POLICIES = {"LEAST_REQUEST": "LEAST_REQUEST", "ROUND_ROBIN": "ROUND_ROBIN", "RANDOM": "RANDOM"}
KNOWN_RULE_FIELDS = frozenset({"loadBalancer", "connectionPool", "outlierDetection", "tls"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshService:
    """A ClusterIP Service with one port."""

    namespace: str
    name: str
    port: int
    is_http2: bool = False  # by the port's name or appProtocol: grpc, http2

    @property
    def host(self) -> str:
        return f"{self.name}.{self.namespace}.svc.cluster.local"

    @property
    def cluster(self) -> str:
        return f"outbound|{self.port}||{self.host}"


def outbound_cluster(service: MeshService, rules: Sequence[Mapping[str, Any]]) -> Any:
    """Return the cluster; `rules` are DestinationRules, of any hosts."""
    policy = _policy(service, rules)
    pool = policy.get("connectionPool", {})
    balancer = policy.get("loadBalancer", {})
    is_passthrough = balancer.get("simple") == "PASSTHROUGH"
    cluster: dict[str, Any] = {
        "name": service.cluster,
        "connect_timeout": pool.get("tcp", {}).get("connectTimeout", "10s"),
        "circuit_breakers": {"thresholds": [_thresholds(pool)]},
        "common_lb_config": _common_lb_config(policy),
        "metadata": {"filter_metadata": {"istio": {"services": [_names(service)]}}},
    }
    if is_passthrough:
        cluster |= {"type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED"}
    else:
        ads = {"eds_config": {"ads": {}, "resource_api_version": "V3"}, "service_name": service.cluster}
        simple = LB_POLICIES[balancer.get("simple", "LEAST_REQUEST")]
        cluster |= {"type": "EDS", "eds_cluster_config": ads, "lb_policy": simple}
    if "outlierDetection" in policy:
        cluster["outlier_detection"] = _outliers(policy["outlierDetection"])
    cluster |= _sockets(service, policy.get("tls", {}).get("mode"), is_passthrough=is_passthrough)
    message = new(CLUSTER, cluster)
    options = _http_options(service, pool)
    if options:
        pack(new(HTTP_OPTIONS, options), message.typed_extension_protocol_options[HTTP_OPTIONS])
    return message


def _names(service: MeshService) -> dict[str, str]:
    return {"host": service.host, "name": service.name, "namespace": service.namespace}


def _policy(service: MeshService, rules: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    found = [rule["spec"] for rule in rules if rule["spec"]["host"] == service.host]
    assert len(found) <= 1, f"two DestinationRules for {service.host}"
    policy: Mapping[str, Any] = found[0].get("trafficPolicy", {}) if found else {}
    assert set(policy) <= KNOWN_RULE_FIELDS, f"not judged here: {sorted(set(policy) - KNOWN_RULE_FIELDS)}"
    return policy


def _thresholds(pool: Mapping[str, Any]) -> dict[str, Any]:
    http, tcp = pool.get("http", {}), pool.get("tcp", {})
    return {
        "max_connections": tcp.get("maxConnections", MAX),
        "max_pending_requests": http.get("http1MaxPendingRequests", MAX),
        "max_requests": http.get("http2MaxRequests", MAX),
        "max_retries": http.get("maxRetries", MAX),
        "track_remaining": True,
    }


def _common_lb_config(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Failover and distribution weight localities, which Envoy does not take beside a `load_balancing_policy`."""
    locality = policy.get("loadBalancer", {}).get("localityLbSetting", {})
    if locality.get("enabled") is False:
        return {}
    fails_over = "outlierDetection" in policy and {"failover", "failoverPriority"} & set(locality)
    return {"locality_weighted_lb_config": {}} if fails_over or "distribute" in locality else {}


def _outliers(settings: Mapping[str, Any]) -> dict[str, Any]:
    names = {"interval": "interval", "baseEjectionTime": "base_ejection_time", "maxEjectionPercent": None}
    outliers: dict[str, Any] = {"enforcing_success_rate": 0}
    for name, own in names.items():
        if name in settings:
            outliers[own or "max_ejection_percent"] = settings[name]
    for name, own in (("consecutive5xxErrors", "5xx"), ("consecutiveGatewayErrors", "gateway_failure")):
        if name in settings:
            outliers[f"consecutive_{own}"] = settings[name]
            outliers[f"enforcing_consecutive_{own}"] = 100 if settings[name] else 0
    return outliers


def _sockets(service: MeshService, mode: str | None, *, is_passthrough: bool) -> dict[str, Any]:
    """Return the transport sockets: by endpoint where nothing is said (auto mTLS), else one for all."""
    mutual = {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": TLS,
            "common_tls_context": {"alpn_protocols": ["istio-peer-exchange", "istio"] + ["h2"] * service.is_http2},
            "sni": f"outbound_.{service.port}_._.{service.host}",
        },
    }
    plain = {"name": "envoy.transport_sockets.raw_buffer", "typed_config": {"@type": RAW}}
    if mode == "ISTIO_MUTUAL":
        return {"transport_socket": mutual}
    if mode == "DISABLE":
        return {}
    assert mode is None, f"not judged here: tls mode {mode}"
    if is_passthrough:
        return {}  # its hosts have no labels that would match
    labelled = {"name": "tlsMode-istio", "match": {"tlsMode": "istio"}, "transport_socket": mutual}
    return {
        "transport_socket_matches": [labelled, {"name": "tlsMode-disabled", "match": {}, "transport_socket": plain}]
    }


def _http_options(service: MeshService, pool: Mapping[str, Any]) -> dict[str, Any]:
    http = pool.get("http", {})
    common: dict[str, Any] = {}
    if "idleTimeout" in http:
        common["idle_timeout"] = _seconds(http["idleTimeout"])
    if http.get("maxRequestsPerConnection"):
        common["max_requests_per_connection"] = http["maxRequestsPerConnection"]
    if not service.is_http2 and http.get("h2UpgradePolicy") != "UPGRADE":
        if not common:
            return {}
        return {"common_http_protocol_options": common, "explicit_http_config": {"http_protocol_options": {}}}
    options: dict[str, Any] = {
        "explicit_http_config": {"http2_protocol_options": {"max_concurrent_streams": 1073741824}}
    }
    return options | ({"common_http_protocol_options": common} if common else {})


def _seconds(duration: str) -> str:
    for unit in ("ms", "s", "m", "h"):
        if duration.endswith(unit) and duration.removesuffix(unit).replace(".", "").isdecimal():
            return f"{float(duration.removesuffix(unit)) * UNITS_SECONDS[unit]:.9f}s"
    raise ValueError(duration)
