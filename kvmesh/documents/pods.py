"""What a pod's document says of where it can be reached, and whether it wants to be. Pure; for `pool_resolver`."""

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Any

from kvmesh.documents.document_fields import FieldError, items_at, mapping_at, port_number, text_at, texts_at
from kvmesh.documents.documents import Document, document_key

_ENDED = ("Succeeded", "Failed")  # phases: the address belongs to nobody, or to another pod by now


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """One pod that has an address."""

    name: str  # "namespace/name"
    namespace: str
    labels: Mapping[str, str]
    host: str  # as it stands before ":PORT", IPv6 bracketed; the node's own with hostNetwork
    ready: bool
    terminating: bool
    ports: Mapping[str, int]  # named container ports


def pod_facts(document: Document) -> PodFacts | None:
    """Return what is known of a pod, or None while it has no address and after it has ended. Raises FieldError."""
    key = document_key(document)
    labels = texts_at(document, "metadata.labels")
    address = text_at(document, "status.podIP")
    if not address or text_at(document, "status.phase") in _ENDED:
        return None
    return PodFacts(
        name=f"{key.namespace}/{key.name}",
        namespace=key.namespace,
        labels=labels,
        host=_host(address),
        ready=_is_ready(document),
        terminating=bool(mapping_at(document, "metadata").get("deletionTimestamp")),
        ports=_named_ports(document),
    )


def _host(address: str) -> str:
    try:
        parsed = ip_address(address)
    except ValueError:
        raise FieldError("status.podIP", f"must be an IP address, not {address!r}") from None
    return f"[{parsed}]" if isinstance(parsed, IPv6Address) else str(parsed)


def _is_ready(document: Document) -> bool:
    """Tell what the kubelet says (container probes and readiness gates together); a pod without conditions is ready."""
    conditions = items_at(document, "status.conditions")
    if not conditions:
        return True  # written by hand: a folder of documents has nobody who would set conditions
    return any(each.get("type") == "Ready" and each.get("status") == "True" for _, each in conditions)


def _named_ports(document: Document) -> dict[str, int]:
    ports: dict[str, int] = {}
    # containers first: an init container goes on running only as a sidecar (restartPolicy Always)
    for where, container in [*items_at(document, "spec.containers"), *items_at(document, "spec.initContainers")]:
        if ".initContainers" in where and container.get("restartPolicy") != "Always":
            continue
        for place, port in _container_ports(container, where):
            name = port.get("name")
            if isinstance(name, str) and name:
                ports.setdefault(name, port_number(port.get("containerPort"), f"{place}.containerPort"))
    return ports


def _container_ports(container: Mapping[str, Any], where: str) -> list[tuple[str, Mapping[str, Any]]]:
    try:
        return [(f"{where}.{place}", port) for place, port in items_at(container, "ports")]
    except FieldError as error:
        raise FieldError(f"{where}.{error.path}", error.words) from None
