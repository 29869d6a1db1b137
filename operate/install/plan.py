"""The install plan: filled in by the command line, read by every renderer. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvmesh.settings import setting

PICKER = "kvmesh-picker"
INDEXER = "kvmesh-indexer"
REDIS = "kvmesh-redis"
POOL_METADATA_KEY = "x-kvmesh-pool"  # gRPC initial metadata: names a request's pool to the picker
CLUSTER_DOMAIN = "cluster.local"
TRUST_DOMAIN = "cluster.local"  # for istiod the mesh's own; ztunnel compares literally
GRPC_PORT = 9002  # of the picker, for Envoy
PICKER_ADMIN_PORT = 9090

PICKER_IDLE_TIMEOUT = "3600s"  # for gateways' connections to the picker
INDEXER_ADMIN_PORT = 9091
REDIS_PORT = 6379
REDIS_IMAGE = "docker.io/valkey/valkey:8.1"
POD_KEY = "api-key"  # key in a Secret
GATEWAY_LABEL = "gateway.networking.k8s.io/gateway-name"  # set by Istio on pods of a Gateway API gateway
SECRET_KEY = re.compile(r"[-._A-Za-z0-9]{1,253}")


class Mode(StrEnum):
    """Where the picker's filter runs."""

    GATEWAY = "gateway"
    SIDECAR = "sidecar"  # in the sidecars of the clients
    AMBIENT_GATEWAY = "ambient-gateway"  # a gateway in the mesh, for clients in ambient
    INFERENCE_POOL = "inferencepool"  # no filter of ours: Istio's own for InferencePools


class Scope(StrEnum):
    """The namespaces that the picker may read."""

    MESH = "mesh"
    NAMESPACED = "namespaced"


class FailureMode(StrEnum):
    """Handling of requests while no picker answers; values of InferencePool and InferencePolicy."""

    FAIL_OPEN = "FailOpen"
    FAIL_CLOSE = "FailClose"


class BodyMode(StrEnum):
    """How Envoy sends request bodies; values of `kvmesh up --body-mode`."""

    DUPLEX = "duplex"
    BUFFERED = "buffered"


class RedisKind(StrEnum):
    """Who runs Redis."""

    BUNDLED = "bundled"  # one server with a disk, part of the installation
    EXTERNAL = "external"  # single server, Sentinel or Cluster, by the URL


class RouteSettings(StrEnum):
    """Timeouts and retries of the routes that ask the picker."""

    KEEP = "keep"  # unchanged; the picker forbids retries of single requests
    REPLACE = "replace"  # one timeout for the longest wait plus answer, and retries only before a pod begins


class PullPolicy(StrEnum):
    """When a node pulls the image; Kubernetes' values."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class MeshMembership(StrEnum):
    """How kvmesh's own pods are part of the mesh."""

    SIDECAR = "sidecar"
    AMBIENT = "ambient"
    NONE = "none"  # no mTLS: for trials


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTarget:
    """A pool's Service, as Envoy's cluster names it."""

    namespace: str
    name: str
    port: int = 8000  # of the Service
    pod_port: int | None = None  # None if equal to `port`
    selector: Mapping[str, str] | None = None  # labels of its pods; None if unknown, then no objects that need them
    in_mesh: bool = True  # its pods speak mTLS
    has_rule: bool = False  # the user has a DestinationRule for it: Istio uses one per host, so ours is left out

    @property
    def api_port(self) -> int:
        """The port of its pods."""
        return self.pod_port or self.port

    @property
    def identity(self) -> str:
        """The pool's name in the picker."""
        return f"{self.namespace}/{self.name}"

    @property
    def host(self) -> str:
        """The Service's DNS name."""
        return f"{self.name}.{self.namespace}.svc.{CLUSTER_DOMAIN}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteTarget:
    """A host of the gateway, or one of its routes, and its pool."""

    host: str  # as in the route; "*" for any
    port: int | None = None  # of the gateway's listener (Gateway.spec.listeners[].port), or None for all
    route: str | None = None  # "<namespace>.<HTTPRoute>.<rule index>" or http[].name; None for all forwarding routes
    pool: PoolTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayTarget:
    """A gateway whose Envoy asks the picker."""

    namespace: str
    name: str
    selector: Mapping[str, str]  # labels of its pods
    service_account: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientsTarget:
    """Client pods whose sidecars ask the picker."""

    namespace: str
    selector: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class IstioVersion:
    """An Istio minor release."""

    minor: int  # of 1.x

    def __str__(self) -> str:
        return f"1.{self.minor}"


def _texts(text: str, flag: str, **more: Any) -> tuple[str, ...]:
    """Declare a field that a repeatable option fills."""
    return setting((), text, flag, given=list[str] | None, shown=None, read=tuple, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallPlan:
    """All inputs of the rendered objects; most are options of `kvmesh install`."""

    istio: IstioVersion = IstioVersion(minor=28)
    mode: Mode = setting(Mode.GATEWAY, "Envoy that calls the picker.")
    pools: tuple[PoolTarget, ...] = ()
    routes: tuple[RouteTarget, ...] = ()
    gateways: tuple[GatewayTarget, ...] = ()
    clients: tuple[ClientsTarget, ...] = ()
    namespace: str = setting("kvmesh-system", "Namespace of kvmesh itself.")
    create_namespace: bool = setting(True, "Create that namespace.")
    scope: Scope = setting(Scope.MESH, "namespaced: rights only in the namespaces of kvmesh and the pools.")
    root_namespace: str = setting(
        "istio-system",
        "Namespace whose policies are mesh-wide. Default: istio-system; namespaced: kvmesh's own.",
        given=str | None,
        shown=None,
        absent="",
    )
    membership: MeshMembership = setting(
        MeshMembership.SIDECAR,
        "Mesh membership of kvmesh's own pods. Default: sidecar; with ambient-gateway: ambient.",
        given=MeshMembership | None,
        shown=None,
        absent=None,
    )
    trust_domain: str = setting(TRUST_DOMAIN, "Trust domain of callers and kvmesh, unless the mesh has another.")
    failure_mode: FailureMode = setting(
        FailureMode.FAIL_CLOSE, "Requests while no picker answers: refused (FailClose), or sent to any pod."
    )
    body_mode: BodyMode | None = setting(
        None,
        "Transfer of bodies to the picker. Default: duplex, or buffered with --failure-mode FailOpen. With "
        "`buffered` a picker's death cuts no answer.",
    )
    route_settings: RouteSettings = setting(
        RouteSettings.KEEP,
        "Timeouts and retries of the routes: keep them, or replace them by a timeout of the longest wait "
        "and answer and by safe retries. With `keep`, Envoy never retries a request after its remote "
        "prefill.",
    )
    redis: RedisKind = RedisKind.BUNDLED
    redis_url: str | None = setting(
        None,
        "Your own Redis or Valkey: redis://, rediss://, redis+sentinel://, redis+cluster://; "
        "?username=NAME for a user (ACL). Default: install one.",
        "redis",
        metavar="URL",
    )
    redis_password_secret: str | None = setting(
        None, "Secret with the Redis password, key password; of the bundled one, its users' passwords."
    )
    redis_sentinel_password_secret: str | None = setting(None, "Secret for the Sentinels, key password.")
    redis_ca_secret: str | None = setting(None, "Secret with the CA of Redis' certificate, key ca.crt.")
    redis_tls_secret: str | None = setting(
        None, "Secret with the client certificate for Redis, keys tls.crt and tls.key."
    )
    redis_image: str = setting(REDIS_IMAGE, "Image of the installed Redis, best by digest: …/valkey@sha256:….")
    redis_memory_mib: int = setting(2048, "Memory limit of the installed Redis in MiB.", least=64)
    redis_storage_gib: int = setting(8, "Disk of the installed Redis in GiB.", least=1)
    image: str = setting(  # the default is not published: kustomizations replace it
        "kvmesh:0.1.0",
        "Image of kvmesh. Required: none is published yet.",
        given=str | None,
        shown=None,
        absent="",
    )
    image_pull_policy: PullPolicy | None = setting(None, "Pull policy of the image. Default: Kubernetes' own.")
    image_pull_secrets: tuple[str, ...] = _texts(  # for the registries of kvmesh and Redis
        "Pull secret in kvmesh's namespace. Repeat for more.", "image_pull_secret"
    )
    run_as_user: bool = setting(True, "Run as user 65532. Else as the platform's user (OpenShift).")
    istio_revision: str | None = setting(
        None, "Istio revision that injects kvmesh's sidecars, if the mesh has no default one."
    )
    admin_token_secret: str | None = setting(
        None,
        "Secret with the admin token, key token. Default: kvmesh-admin-token, created with a random "
        "token (docs/guides/admin-access.md).",
    )
    pod_key_secret: str | None = setting(
        None,
        "Secret with the API key of the pods (docs/guides/security.md).",
    )
    pod_key_secret_key: str = setting(POD_KEY, "Key of --pod-key-secret.")
    hash_seed: str = setting("kvmesh", "Seed of the block keys.")
    picker_replicas: int = setting(2, "Minimum of pickers.", "replicas", least=1)
    picker_replicas_max: int = setting(10, "Maximum of pickers, scaled by CPU.", "max_replicas", least=1)
    indexer_replicas: int = setting(2, "Indexers.", least=1)
    drain_seconds: int = setting(
        60, "Seconds of service after the signal to stop; longer than a first token takes.", least=5
    )
    longest_queue_seconds: int = setting(
        300, "Maximum wait in the picker, in seconds: that of the most patient class.", least=1
    )
    longest_stream_seconds: int = setting(
        900, "Maximum duration of an answer in seconds, with --route-settings replace.", least=1
    )
    log_level: str = "info"
    # source of the tokenizer folders at /models: at most one of these three
    tokenizers_claim: str | None = setting(None, "PersistentVolumeClaim with tokenizer folders, mounted as /models.")
    tokenizers_image: str | None = setting(
        None, "OCI image with tokenizer folders, as a volume (Kubernetes 1.31 or newer)."
    )
    model_cache_claim: str | None = setting(
        None, "PersistentVolumeClaim (ReadWriteMany) for the files of --fetch-model."
    )
    fetch_models: tuple[str, ...] = _texts(
        "Model of a Hugging Face hub whose tokenizer is fetched before a picker starts, never its weights. A hub that "
        "does not answer holds up a picker for two minutes a model.",
        "fetch_model",
        metavar="[NAME=]MODEL[@REVISION]",
    )
    hub_endpoint: str | None = setting(
        None, "Hub or mirror of --fetch-model. Default: https://huggingface.co.", metavar="URL"
    )
    hub_token_secret: str | None = setting(None, "Secret with the hub's token, key token, for gated models.")
    monitoring: bool = setting(
        False, "Install monitors, rules, alerts and dashboards; open the metrics ports to Prometheus."
    )
    monitoring_namespace: str = setting("monitoring", "Namespace of Prometheus.")

    @property
    def owns_namespace(self) -> bool:
        """Whether the installation creates its namespace; with native pools it belongs to the user."""
        return self.create_namespace and self.mode is not Mode.INFERENCE_POOL

    @property
    def picker_host(self) -> str:
        """The picker's DNS name."""
        return f"{PICKER}.{self.namespace}.svc.{CLUSTER_DOMAIN}"

    @property
    def watched_namespaces(self) -> list[str]:
        """The namespaces that a namespaced installation reads: its own (for mesh-wide policies) and the pools'."""
        if self.scope is Scope.MESH:
            return []
        return list(dict.fromkeys([self.namespace, *(pool.namespace for pool in self.pools)]))

    @property
    def callers(self) -> tuple[GatewayTarget | ClientsTarget, ...]:
        """The targets whose Envoys ask the picker."""
        return self.clients if self.mode is Mode.SIDECAR else self.gateways
