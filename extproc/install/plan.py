"""What is to be installed: one value that the command fills in and every renderer reads. Decides nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

PICKER = "kvmesh-picker"
INDEXER = "kvmesh-indexer"
REDIS = "kvmesh-redis"
POOL_METADATA_KEY = "x-kvmesh-pool"  # gRPC initial metadata: tells the picker whose request it is
CLUSTER_DOMAIN = "cluster.local"


class Mode(StrEnum):
    """Where the picker's filter runs."""

    GATEWAY = "gateway"
    SIDECAR = "sidecar"  # in the sidecars of the clients
    AMBIENT_GATEWAY = "ambient-gateway"  # a gateway in the mesh, for clients in ambient


class Scope(StrEnum):
    """What the picker may read of the cluster."""

    MESH = "mesh"
    NAMESPACED = "namespaced"


class FailureMode(StrEnum):
    """What becomes of requests while no picker answers; the words of InferencePool and InferencePolicy."""

    FAIL_OPEN = "FailOpen"
    FAIL_CLOSE = "FailClose"


class BodyMode(StrEnum):
    """How Envoy hands request bodies over; the words of `kvmesh up --body-mode`."""

    DUPLEX = "duplex"
    BUFFERED = "buffered"


class RedisKind(StrEnum):
    """Who runs Redis."""

    BUNDLED = "bundled"  # one server with a disk, installed along
    EXTERNAL = "external"  # whatever the URL says: one server, Sentinels, a cluster


class MeshMembership(StrEnum):
    """How kvmesh's own pods are part of the mesh."""

    SIDECAR = "sidecar"
    AMBIENT = "ambient"
    NONE = "none"  # no mTLS: for trying things out


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTarget:
    """A pool's Service, as Envoy's cluster names it."""

    namespace: str
    name: str
    port: int = 8000  # of the Service
    pod_port: int | None = None  # None: the same
    selector: Mapping[str, str] | None = None  # labels of its pods; None: not known, nothing is made that needs them
    in_mesh: bool = True  # its pods speak mTLS; asked for ORIGINAL_DST alone, which cannot see it

    @property
    def api_port(self) -> int:
        """The port that its pods listen on."""
        return self.pod_port or self.port

    @property
    def identity(self) -> str:
        """What the picker calls it."""
        return f"{self.namespace}/{self.name}"

    @property
    def host(self) -> str:
        """The Service's name in DNS."""
        return f"{self.name}.{self.namespace}.svc.{CLUSTER_DOMAIN}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteTarget:
    """A host of the gateway, or one route of it, and the pool that it leads to."""

    host: str  # as the route says it; "*" for any
    port: int = 80  # of the gateway's listener (Gateway.spec.listeners[].port)
    route: str | None = None  # "<namespace>.<HTTPRoute>.<rule index>" or http[].name; None: all that forward
    pool: PoolTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayTarget:
    """A gateway whose Envoy is to ask the picker."""

    namespace: str
    name: str
    selector: Mapping[str, str]  # labels of its pods
    service_account: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientsTarget:
    """Client pods whose sidecars are to ask the picker."""

    namespace: str
    selector: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class IstioVersion:
    """A minor release of Istio."""

    minor: int  # of 1.x

    def __str__(self) -> str:
        return f"1.{self.minor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallPlan:
    """Everything that the rendered objects depend on."""

    istio: IstioVersion = IstioVersion(minor=27)
    mode: Mode = Mode.GATEWAY
    namespace: str = "kvmesh-system"
    create_namespace: bool = True
    scope: Scope = Scope.MESH
    root_namespace: str = "istio-system"
    image: str = "kvmesh:0.1.0"
    pools: tuple[PoolTarget, ...] = ()
    routes: tuple[RouteTarget, ...] = ()
    gateways: tuple[GatewayTarget, ...] = ()
    clients: tuple[ClientsTarget, ...] = ()
    failure_mode: FailureMode = FailureMode.FAIL_CLOSE
    body_mode: BodyMode | None = None  # None: the best that the release can do
    membership: MeshMembership = MeshMembership.SIDECAR
    redis: RedisKind = RedisKind.BUNDLED
    redis_url: str | None = None  # None: the bundled one
    redis_password_secret: str | None = None  # a Secret with the key `password`
    redis_username: str | None = None
    redis_sentinel_password_secret: str | None = None  # a Secret with the key `password`
    redis_ca_secret: str | None = None  # a Secret with the key `ca.crt`
    redis_tls_secret: str | None = None  # a Secret with `tls.crt` and `tls.key`, shown to Redis
    redis_image: str = "docker.io/valkey/valkey:8.1"
    redis_memory_mib: int = 2048  # of the bundled one, for its data
    redis_storage_gib: int = 8
    admin_token_secret: str | None = None  # a Secret with the key `token`; None: the one that `kvmesh install` makes
    hash_seed: str = "kvmesh"
    picker_replicas: int = 2  # at least; the HPA adds more
    picker_replicas_max: int = 10
    indexer_replicas: int = 2
    drain_seconds: int = 60  # above the longest time to a pod's first byte: what waits for it ends with the picker
    longest_queue_seconds: int = 300  # `queue_seconds` of the most patient class
    longest_stream_seconds: int = 900  # one answer, from its pick on
    log_level: str = "info"
    tokenizers_claim: str | None = None  # a PersistentVolumeClaim with the models' tokenizer folders, seen at /models
    monitoring: bool = False
    monitoring_namespace: str = "monitoring"
