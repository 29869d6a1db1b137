"""Which listener, filter, route and cluster a patch is for, by istiod's rules.

Called by `apply`; an absent condition matches everything.
"""

from collections.abc import Mapping
from typing import Any

from tests.istiod.base import Proxy
from tests.istiod.releases import VHOST_DOMAIN_NAME, Release

VIRTUAL_LISTENERS = ("virtualInbound", "virtualOutbound")
Match = Mapping[str, Any]


def context_of(proxy: Proxy, name: str) -> str:
    """Return the patch context of a listener, route configuration or cluster of this name."""
    if proxy.is_gateway:
        return "GATEWAY"
    is_inbound = name == "virtualInbound" or name.startswith("inbound|")
    return "SIDECAR_INBOUND" if is_inbound else "SIDECAR_OUTBOUND"


def listener_matches(match: Match, listener: Any, *, apply_to: str) -> bool:
    wanted = match.get("listener", {})
    if wanted.get("name", listener.name) != listener.name:
        return False
    if apply_to != "LISTENER" and listener.name in VIRTUAL_LISTENERS:
        return True  # the port is looked for in the filter chain
    return wanted.get("portNumber", 0) in (0, listener.address.socket_address.port_value)


def chain_matches(match: Match, listener: Any, chain: Any) -> bool:
    wanted = match.get("listener", {})
    at = chain.filter_chain_match
    port = wanted.get("portNumber", 0)
    if listener.name in VIRTUAL_LISTENERS and port and at.destination_port.value != port:
        return False
    inner = wanted.get("filterChain", {})
    protocols = [each for each in inner.get("applicationProtocols", "").split(",") if each]
    return (
        inner.get("name", chain.name) == chain.name
        and ("sni" not in inner or inner["sni"] in at.server_names)
        and inner.get("transportProtocol", at.transport_protocol) == at.transport_protocol
        and set(protocols) <= set(at.application_protocols)
        and inner.get("destinationPort", 0) in (0, at.destination_port.value)
    )


def network_filter_name(match: Match) -> str | None:
    """Return the network filter that the patch names."""
    name: str | None = match.get("listener", {}).get("filterChain", {}).get("filter", {}).get("name")
    return name


def http_filter_name(match: Match) -> str | None:
    """Return the HTTP filter that the patch names."""
    named = match.get("listener", {}).get("filterChain", {}).get("filter", {}).get("subFilter", {})
    name: str | None = named.get("name")
    return name


def routes_match(match: Match, routes: Any, proxy: Proxy) -> bool:
    """Tell whether the route configuration is meant."""
    wanted = match.get("routeConfiguration", {})
    if wanted.get("name", routes.name) != routes.name:
        return False
    port = wanted.get("portNumber", 0)
    if not proxy.is_gateway:
        own = int(routes.name) if routes.name.isdecimal() else 0
        return port in (0, own)
    # http.80 or https.443.<port name>.<gateway>.<namespace>
    own_port, port_name, gateway = _gateway_route_name(routes.name)
    servers = proxy.server_ports.get(own_port, (own_port,))
    return (
        (port == 0 or port in servers)
        and wanted.get("portName", port_name) == port_name
        and wanted.get("gateway", gateway) == gateway
    )


def host_matches(match: Match, host: Any, *, release: Release) -> bool:
    wanted = match.get("routeConfiguration", {}).get("vhost", {})
    if wanted.get("name", host.name) != host.name:
        return False
    domain = wanted.get("domainName") if release.minor >= VHOST_DOMAIN_NAME else None
    return domain is None or domain in host.domains


def route_matches(match: Match, route: Any) -> bool:
    wanted = match.get("routeConfiguration", {}).get("vhost", {}).get("route", {})
    action = {"route": "ROUTE", "redirect": "REDIRECT", "direct_response": "DIRECT_RESPONSE"}
    return wanted.get("name", route.name) == route.name and wanted.get("action", "ANY") in (
        "ANY",
        action.get(route.WhichOneof("action")),
    )


def names_a_route(match: Match) -> bool:
    return "route" in match.get("routeConfiguration", {}).get("vhost", {})


def cluster_matches(match: Match, cluster: Any) -> bool:
    wanted = match.get("cluster", {})
    if "name" in wanted:
        return bool(wanted["name"] == cluster.name)
    # outbound|8000||vllm-llama.llm.svc.cluster.local
    _, port, subset, service = cluster.name.split("|") if cluster.name.count("|") == 3 else ("", "0", "", "")
    return (
        wanted.get("subset", subset) == subset
        and wanted.get("service", service) == service
        and wanted.get("portNumber", 0) in (0, int(port))
    )


def _gateway_route_name(name: str) -> tuple[int, str, str]:
    protocol, _, rest = name.partition(".")
    port, _, rest = rest.partition(".")
    if protocol == "http":
        return int(port), "", ""
    port_name, _, gateway = rest.partition(".")
    name_of_gateway, _, namespace = gateway.partition(".")
    return int(port), port_name, f"{namespace}/{name_of_gateway}"
