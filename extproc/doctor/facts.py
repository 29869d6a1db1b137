"""What the doctor has gathered, before it is judged. Values only: filled by `gather_*`, read by `judge_*`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from extproc.install.envoy_filters import UNPICKED_FILTER
from extproc.models.models import ModelTable
from extproc.pods.endpoint import EndpointModels
from extproc.policy.status import PolicyStatus
from extproc.policy.values import Steering
from extproc.prompts.token_probes import TokenComparison
from kvmesh.blocks.source import SourceStatus
from kvmesh.documents.documents import DocumentProblem
from kvmesh.documents.pools import PoolEndpoint

SERVING = "SERVING"  # what a gRPC health check answers where all is well


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the picker's settings say."""

    endpoints: tuple[str, ...]
    models: ModelTable
    hash_seed: str
    steering: Steering = Steering.OVERRIDE_HOST
    grpc_port: int = 9002
    index_timeout_seconds: float = 0.02
    pool: str = ""  # "namespace/name" where these are one pool's of several; "": of all
    failure_mode: str = ""  # that the pool's policies say; "": they are not asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """Where one data-parallel rank publishes its KV events, as the pod's /kv_event_sources says."""

    rank: str
    enabled: bool
    kind: str | None  # "zmq" is the one that can be followed
    events: str
    replay: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """One vLLM pod."""

    endpoint: str
    problem: str = ""  # why it says nothing of itself; all below is unknown then
    refused: tuple[str, ...] = ()  # paths that it does not let us see
    refusal: str = ""  # why, in words
    served: EndpointModels | None = None
    version: str | None = None
    block_sizes: frozenset[int] = frozenset()  # tokens; all sizes that its events may rightly have
    prefix_caching: bool | None = None  # None: it does not say
    prompt_tokens: int | None = None  # served since its start
    running: int = 0  # requests
    sources_status: int = 0  # HTTP status of /kv_event_sources; 0: no answer
    publishers: tuple[Publisher, ...] = ()
    clock_ahead_seconds: float | None = None  # of this machine's; None: it does not say
    tokens: tuple[TokenComparison, ...] = ()
    render_status: Mapping[str, int] = field(default_factory=dict)  # model -> HTTP status of its render endpoint
    tokenize_status: Mapping[str, int] = field(
        default_factory=dict
    )  # likewise of POST /tokenize, where it may be asked


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisFacts:
    """The Redis or Valkey that holds the index."""

    label: str  # its address, without user and password
    problem: str = ""
    version: str = ""
    is_valkey: bool = False
    role: str = ""  # master, slave; "" when it does not say
    maxmemory_policy: str = ""
    maxmemory_bytes: int = 0  # 0: no limit
    used_bytes: int = 0
    appends_to_file: bool = False
    round_trip_seconds: float = 0.0  # median
    clock_ahead_seconds: float = 0.0  # of this machine's


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFacts:
    """The index in that Redis."""

    problem: str = ""
    indexer_alive: bool = False
    unreadable: tuple[str, ...] = ()
    sources: tuple[SourceStatus, ...] = ()

    def of(self, endpoint: str) -> tuple[SourceStatus, ...]:
        """Return the sources of one pod."""
        return tuple(source for source in self.sources if source.endpoint == endpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFacts:
    """One fresh prompt that was sent to a pod and then looked for in the index."""

    endpoint: str
    model: str
    problem: str = ""  # why the pod did not serve it
    tokens: int = 0
    matched_tokens: int = 0  # that the index says the pod holds of it
    waited_seconds: float = 0.0
    batches: int = 0  # that came of the pod meanwhile, at least
    found_as: tuple[str, str] | None = None  # (hash seed, model) under which the index has it instead
    picker_tokens: int | None = None  # that the running picker sees there; None: it was not asked


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerFinding:
    """One finding of the indexers themselves (docs/reference/findings.md)."""

    endpoint: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerFacts:
    """What an indexer's admin page says."""

    url: str
    problem: str = ""
    findings: tuple[IndexerFinding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerTokens:
    """How many tokens the running picker makes of one probe; what the pods make of it is in their `PodFacts.tokens`."""

    model: str
    probe: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerFacts:
    """A running picker, by its admin page."""

    url: str
    problem: str = ""
    ready: bool = False
    endpoints: frozenset[str] = frozenset()
    prefill_pods: int = 0  # endpoints that compute prompts for others
    index_problem: str = ""
    tokens: tuple[PickerTokens, ...] = ()
    grpc_address: str = ""
    grpc_health: str = ""  # SERVING, NOT_SERVING, or why it does not answer; "": not asked


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyHost:
    """One address of one cluster, as Envoy sees it."""

    address: str  # IP:PORT
    healthy: bool
    connections_failed: int
    connections_made: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyCluster:
    """One cluster and its addresses."""

    name: str
    config: Mapping[str, Any]
    hosts: tuple[EnvoyHost, ...] = ()

    @property
    def addresses(self) -> frozenset[str]:
        """Return all addresses."""
        return frozenset(host.address for host in self.hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtProcFilter:
    """An ext_proc filter and the connection manager around it; each as Envoy's configuration has it."""

    name: str
    config: Mapping[str, Any]
    manager: Mapping[str, Any]
    listener: Mapping[str, Any]
    is_disabled: bool = False  # but for the routes that switch it on

    @property
    def cluster(self) -> str:
        """Return the cluster that it asks."""
        service = self.config.get("grpc_service", {})
        return str(service.get("envoy_grpc", {}).get("cluster_name", "")) if isinstance(service, Mapping) else ""

    @property
    def refuses_unpicked(self) -> bool:
        """Whether a filter behind it refuses what it lets pass while no picker answers."""
        filters = self.manager.get("http_filters", ())
        return any(each.get("name") == UNPICKED_FILTER and not each.get("disabled") for each in filters)

    @property
    def fails_open(self) -> bool:
        """Whether requests pass while no picker answers, but for routes that say otherwise."""
        return self.config.get("failure_mode_allow") is True and not self.refuses_unpicked

    def mode(self, name: str) -> str:
        """Return one processing mode as it takes effect, like SEND."""
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
    """A route that tells the picker which pool it is for, as `kvmesh install` writes them."""

    name: str
    pool: str  # as the metadata x-kvmesh-pool says, without the port
    clusters: frozenset[str]  # that it leads to
    fails_open: bool | None  # its own failure mode; None: the filter's
    buffer_bytes: int | None = None  # of its own; None: the listener's


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedResource:
    """Something that Envoy was given and did not take."""

    kind: str  # "listener", "cluster", "route"
    name: str
    details: str  # Envoy's words
    has_earlier: bool  # an earlier version of it is in force


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyFacts:
    """One Envoy, by its admin page."""

    url: str
    problem: str = ""
    version: str = ""
    filters: tuple[ExtProcFilter, ...] = ()
    clusters: tuple[EnvoyCluster, ...] = ()
    routes: tuple[Mapping[str, Any], ...] = ()  # route entries that lead to a cluster
    pool_routes: tuple[PoolRoute, ...] = ()
    enabling_filters: frozenset[str] = frozenset()  # names of filters that some route has settings for, and not "off"
    asked_by_routes: frozenset[str] = frozenset()  # pickers' clusters that routes name: native InferencePools
    refused: tuple[RefusedResource, ...] = ()  # last time, and since then not mended
    rejected_updates: Mapping[str, int] = field(default_factory=dict)  # kind -> refusals since Envoy's start, if any
    picker_health: Mapping[str, str] = field(default_factory=dict)  # IP:PORT of the picker's cluster -> as grpc_health

    def cluster(self, name: str) -> EnvoyCluster | None:
        """Return the cluster of that name."""
        return next((cluster for cluster in self.clusters if cluster.name == name), None)

    def picking_filter(self) -> ExtProcFilter | None:
        """Return the filter that asks the picker: the first that sees request headers."""
        seeing = [each for each in self.filters if each.mode("request_header_mode") == "SEND"]
        ours = [each for each in seeing if "kvmesh" in each.name or "kvmesh" in str(each.config.get("stat_prefix", ""))]
        return next(iter(ours or seeing), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """One pool, as the documents have it."""

    name: str  # "namespace/name"
    endpoints: tuple[PoolEndpoint, ...]
    hash_seed: str  # its own part of the index
    model: str | None  # that its blocks are indexed under; None: neither declared nor named by a pod
    policies: tuple[str, ...]  # in force there, "namespace/name"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshFacts:
    """What documents say: pools, policies, and what is wrong with them."""

    pools: tuple[PoolFacts, ...]
    problems: tuple[DocumentProblem, ...] = ()
    policies: tuple[PolicyStatus, ...] = ()  # of each policy, as its status should be
    served: Mapping[str, int] | None = None  # pool -> endpoints that a running picker has; None: it was not asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything; None stands for a part that was not asked for."""

    expected: Expected
    now: float  # unix seconds
    pods: tuple[PodFacts, ...]
    redis: RedisFacts
    index: IndexFacts
    trials: tuple[TrialFacts, ...] | None = None
    indexer: IndexerFacts | None = None
    picker: PickerFacts | None = None
    envoy: EnvoyFacts | None = None
    mesh: MeshFacts | None = None  # where pools come from documents

    @property
    def answering(self) -> tuple[PodFacts, ...]:
        """Return the pods that say something of themselves."""
        return tuple(pod for pod in self.pods if not pod.problem)
