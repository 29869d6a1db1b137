"""The facts the doctor gathers. Values only: filled by `gather_*`, read by `judge_*`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from extproc.models.models import ModelTable
from extproc.pods.endpoint import EndpointModels
from extproc.policy.values import Steering
from extproc.prompts.folder_checks import TokenState
from extproc.reach.status import PolicyStatus
from kvmesh.blocks.source import SourceStatus
from kvmesh.documents.documents import DocumentProblem
from kvmesh.documents.pools import PoolEndpoint
from operate.install.envoy_filters import UNPICKED_FILTER

SERVING = "SERVING"  # answer of a healthy gRPC health check


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The picker's settings that the facts are compared with."""

    endpoints: tuple[str, ...]
    models: ModelTable
    hash_seed: str
    steering: Steering = Steering.OVERRIDE_HOST
    grpc_port: int = 9002
    index_timeout_seconds: float = 0.02
    pool: str = ""  # "namespace/name" if these belong to one of several pools, else ""
    failure_mode: str = ""  # of the pool's policies; "" if they are not consulted


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """KV event addresses of one data-parallel rank, from the pod's /kv_event_sources."""

    rank: str
    enabled: bool
    kind: str | None  # only "zmq" can be followed
    events: str
    replay: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """One pod."""

    endpoint: str
    is_vllm: bool = True  # or unknown
    problem: str = ""  # why it did not answer; the fields below are then unset
    refused: tuple[str, ...] = ()  # paths to which it denies access
    refusal: str = ""  # the reason as text
    served: EndpointModels | None = None
    version: str | None = None
    block_sizes: frozenset[int] = frozenset()  # tokens; all valid sizes in its events
    prefix_caching: bool | None = None  # None if not reported
    prompt_tokens: int | None = None  # since its start
    running: int = 0  # requests
    fetch_seconds: float | None = None  # mean of its fetches from prefill pods; None without any
    sources_status: int = 0  # HTTP status of /kv_event_sources, 0 without an answer
    publishers: tuple[Publisher, ...] = ()
    clock_ahead_seconds: float | None = None  # relative to this machine; None if not reported
    render_status: Mapping[str, int] = field(default_factory=dict)  # model -> HTTP status of the render endpoint
    # model -> HTTP status of POST /tokenize, for models that may use it
    tokenize_status: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisFacts:
    """The Redis or Valkey that holds the index."""

    label: str  # address without credentials
    problem: str = ""
    version: str = ""
    is_valkey: bool = False
    role: str = ""  # master or slave, "" if not reported
    maxmemory_policy: str = ""
    maxmemory_bytes: int = 0  # 0 without a limit
    used_bytes: int = 0
    appends_to_file: bool = False
    round_trip_seconds: float = 0.0  # median
    clock_ahead_seconds: float = 0.0  # relative to this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFacts:
    """The prefix index in Redis."""

    problem: str = ""
    indexer_alive: bool = False
    unreadable: tuple[str, ...] = ()
    sources: tuple[SourceStatus, ...] = ()

    def of(self, endpoint: str) -> tuple[SourceStatus, ...]:
        """Return a pod's sources."""
        return tuple(source for source in self.sources if source.endpoint == endpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFacts:
    """A trial: a fresh prompt sent to a pod and then looked up in the index."""

    endpoint: str
    model: str
    problem: str = ""  # why the pod did not serve it
    tokens: int = 0
    matched_tokens: int = 0  # that the pod holds according to the index
    waited_seconds: float = 0.0
    batches: int = 0  # event batches from the pod meanwhile, at least
    found_as: tuple[str, str] | None = None  # other (hash seed, model) under which the index has it
    picker_tokens: int | None = None  # matched by the running picker; None if not asked


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerFinding:
    """A finding of the indexers (docs/reference/findings.md)."""

    endpoint: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerFacts:
    """An indexer's admin page."""

    url: str
    problem: str = ""
    findings: tuple[IndexerFinding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerFacts:
    """A running picker, from its admin page."""

    url: str
    problem: str = ""
    ready: bool = False
    endpoints: frozenset[str] = frozenset()
    prefill_pods: int = 0  # endpoints with the role prefill
    index_problem: str = ""
    token_states: Mapping[str, TokenState] = field(default_factory=dict)  # by model with a tokenizer folder
    token_sources: Mapping[str, str] = field(default_factory=dict)  # model -> folder, pods or text: of recent prompts
    grpc_address: str = ""
    grpc_health: str = ""  # SERVING, NOT_SERVING, or an error; "" if not asked


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyHost:
    """A host of a cluster, as Envoy sees it."""

    address: str  # IP:PORT
    healthy: bool
    connections_failed: int
    connections_made: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyCluster:
    """A cluster and its hosts."""

    name: str
    config: Mapping[str, Any]
    hosts: tuple[EnvoyHost, ...] = ()

    @property
    def addresses(self) -> frozenset[str]:
        """Return the addresses of all hosts."""
        return frozenset(host.address for host in self.hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtProcFilter:
    """An ext_proc filter with its connection manager and listener, as in Envoy's configuration."""

    name: str
    config: Mapping[str, Any]
    manager: Mapping[str, Any]
    listener: Mapping[str, Any]
    is_disabled: bool = False  # routes can still enable it

    @property
    def cluster(self) -> str:
        """Return the cluster of its gRPC service."""
        service = self.config.get("grpc_service", {})
        return str(service.get("envoy_grpc", {}).get("cluster_name", "")) if isinstance(service, Mapping) else ""

    @property
    def refuses_unpicked(self) -> bool:
        """Whether a later filter rejects requests that pass without a pick while no picker answers."""
        filters = self.manager.get("http_filters", ())
        return any(each.get("name") == UNPICKED_FILTER and not each.get("disabled") for each in filters)

    @property
    def fails_open(self) -> bool:
        """Whether requests pass while no picker answers; routes may override it."""
        return self.config.get("failure_mode_allow") is True and not self.refuses_unpicked

    def mode(self, name: str) -> str:
        """Return an effective processing mode, like SEND."""
        modes = self.config.get("processing_mode", {})
        said = str(modes.get(name, "DEFAULT"))
        return {"DEFAULT": MODE_DEFAULTS[name]}.get(said, said) if name in MODE_DEFAULTS else said


# envoy/extensions/filters/http/ext_proc/v3/processing_mode.proto
MODE_DEFAULTS = {
    "request_header_mode": "SEND",
    "response_header_mode": "SEND",
    "request_body_mode": "NONE",
    "response_body_mode": "NONE",
    "request_trailer_mode": "SKIP",
    "response_trailer_mode": "SKIP",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRoute:
    """A route that names its pool to the picker, as `kvmesh install` writes it."""

    name: str
    pool: str  # from the metadata x-kvmesh-pool, without the port
    clusters: frozenset[str]  # its destinations
    fails_open: bool | None  # its own failure mode; None for the filter's
    buffer_bytes: int | None = None  # its own limit; None for the listener's


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedResource:
    """A resource that Envoy rejected."""

    kind: str  # "listener", "cluster", "route"
    name: str
    details: str  # Envoy's message
    has_earlier: bool  # an earlier version is in force


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyFacts:
    """An Envoy, from its admin page."""

    url: str
    problem: str = ""
    version: str = ""
    filters: tuple[ExtProcFilter, ...] = ()
    clusters: tuple[EnvoyCluster, ...] = ()
    routes: tuple[Mapping[str, Any], ...] = ()  # actions of routes to a cluster
    pool_routes: tuple[PoolRoute, ...] = ()
    enabling_filters: frozenset[str] = frozenset()  # filters that some route enables by its per-filter settings
    asked_by_routes: frozenset[str] = frozenset()  # picker clusters named by routes (native InferencePools)
    refused: tuple[RefusedResource, ...] = ()  # still rejected at the last update
    rejected_updates: Mapping[str, int] = field(default_factory=dict)  # kind -> rejections since Envoy's start
    picker_health: Mapping[str, str] = field(default_factory=dict)  # IP:PORT of the picker -> like `grpc_health`

    def cluster(self, name: str) -> EnvoyCluster | None:
        """Return the cluster with this name, or None."""
        return next((cluster for cluster in self.clusters if cluster.name == name), None)

    def picking_filter(self) -> ExtProcFilter | None:
        """Return the picker's filter: the first that sees request headers, preferably one named kvmesh."""
        seeing = [each for each in self.filters if each.mode("request_header_mode") == "SEND"]
        ours = [each for each in seeing if "kvmesh" in each.name or "kvmesh" in str(each.config.get("stat_prefix", ""))]
        return next(iter(ours or seeing), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """A pool, as described by the documents."""

    name: str  # "namespace/name"
    endpoints: tuple[PoolEndpoint, ...]
    hash_seed: str  # of its block keys
    model: str | None  # model of its block keys; None if neither declared nor reported by a pod
    policies: tuple[str, ...]  # policies in force, "namespace/name"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshFacts:
    """Pools, policies and problems of the documents."""

    pools: tuple[PoolFacts, ...]
    problems: tuple[DocumentProblem, ...] = ()
    policies: tuple[PolicyStatus, ...] = ()  # the status each policy should have
    served: Mapping[str, int] | None = None  # pool -> endpoint count of the running picker; None if not asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All facts; None for parts that were not requested."""

    expected: Expected
    now: float  # unix seconds
    pods: tuple[PodFacts, ...]
    redis: RedisFacts
    index: IndexFacts
    trials: tuple[TrialFacts, ...] | None = None
    indexer: IndexerFacts | None = None
    picker: PickerFacts | None = None
    envoy: EnvoyFacts | None = None
    mesh: MeshFacts | None = None  # if pools come from documents

    @property
    def answering(self) -> tuple[PodFacts, ...]:
        """Return the pods that answered."""
        return tuple(pod for pod in self.pods if not pod.problem)

    @property
    def vllms(self) -> tuple[PodFacts, ...]:
        """Return those of vLLM."""
        return tuple(pod for pod in self.answering if pod.is_vllm)
