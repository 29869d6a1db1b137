"""What is to be installed: one value that the command line fills in and every renderer reads. Pure.

The `parse_*` functions read what the command line says of pools, gateways, hosts and clients; they raise ConfigError.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from extproc.errors import ConfigError

PICKER = "kvmesh-picker"
INDEXER = "kvmesh-indexer"
REDIS = "kvmesh-redis"
POOL_METADATA_KEY = "x-kvmesh-pool"  # gRPC initial metadata: tells the picker whose request it is
CLUSTER_DOMAIN = "cluster.local"
GRPC_PORT = 9002  # of the picker, for Envoy
PICKER_ADMIN_PORT = 9090
EXTERNAL_METRICS_PORT = 9443  # of the picker, for the API server
PICKER_IDLE_TIMEOUT = "3600s"  # of a gateway's connection to it
INDEXER_ADMIN_PORT = 9091
REDIS_PORT = 6379
REDIS_IMAGE = "docker.io/valkey/valkey:8.1"
POD_KEY = "api-key"  # of a Secret
GATEWAY_LABEL = "gateway.networking.k8s.io/gateway-name"  # Istio puts it on the pods of a Gateway API gateway
CLIENT_LABEL = "kvmesh.io/client"
SECRET_KEY = re.compile(r"[-._A-Za-z0-9]{1,253}")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
LABEL_NAME = re.compile(r"([a-z0-9][-a-z0-9.]{0,251}[a-z0-9]/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)


class Mode(StrEnum):
    """Where the picker's filter runs."""

    GATEWAY = "gateway"
    SIDECAR = "sidecar"  # in the sidecars of the clients
    AMBIENT_GATEWAY = "ambient-gateway"  # a gateway in the mesh, for clients in ambient
    INFERENCE_POOL = "inferencepool"  # no filter of ours: a gateway's own for InferencePools


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


class RouteSettings(StrEnum):
    """What becomes of the timeouts and retries of the routes that ask the picker."""

    KEEP = "keep"  # they stay as their owners have them; the picker says of a request that it is not to be repeated
    REPLACE = "replace"  # one timeout for the longest wait and answer, and retries of what no pod has begun


class PullPolicy(StrEnum):
    """When a node asks the registry for the image; the words of Kubernetes."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


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
    has_rule: bool = False  # people have a DestinationRule for it: Istio takes one for a host, so ours would replace it

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
    port: int | None = None  # of the gateway's listener (Gateway.spec.listeners[].port); None: all of them
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
    image: str = "kvmesh:0.1.0"  # none is published: the command line asks for one, kustomizations replace this one
    image_pull_policy: PullPolicy | None = None  # None: as Kubernetes chooses by the tag
    image_pull_secrets: tuple[str, ...] = ()  # of the registries of kvmesh and of Redis, in kvmesh's namespace
    run_as_user: bool = True  # False: the platform picks the user, as OpenShift does
    istio_revision: str | None = None  # of the control plane that injects the sidecars; None: the default one
    pools: tuple[PoolTarget, ...] = ()
    routes: tuple[RouteTarget, ...] = ()
    gateways: tuple[GatewayTarget, ...] = ()
    clients: tuple[ClientsTarget, ...] = ()
    failure_mode: FailureMode = FailureMode.FAIL_CLOSE
    body_mode: BodyMode | None = None  # None: the best that the release can do
    route_settings: RouteSettings = RouteSettings.KEEP
    membership: MeshMembership = MeshMembership.SIDECAR
    redis: RedisKind = RedisKind.BUNDLED
    redis_url: str | None = None  # None: the bundled one
    redis_password_secret: str | None = None  # a Secret with the key `password`
    redis_username: str | None = None
    redis_sentinel_password_secret: str | None = None  # a Secret with the key `password`
    redis_ca_secret: str | None = None  # a Secret with the key `ca.crt`
    redis_tls_secret: str | None = None  # a Secret with `tls.crt` and `tls.key`, shown to Redis
    redis_image: str = REDIS_IMAGE  # of the bundled one
    redis_memory_mib: int = 2048  # of the bundled one, for its data
    redis_storage_gib: int = 8
    admin_token_secret: str | None = None  # a Secret with the key `token`; None: the one that `kvmesh install` makes
    pod_key_secret: str | None = None  # a Secret with the key of pods that run with --api-key
    pod_key_secret_key: str = POD_KEY  # under which name that Secret has it
    hash_seed: str = "kvmesh"
    picker_replicas: int = 2  # at least; the HPA adds more
    picker_replicas_max: int = 10
    indexer_replicas: int = 2
    drain_seconds: int = 60  # above the longest time to a pod's first byte: what waits for it ends with the picker
    longest_queue_seconds: int = 300  # `queueSeconds` of the most patient class
    longest_stream_seconds: int = 900  # one answer, from its pick on; of RouteSettings.REPLACE
    log_level: str = "info"
    # what pickers see at /models, with the models' tokenizer folders: one of these at most
    tokenizers_claim: str | None = None  # a PersistentVolumeClaim
    model_cache_claim: str | None = None  # one that `fetch_models` come into, shared by all pickers
    tokenizers_image: str | None = None  # an OCI image, as a volume of Kubernetes
    fetch_models: tuple[str, ...] = ()  # [NAME=]MODEL[@REVISION], fetched before a picker starts
    hub_endpoint: str | None = None
    hub_token_secret: str | None = None  # a Secret whose key `token` is the hub's
    scale_deployments: bool = False  # the picker may write the scale of Deployments (a policy's autoscale.act)
    monitoring: bool = False
    monitoring_namespace: str = "monitoring"
    external_metrics: bool = False  # the picker serves the Kubernetes external-metrics API
    external_metrics_secret: str | None = None  # a Secret with tls.crt, tls.key and ca.crt; None: one of ours
    external_metrics_ca: str | None = None  # whom the API server is to trust: PEM in base64; None: not known yet

    @property
    def owns_namespace(self) -> bool:
        """Whether the namespace is made along; that of native pools is other people's."""
        return self.create_namespace and self.mode is not Mode.INFERENCE_POOL

    @property
    def picker_host(self) -> str:
        """The picker's name in DNS."""
        return f"{PICKER}.{self.namespace}.svc.{CLUSTER_DOMAIN}"

    @property
    def watched_namespaces(self) -> list[str]:
        """What a namespaced installation reads: its own namespace (for mesh-wide policies) and the pools'."""
        if self.scope is Scope.MESH:
            return []
        return list(dict.fromkeys([self.namespace, *(pool.namespace for pool in self.pools)]))

    @property
    def callers(self) -> tuple[GatewayTarget | ClientsTarget, ...]:
        """The groups of pods whose Envoys ask the picker."""
        return self.clients if self.mode is Mode.SIDECAR else self.gateways


def parse_pools(texts: Sequence[str], *, selectors: Sequence[str] = (), in_mesh: bool = True) -> tuple[PoolTarget, ...]:
    """Read `NAMESPACE/NAME[:PORT[:PODPORT]]`, and for some of them `NAMESPACE/NAME=LABEL=VALUE,…`."""
    labels = dict(_parse_selector(text) for text in selectors)
    pools = []
    for text in texts:
        identity, *ports = text.split(":")
        namespace, name = _pair(identity, flag="--pool", text=text)
        if len(ports) > 2:
            raise ConfigError(f"--pool {text!r}: must be NAMESPACE/NAME:PORT or NAMESPACE/NAME:PORT:PODPORT")
        numbers = [_port(port, flag="--pool", text=text) for port in ports]
        pools.append(
            PoolTarget(
                namespace=namespace,
                name=name,
                port=numbers[0] if numbers else 8000,
                pod_port=numbers[1] if len(numbers) == 2 else None,
                selector=labels.pop(identity, None),
                in_mesh=in_mesh,
            )
        )
    if labels:
        raise ConfigError(f"--pool-selector: no --pool is called {', '.join(sorted(labels))}")
    return tuple(pools)


def parse_gateway(text: str) -> GatewayTarget:
    """Read `NAMESPACE/NAME`, a Gateway of the Gateway API, or `NAMESPACE/NAME@LABEL=VALUE,…[@SERVICEACCOUNT]`.

    The second form is for gateways that are installed by themselves, like istio-system/istio-ingressgateway: the labels
    of its pods, and their service account where it is not called as the gateway (as Istio's gateway chart has it).
    """
    identity, *more = text.split("@")
    namespace, name = _pair(identity, flag="--gateway", text=text)
    if len(more) > 2:
        raise ConfigError(f"--gateway {text!r}: must be NAMESPACE/NAME@LABELS@SERVICEACCOUNT")
    selector = _labels(more[0], flag="--gateway", text=text) if more else {GATEWAY_LABEL: name}
    account = more[1] if len(more) == 2 else name if more else f"{name}-istio"
    return GatewayTarget(namespace=namespace, name=name, selector=selector, service_account=account)


def parse_clients(text: str) -> ClientsTarget:
    """Read `NAMESPACE` or `NAMESPACE@LABEL=VALUE,…`."""
    namespace, separator, labels = text.partition("@")
    selector = _labels(labels, flag="--clients", text=text) if separator else {CLIENT_LABEL: "true"}
    return ClientsTarget(namespace=namespace, selector=selector)


def parse_hosts(texts: Sequence[str], pools: Sequence[PoolTarget]) -> tuple[RouteTarget, ...]:
    """Read `HOST[:PORT][/ROUTE][=NAMESPACE/POOL]`; the pool may be left out where there is one."""
    by_identity = {pool.identity: pool for pool in pools}
    return tuple(_parse_host(text, by_identity) for text in texts)


def _parse_host(text: str, pools: Mapping[str, PoolTarget]) -> RouteTarget:
    where, separator, identity = text.partition("=")
    if separator and identity not in pools:
        raise ConfigError(f"--hostname {text!r}: no --pool is called {identity!r}")
    if not separator and len(pools) != 1:
        raise ConfigError(f"--hostname {text!r}: there are {len(pools)} pools; write HOST=NAMESPACE/POOL")
    pool = pools[identity] if separator else next(iter(pools.values()))
    authority, _, route = where.partition("/")
    host, colon, port = authority.partition(":")
    if not re.fullmatch(r"\*|(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", host):
        raise ConfigError(f"--hostname {text!r}: {host!r} is no host name (lower case, or * for any)")
    number = _port(port, flag="--hostname", text=text) if colon else None
    return RouteTarget(host=host, port=number, route=route or None, pool=pool)


def _pair(identity: str, *, flag: str, text: str) -> tuple[str, str]:
    namespace, _, name = identity.partition("/")
    if not namespace or not name or "/" in name:
        raise ConfigError(f"{flag} {text!r}: must be NAMESPACE/NAME")
    return namespace, name


def _port(number: str, *, flag: str, text: str) -> int:
    if not (number.isascii() and number.isdigit()) or not 0 < int(number) < 65536:
        raise ConfigError(f"{flag} {text!r}: {number!r} is no port")
    return int(number)


def _parse_selector(text: str) -> tuple[str, Mapping[str, str]]:
    identity, _, labels = text.partition("=")
    return identity, _labels(labels, flag="--pool-selector", text=text)


def _labels(pairs: str, *, flag: str, text: str) -> dict[str, str]:
    labels = {}
    for part in pairs.split(","):
        name, separator, value = part.strip().partition("=")
        if not separator or LABEL_NAME.fullmatch(name) is None or LABEL_VALUE.fullmatch(value) is None:
            raise ConfigError(f"{flag} {text!r}: labels are written NAME=VALUE,NAME=VALUE; {part!r} is none")
        labels[name] = value
    return labels
