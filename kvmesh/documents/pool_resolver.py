"""Turns documents into pools: the declarations of pools and pods, the pods of each selector, and their ports. Pure.

A pool is an InferencePool v1, or a Service with the label `kvmesh.io/pool: "true"`. The fields are those of the CRD of
gateway-api-inference-extension v1 and of core/v1. `resolve_pools` does all of it for one snapshot; a `PoolResolver`
remembers unchanged parts.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv6Address, ip_address
from typing import Any, Generic, TypeVar

from kvmesh.documents.document_fields import FieldError, items_at, mapping_at, port_number, text_at, texts_at
from kvmesh.documents.document_kinds import INFERENCE_GROUP
from kvmesh.documents.documents import Document, DocumentProblem, document_key
from kvmesh.documents.pools import (
    CORDON,
    EVENTS_ANNOTATION,
    MODEL_ANNOTATION,
    POOL_LABEL,
    REPLAY_ANNOTATION,
    EventTemplates,
    Pool,
    PoolEndpoint,
    ResolvedPools,
)

_TEMPLATE = re.compile(r"tcp://\{ip\}:(?P<port>[0-9]{1,5})")
_ENDED = ("Succeeded", "Failed")  # phases: the address is free, or another pod's by now
T = TypeVar("T")
NAME_TAKEN = "an InferencePool of the same name is the pool; rename one of them, or take the label off the Service"
_Label = tuple[str, str, str]  # namespace, name, value


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """One pod that has an address."""

    name: str  # "namespace/name"
    namespace: str
    labels: Mapping[str, str]
    host: str  # as written before ":PORT", IPv6 bracketed; the node's own with hostNetwork
    ready: bool
    terminating: bool
    cordoned: bool
    ports: Mapping[str, int]  # named container ports


def pod_facts(document: Document) -> PodFacts | None:
    """Return the facts about a pod; None while it has no address and after it has ended. Raise FieldError."""
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
        cordoned="true" in (labels.get(CORDON), texts_at(document, "metadata.annotations").get(CORDON)),
        ports=_named_ports(document),
    )


def _host(address: str) -> str:
    try:
        parsed = ip_address(address)
    except ValueError:
        raise FieldError("status.podIP", f"must be an IP address, not {address!r}") from None
    return f"[{parsed}]" if isinstance(parsed, IPv6Address) else str(parsed)


def _is_ready(document: Document) -> bool:
    """Return the kubelet's verdict (container probes and readiness gates together); ready without conditions."""
    conditions = items_at(document, "status.conditions")
    if not conditions:
        return True  # written by hand: no kubelet sets conditions in a folder of documents
    return any(each.get("type") == "Ready" and each.get("status") == "True" for _, each in conditions)


def _named_ports(document: Document) -> dict[str, int]:
    ports: dict[str, int] = {}
    # containers first: an init container keeps running only as a sidecar (restartPolicy Always)
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
        raise FieldError(f"{where}.{error.path}", error.message) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """A pool document's declaration: which pods, at which ports."""

    pool: Pool  # without its endpoints
    namespace: str
    selector: Mapping[str, str]  # never empty
    ports: tuple[int | str, ...]  # numbers, or one name of a container port


def is_pool(document: Document) -> bool:
    """Tell whether a document declares a pool of ours."""
    key = document_key(document)
    if key.kind == "InferencePool":
        return key.group == INFERENCE_GROUP
    if key.kind != "Service" or key.group:
        return False
    return texts_at(document, "metadata.labels").get(POOL_LABEL) == "true"


def pool_spec(document: Document) -> PoolSpec | None:
    """Read the document of a pool; None if it declares none. Raise FieldError with the path of the fault."""
    if not is_pool(document):
        return None
    key = document_key(document)
    selector, ports = _inference_pool(document) if key.kind == "InferencePool" else _service(document)
    annotations = texts_at(document, "metadata.annotations")
    pool = Pool(
        name=f"{key.namespace}/{key.name}",
        kind=key.kind,
        model=annotations.get(MODEL_ANNOTATION) or None,
        labels=dict(texts_at(document, "metadata.labels")),
        event_sources=_event_templates(annotations),
    )
    return PoolSpec(pool=pool, namespace=key.namespace, selector=selector, ports=ports)


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
    if target is None:  # the default that the API server would fill in
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


def resolve_pools(documents: Mapping[str, tuple[Document, ...]]) -> ResolvedPools:
    """Resolve the pools of `Snapshot.documents` (InferencePool, Service, Pod, InferencePoolImport; others ignored).

    An invalid pool is left out and becomes a problem; use a `PoolResolver` to keep its last good state.
    """
    return PoolResolver().resolve(documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read(Generic[T]):
    """The result of reading one document; the document is kept alive, so that its id() stays unique."""

    document: Document
    value: T | None
    problem: DocumentProblem | None = None


@dataclass(slots=True)
class PoolResolver:
    """`resolve_pools` with a memory: fast if little changes, and invalid documents keep their last good state."""

    _pods: dict[int, _Read[PodFacts]] = field(default_factory=dict)  # by the document's id()
    _specs: dict[int, _Read[PoolSpec]] = field(default_factory=dict)
    _good_pods: dict[str, PodFacts] = field(default_factory=dict)  # by name
    _last_good: dict[tuple[str, str], PoolSpec] = field(default_factory=dict)  # by kind and name
    _made: dict[str, "_Made"] = field(default_factory=dict)  # by the pool's name

    def resolve(self, documents: Mapping[str, tuple[Document, ...]]) -> ResolvedPools:
        """Do the same as `resolve_pools`; an unchanged pool is the same object as last time."""
        self._pods = {
            id(each): self._pods.get(id(each)) or _read(each, pod_facts, reason="pod-unreadable")
            for each in documents.get("Pod", ())
        }
        self._specs = {
            id(each): self._specs.get(id(each)) or _read(each, pool_spec, reason="pool-invalid")
            for each in (*documents.get("InferencePool", ()), *documents.get("Service", ()))
        }
        specs, problems = self._usable_specs()
        pods = _by_label(specs, self._usable_pods())
        pools: dict[str, Pool] = {}
        self._made = {name: _pool(specs[name], pods, self._made.get(name)) for name in sorted(specs)}
        for name, made in self._made.items():
            pools[name] = made.pool
            problems += made.problems
        problems += [read.problem for read in self._pods.values() if read.problem is not None]
        imports = [document_key(each) for each in documents.get("InferencePoolImport", ())]
        names = tuple(sorted(f"{key.namespace}/{key.name}" for key in imports))
        return ResolvedPools(pools=pools, problems=tuple(problems), imports=names)

    def _usable_pods(self) -> Iterable[PodFacts]:
        """Return the facts about each pod; the last good ones for a pod whose document has become invalid."""
        pods = {read.value.name: read.value for read in self._pods.values() if read.value is not None}
        for read in self._pods.values():
            if read.problem is not None:
                key = document_key(read.document)
                before = self._good_pods.get(f"{key.namespace}/{key.name}")
                if before is not None:
                    pods[before.name] = before
        self._good_pods = pods
        return pods.values()

    def _usable_specs(self) -> tuple[dict[str, PoolSpec], list[DocumentProblem]]:
        """Return one spec per name: the InferencePool's if a Service has the same; the last good one if invalid."""
        specs: dict[str, PoolSpec] = {}
        problems: list[DocumentProblem] = []
        good: dict[tuple[str, str], PoolSpec] = {}
        for read in self._specs.values():
            key = document_key(read.document)
            where = (key.kind, f"{key.namespace}/{key.name}")
            spec = read.value
            if read.problem is not None:
                spec = self._last_good.get(where)
                problems.append(read.problem)
            if spec is None:
                continue
            good[where] = spec
            if specs.setdefault(spec.pool.name, spec) is not spec:  # InferencePools come first
                where_taken = f"{spec.pool.kind} {spec.pool.name}"
                problems.append(DocumentProblem(reason="pool-name-taken", where=where_taken, words=NAME_TAKEN))
        self._last_good = good
        return specs, problems


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    pool: Pool
    spec: PoolSpec
    pods: tuple[PodFacts, ...]
    problems: tuple[DocumentProblem, ...]


def _read(document: Document, read: Callable[[Document], T | None], *, reason: str) -> _Read[T]:
    try:
        return _Read(document=document, value=read(document))
    except FieldError as error:
        problem = DocumentProblem(reason=reason, where=str(document_key(document)), words=str(error))
        return _Read(document=document, value=None, problem=problem)


def _by_label(specs: Mapping[str, PoolSpec], pods: Iterable[PodFacts]) -> Mapping[_Label, list[PodFacts]]:
    asked = {(spec.namespace, name, value) for spec in specs.values() for name, value in spec.selector.items()}
    found: dict[_Label, list[PodFacts]] = defaultdict(list)
    for pod in pods:
        for name, value in pod.labels.items():
            label = (pod.namespace, name, value)
            if label in asked:
                found[label].append(pod)
    return found


def _pool(spec: PoolSpec, pods: Mapping[_Label, list[PodFacts]], before: _Made | None) -> _Made:
    asked = spec.selector.items()
    # start from the rarest label: pools often share all labels but one
    fewest = min((pods.get((spec.namespace, name, value), []) for name, value in asked), key=len)
    taken = tuple(sorted((pod for pod in fewest if asked <= pod.labels.items()), key=lambda pod: pod.name))
    if before is not None and before.spec == spec and before.pods == taken:
        return before
    endpoints: dict[str, PoolEndpoint] = {}
    nameless = [pod.name for pod in taken if not _add_endpoints(endpoints, pod, spec.ports)]
    pool = replace(spec.pool, endpoints=tuple(endpoints.values()))
    if before is not None and before.pool == pool:
        pool = before.pool
    return _Made(pool=pool, spec=spec, pods=taken, problems=_without_port(spec, nameless))


def _add_endpoints(endpoints: dict[str, PoolEndpoint], pod: PodFacts, ports: Sequence[int | str]) -> bool:
    for place, wanted in enumerate(ports):
        port = pod.ports.get(wanted) if isinstance(wanted, str) else wanted
        if port is None:
            return False
        endpoint = PoolEndpoint(
            address=f"{pod.host}:{port}",
            pod=pod.name,
            rank=place if len(ports) > 1 else None,
            ready=pod.ready,
            terminating=pod.terminating,
            cordoned=pod.cordoned,
            labels=pod.labels,
        )
        # two pods at one address: a terminating one, and its successor on the same node (hostNetwork)
        before = endpoints.get(endpoint.address)
        if before is None or _usefulness(endpoint) > _usefulness(before):
            endpoints[endpoint.address] = endpoint
    return True


def _usefulness(endpoint: PoolEndpoint) -> tuple[bool, bool]:
    return endpoint.ready, not endpoint.terminating


def _without_port(spec: PoolSpec, pods: Sequence[str]) -> tuple[DocumentProblem, ...]:
    if not pods:
        return ()
    more = f" and {len(pods) - 1} more" if len(pods) > 1 else ""
    message = f"targetPort {spec.ports[0]!r} is no container port's name in pod {pods[0]}{more}: left out"
    return (DocumentProblem(reason="port-name-unknown", where=f"{spec.pool.kind} {spec.pool.name}", words=message),)
