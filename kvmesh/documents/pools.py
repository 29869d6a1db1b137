"""Pools and their endpoints. Values; the indexer follows the endpoints' events, the picker picks among them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmesh.blocks.source import EventAddresses
from kvmesh.documents.documents import DocumentProblem

POOL_LABEL = "kvmesh.io/pool"  # on a Service: "true" makes it a pool
MODEL_ANNOTATION = "kvmesh.io/model"
EVENTS_ANNOTATION = "kvmesh.io/events-port"
REPLAY_ANNOTATION = "kvmesh.io/replay-port"
CORDON = "kvmesh.io/cordon"  # label or annotation of a pod: "true" keeps new requests away


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEndpoint:
    """One place that serves requests: a pod, or one data-parallel rank of a pod with a port for each."""

    address: str  # IP:PORT, IPv6 bracketed
    pod: str = ""  # "namespace/name", "" without Kubernetes
    rank: int | None = None  # index of the port if the pool has several target ports, else None
    ready: bool = True
    terminating: bool = False  # gets no new requests, finishes its current ones
    cordoned: bool = False  # the same by its operator's decision, until that changes
    labels: Mapping[str, str] = field(default_factory=dict)  # the pod's


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTemplates:
    """Where the pods of a pool publish their KV events, for vLLM without `GET /kv_event_sources`."""

    events: str  # ZMQ address with `{ip}`, of rank 0: "tcp://{ip}:5557"
    replay: str | None = None

    def addresses(self, endpoint: PoolEndpoint) -> EventAddresses:
        """Return an endpoint's own addresses; rank r is r ports above, as vLLM publishes it."""
        host = endpoint.address.rpartition(":")[0]
        return EventAddresses(
            events=_of_rank(self.events, host, endpoint.rank or 0),
            replay=_of_rank(self.replay, host, endpoint.rank or 0) if self.replay is not None else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Endpoints that serve the same models, and their declarations."""

    name: str  # "namespace/name"; "" is the static pool of --endpoints
    kind: str  # "InferencePool" | "Service" | "static"
    endpoints: tuple[PoolEndpoint, ...] = ()  # sorted by pod and rank; each address once
    model: str | None = None  # None if learned from the pods' /v1/models
    labels: Mapping[str, str] = field(default_factory=dict)
    event_sources: EventTemplates | None = None  # None if the pods are asked


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPools:
    """All pools of a snapshot."""

    pools: Mapping[str, Pool]  # by name, sorted
    problems: tuple[DocumentProblem, ...] = ()
    imports: tuple[str, ...] = ()  # InferencePoolImports ("namespace/name"): known, served in other clusters


def pool_seed(hash_seed: str, pool: str) -> str:
    """Return the seed of a pool's index namespace, so that no pool finds another's blocks; the plain seed for ""."""
    return f"{hash_seed}/{pool}" if pool else hash_seed


def _of_rank(template: str, host: str, rank: int) -> str:
    base, _, port = template.format(ip=host).rpartition(":")
    return f"{base}:{int(port) + rank}"
