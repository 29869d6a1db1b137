"""What documents declare of pools and pods: which pods a pool selects, and where a pod can be reached. Pure.

A pool is an InferencePool v1, or a Service with the label `kvmesh.io/pool: "true"`. The fields are those of the CRD of
gateway-api-inference-extension v1 and of core/v1.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Any

from kvmesh.documents.document_fields import FieldError, items_at, mapping_at, port_number, text_at, texts_at
from kvmesh.documents.documents import Document, document_key
from kvmesh.documents.pools import (
    EVENTS_ANNOTATION,
    MODEL_ANNOTATION,
    POOL_LABEL,
    REPLAY_ANNOTATION,
    EventTemplates,
)

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


INFERENCE_GROUP = "inference.networking.k8s.io"
_TEMPLATE = re.compile(r"tcp://\{ip\}:(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """What a pool wants: which pods, at which ports."""

    name: str  # "namespace/name"
    kind: str
    namespace: str
    selector: Mapping[str, str]  # never empty
    ports: tuple[int | str, ...]  # numbers, or one name of a container port
    model: str | None
    labels: Mapping[str, str]
    event_sources: EventTemplates | None


def is_pool(document: Document) -> bool:
    """Tell whether a document declares a pool of ours."""
    key = document_key(document)
    if key.kind == "InferencePool":
        return key.group == INFERENCE_GROUP
    if key.kind != "Service" or key.group:
        return False
    return texts_at(document, "metadata.labels").get(POOL_LABEL) == "true"


def pool_spec(document: Document) -> PoolSpec:
    """Read the document of a pool. Raises FieldError with the path of what is wrong."""
    key = document_key(document)
    selector, ports = _inference_pool(document) if key.kind == "InferencePool" else _service(document)
    annotations = texts_at(document, "metadata.annotations")
    return PoolSpec(
        name=f"{key.namespace}/{key.name}",
        kind=key.kind,
        namespace=key.namespace,
        selector=selector,
        ports=ports,
        model=annotations.get(MODEL_ANNOTATION) or None,
        labels=dict(texts_at(document, "metadata.labels")),
        event_sources=_event_templates(annotations),
    )


def _inference_pool(document: Document) -> tuple[Mapping[str, str], tuple[int | str, ...]]:
    selector = texts_at(document, "spec.selector.matchLabels")
    if not selector:
        raise FieldError("spec.selector.matchLabels", "must name a label: an empty selector would take all pods")
    ports: list[int | str] = []
    for where, item in items_at(document, "spec.targetPorts"):
        number = port_number(item.get("number"), f"{where}.number")
        if number in ports:
            raise FieldError(f"{where}.number", f"{number} is there twice; each port is one data-parallel rank")
        ports.append(number)
    if not ports:
        raise FieldError("spec.targetPorts", "must have at least one port")
    return selector, tuple(ports)


def _service(document: Document) -> tuple[Mapping[str, str], tuple[int | str, ...]]:
    selector = texts_at(document, "spec.selector")
    if not selector:
        raise FieldError("spec.selector", "must name a label: a Service without selector has no pods to follow")
    ports = items_at(document, "spec.ports")
    if not ports:
        raise FieldError("spec.ports", "must have at least one port")
    where, port = next((each for each in ports if str(each[1].get("name", "")).startswith("http")), ports[0])
    return selector, (_target_port(port, where),)


def _target_port(port: Mapping[str, Any], where: str) -> int | str:
    target = port.get("targetPort")
    if isinstance(target, str) and target:
        return target
    if target is None:  # as the API server would have filled it in
        return port_number(port.get("port"), f"{where}.port")
    return port_number(target, f"{where}.targetPort")


def _event_templates(annotations: Mapping[str, str]) -> EventTemplates | None:
    events = _template(annotations, EVENTS_ANNOTATION)
    replay = _template(annotations, REPLAY_ANNOTATION)
    if events is None:
        if replay is not None:
            raise FieldError(_annotation(REPLAY_ANNOTATION), f"needs {EVENTS_ANNOTATION} as well")
        return None
    return EventTemplates(events=events, replay=replay)


def _template(annotations: Mapping[str, str], name: str) -> str | None:
    text = annotations.get(name)
    if not text:
        return None
    template = f"tcp://{{ip}}:{text}" if text.isascii() and text.isdigit() else text
    match = _TEMPLATE.fullmatch(template)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise FieldError(_annotation(name), f'must be a port ("5557") or "tcp://{{ip}}:5557", not {text!r}')
    return template


def _annotation(name: str) -> str:
    return f'metadata.annotations["{name}"]'
