"""EnvoyFilter documents as patches: what istiod's webhook refuses, which proxies they are for, and in which order.

Called by `apply`. Order: priority; then the root namespace; then age; then `name.namespace`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.istiod.base import ROOT_NAMESPACE, Proxy
from tests.istiod.decode import Decoder, UndecodableError
from tests.istiod.releases import Release

GATEWAY_LABEL = "gateway.networking.k8s.io/gateway-name"
VALUE_TYPES: Mapping[str, str] = {
    "CLUSTER": "envoy.config.cluster.v3.Cluster",
    "FILTER_CHAIN": "envoy.config.listener.v3.FilterChain",
    "HTTP_FILTER": "envoy.extensions.filters.network.http_connection_manager.v3.HttpFilter",
    "HTTP_ROUTE": "envoy.config.route.v3.Route",
    "LISTENER": "envoy.config.listener.v3.Listener",
    "NETWORK_FILTER": "envoy.config.listener.v3.Filter",
    "ROUTE_CONFIGURATION": "envoy.config.route.v3.RouteConfiguration",
    "VIRTUAL_HOST": "envoy.config.route.v3.VirtualHost",
}
OPERATIONS = ("MERGE", "ADD", "REMOVE", "REPLACE", "INSERT_FIRST", "INSERT_BEFORE", "INSERT_AFTER")
INSERTIONS = ("INSERT_FIRST", "INSERT_BEFORE", "INSERT_AFTER")
CONTEXTS = ("ANY", "GATEWAY", "SIDECAR_INBOUND", "SIDECAR_OUTBOUND")


class RefusedFilterError(Exception):
    """istiod's webhook would not admit the document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One of a filter's `configPatches`."""

    name: str  # namespace/name[index]
    apply_to: str
    operation: str
    context: str
    match: Mapping[str, Any]
    value: Any  # a typed message, None for REMOVE
    dropped: tuple[str, ...]  # fields of the value that the release does not know
    proxy_version: str | None


def patches_for(proxy: Proxy, documents: Iterable[Mapping[str, Any]], *, release: Release) -> list[Patch]:
    """Return the patches of all filters that select this proxy, in order; raise RefusedFilterError."""
    admitted = [(document, _admitted(document, release=release)) for document in documents]
    chosen = [(document, patches) for document, patches in admitted if _selects(document, proxy)]
    chosen.sort(key=lambda each: _order(each[0]))
    return [patch for _, patches in chosen for patch in patches]


def is_for(patch: Patch, proxy: Proxy) -> bool:
    """Tell whether the patch is for proxies of this version."""
    return patch.proxy_version is None or re.search(patch.proxy_version, proxy.version) is not None


def _order(document: Mapping[str, Any]) -> tuple[int, bool, str, str]:
    meta = document["metadata"]
    return (
        document["spec"].get("priority", 0),
        meta["namespace"] != ROOT_NAMESPACE,
        meta.get("creationTimestamp", ""),
        f"{meta['name']}.{meta['namespace']}",
    )


def _selects(document: Mapping[str, Any], proxy: Proxy) -> bool:
    namespace, spec = document["metadata"]["namespace"], document["spec"]
    if namespace not in (proxy.namespace, ROOT_NAMESPACE):
        return False
    if "targetRefs" in spec:  # of the proxy's own namespace
        gateway = proxy.labels.get(GATEWAY_LABEL)
        return namespace == proxy.namespace and any(
            reference["kind"] == "Gateway" and reference["name"] == gateway for reference in spec["targetRefs"]
        )
    wanted = spec.get("workloadSelector", {}).get("labels", {})
    return all(proxy.labels.get(key) == value for key, value in wanted.items())


def _admitted(document: Mapping[str, Any], *, release: Release) -> list[Patch]:
    meta, spec = document["metadata"], document["spec"]
    if document["kind"] != "EnvoyFilter" or document["apiVersion"] != "networking.istio.io/v1alpha3":
        raise RefusedFilterError(f"{document['apiVersion']} {document['kind']} is no EnvoyFilter")
    if "workloadSelector" in spec and "targetRefs" in spec:
        raise RefusedFilterError("only one of targetRefs or workloadSelector can be set")
    full_name = f"{meta['namespace']}/{meta['name']}"
    return [_patch(f"{full_name}[{i}]", each, release=release) for i, each in enumerate(spec["configPatches"])]


def _patch(name: str, document: Mapping[str, Any], *, release: Release) -> Patch:
    apply_to, match = document["applyTo"], document.get("match", {})
    operation, value = document["patch"]["operation"], document["patch"].get("value")
    context = match.get("context", "ANY")
    version = match.get("proxy", {}).get("proxyVersion")
    if apply_to not in VALUE_TYPES or operation not in OPERATIONS or context not in CONTEXTS:
        raise RefusedFilterError(f"{name}: {apply_to} {operation} {context} is not known here")
    if (value is None) != (operation == "REMOVE"):
        raise RefusedFilterError(f"{name}: a value is needed, except to remove")
    _check_typed_config(name, apply_to, operation, value)
    _check_version(name, version)
    decoder = Decoder(release)
    try:
        message = None if value is None else decoder.message(VALUE_TYPES[apply_to], value)
    except UndecodableError as error:
        raise RefusedFilterError(f"{name}: {error}") from error
    if operation in INSERTIONS and apply_to not in ("HTTP_FILTER", "NETWORK_FILTER", "HTTP_ROUTE"):
        operation = "ADD"  # istiod makes of it what it can
    return Patch(
        name=name,
        apply_to=apply_to,
        operation=operation,
        context=context,
        match=match,
        value=message,
        dropped=tuple(decoder.dropped),
        proxy_version=version,
    )


def _check_typed_config(name: str, apply_to: str, operation: str, value: Mapping[str, Any] | None) -> None:
    if apply_to in ("HTTP_FILTER", "NETWORK_FILTER") and operation in (*INSERTIONS, "ADD", "REPLACE"):
        assert value is not None
        if not value.get("name") or "@type" not in value.get("typed_config", {}):
            raise RefusedFilterError(f"{name}: a filter needs a name and a typed_config with its @type")


def _check_version(name: str, version: str | None) -> None:
    """Go's regular expressions have no assertions but ^ $ and word borders."""
    if version is None:
        return
    try:
        re.compile(version)
    except re.error as error:
        raise RefusedFilterError(f"{name}: proxyVersion: {error}") from error
    if re.search(r"\(\?[=!<]", version):
        raise RefusedFilterError(f"{name}: proxyVersion: Go's regular expressions know no look-around")


def documents_of(documents: Iterable[Mapping[str, Any]], kind: str) -> Sequence[Mapping[str, Any]]:
    """Return those of that kind."""
    return [document for document in documents if document["kind"] == kind]
