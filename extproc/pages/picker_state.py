"""What a picker shows of itself, as values: the JSON of its admin pages and of the live feed, and what reads them.

Numbers that are not known are None, times are unix seconds, shares are 0..1. Everything but what identifies a value
has a default, so that answers of older pickers can be read; fields that a newer picker adds are ignored. Whatever
clients have written is shortened before it gets here. docs/reference/live-feed.md says when which of them is sent.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from extproc.pages.history_state import HistoryEvent
from extproc.responses.realised import Usage
from kvmesh.blocks.source import SourceStatus


class EndpointState(msgspec.Struct, frozen=True, kw_only=True):
    """One pod as the picker sees it."""

    address: str
    state: str  # a `Reachability`
    cached_blocks: int = 0  # in the index, over all tiers
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    hit_rate: float | None = None
    bookings: int = 0  # open requests of this picker
    picks: int = 0  # since the picker started
    share: float = 0.0  # of all picks
    avoided: str | None = None  # why it gets no new requests
    since: float | None = None  # when that began, or when it ceased to be ready
    problem: str | None = None  # what its last scrape failed with, where it is not ready
    asked_every_seconds: float | None = None  # until it reports again
    trial_at: float | None = None  # when one request is sent there, where it is avoided for its failures
    models: Sequence[str] | None = None
    adapters: Sequence[str] | None = None
    max_model_len: int | None = None
    prefill_tokens_per_second: float | None = None
    inter_token_ms: float | None = None
    role: str = "both"
    tiers: Mapping[str, int] = {}  # tier -> cached blocks
    cached_tokens: int = 0
    block_tokens: int | None = None
    index_state: str | None = None  # the worst of its event streams
    index_reason: str = ""
    ttft_estimate_error_ms: int | None = None


class PodsEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The event `pods`: the endpoints in the order in which they are configured."""

    now: float
    pods: Sequence[EndpointState]
    left_out: int = 0
    totals: Mapping[str, int]  # sums over all of them


class StepState(msgspec.Struct, frozen=True, kw_only=True):
    """One step of degradation that is in force."""

    step: str
    model_pool: str
    since_seconds: float
    pressure: float


class ClassState(msgspec.Struct, frozen=True, kw_only=True):
    """One priority class: how many of its requests wait, and which steps of degradation are in force."""

    name: str = msgspec.field(name="class")
    priority: int = 0
    sheddable: bool = False
    target_ttft_ms: int | None = None
    target_inter_token_ms: float | None = None
    objective: float | None = None  # share of its requests that are to be within all targets
    attainment: float | None = None  # share of those judged in the last minutes that were; None: none was judged
    judged: int = 0  # requests that the attainment rests on
    waiting: int = 0
    waiting_for_pod: int = 0  # of these, because no pod is ready
    steps: Sequence[str] = ()
    in_force: Sequence[StepState] = ()
    routed: int = 0  # of the requests that are remembered


class ClassesEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The event `classes`: the most important first, and what became of the requests that are remembered."""

    now: float
    waiting: int
    remembered: int
    classes: Sequence[ClassState]
    refusals: Mapping[str, int]  # reason -> requests
    quotas: Mapping[str, Any]
    shadow: bool = False  # what the policy would refuse, degrade, offload or scale is only counted and shown


class FindingState(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong although nothing has failed."""

    check: str
    severity: str
    subject: str
    seen: str
    fix: str = ""
    since: float | None = None
    found_by: str = "picker"


class MissingInput(msgspec.Struct, frozen=True, kw_only=True):
    """What some of the last decisions had to do without."""

    reason: str
    words: str
    last_at: float
    count: int


class IndexEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The event `index`: how far the prefix index can be relied on."""

    now: float
    state: str  # ok, stale or unavailable
    problem: str | None
    indexer_alive: bool
    sources_count: int
    sources: Sequence[SourceStatus]
    left_out: int
    unreadable: Sequence[str]
    findings: Sequence[FindingState]
    findings_state: str  # done, or not-yet: the checks at start-up are still to come
    replicas: Mapping[str, Any] | None
    degraded: Sequence[MissingInput]


class IndexState(msgspec.Struct, frozen=True, kw_only=True):
    """The same in short: ok, stale or unavailable."""

    state: str
    problem: str | None = None
    sources: int = 0


class CandidateState(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint as one request sees it."""

    endpoint: str
    state: str = "ready"
    fill: float | None = None  # how full it is for the request's class; 1.0 and more: it has no room
    full: str | None = None  # why it has no room
    matched_tokens: int = 0
    matched_blocks: int = 0
    indexed_tokens: int = 0
    recent_tokens: int = 0
    worth_tokens: float = 0.0
    waiting: int | None = None
    running: int | None = None
    kv_usage: float | None = None
    booked_since_report: int = 0
    open_requests: int = 0
    backlog_tokens: int = 0
    context_tokens: int = 0
    filled_tokens: int = 0
    prefill_tokens_per_second: float | None = None
    inter_token_ms: float | None = None
    session: bool = False
    unhealthy: str | None = None
    index_state: str | None = None
    held_back: str | None = None  # why the index expects less than what full attention holds there
    scores: Mapping[str, float] = {}
    total: float | None = None  # None: nothing was decided


class RejectedState(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint that a filter has dropped, with the filter's words."""

    endpoint: str
    filter: str


class RequestState(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown of a request; nothing of its prompt."""

    api: str = ""
    model: str | None = None
    served_model: str | None = None
    adapter: str | None = None
    arm: str = ""
    prompts: int = 0
    stream: bool = False
    max_tokens: int | None = None
    class_name: str = msgspec.field(name="class")
    class_by: str = ""
    objective_ignored: str = ""  # why the objective that it names does not count: unknown or untrusted
    priority: int = 0
    tenant: str = ""
    steps: Sequence[str] = ()


class AdmissionState(msgspec.Struct, frozen=True, kw_only=True):
    """What would become of a request, and what its class is promised."""

    verdict: str  # go, wait or refuse
    expected_ttft_ms: int
    target_ttft_ms: int
    target_inter_token_ms: float | None = None
    attainment: float | None = None  # of its class, as in ClassState
    judged: int = 0
    waiting_requests: int = 0


class PrefillState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's prompt is computed, and what was compared; the times are to the client's first token."""

    where: str  # "remote" or "local"
    why: str
    rule: str
    endpoint: str  # the prefill pod that was compared with
    uncached_tokens: int  # of the prompt, on the decode pod
    remote_uncached_tokens: int  # on the prefill pod
    prefill_queue: int  # requests
    decode_requests: int
    local_ms: float
    remote_ms: float
    transfer_ms: float  # of the remote time
    races: bool = False  # a second prefill pod computes the same prompt at the same time
    race: str | None = None  # why it does, or does not; None: the policy wants no races


class ShadowState(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy would have done to a request, were it not in shadow."""

    rule: str  # admission, quota, degradation, disaggregation
    action: str  # refuse, wait, degrade, offload
    reason: str
    words: str = ""


class DecisionState(msgspec.Struct, frozen=True, kw_only=True):
    """One request that was answered, or that `explain` asks about, with what the decision rests on.

    `status` is 200 for what was routed: the pod answers for itself.
    """

    id: str = ""
    at: float = 0.0
    pool: str | None = None
    request_id: str | None = None
    path: str | None = None
    model: str | None = None
    class_name: str | None = msgspec.field(name="class", default=None)
    queued_ms: float | None = None  # None: it did not wait for room
    decided_ms: float | None = None
    phases_ms: Mapping[str, float] = {}
    endpoint: str | None  # None: it was refused
    status: int = 200
    reason: str | None = None  # of a refusal, or `failed-open`
    message: str | None = None
    reasons: Sequence[str] = ()
    why: str = ""  # in `GET /state`, which has no candidates: why it went there, in a sentence or two
    fallbacks: Sequence[str] = ()
    prompt_tokens: int = 0
    matched_tokens: int = 0
    best_matched_tokens: int = 0
    degraded: Sequence[str] = ()
    notes: Sequence[str] = ()
    shadow: Sequence[ShadowState] = ()
    strategy: str = ""
    weights: Mapping[str, float] = {}
    candidates: Sequence[CandidateState] = ()
    candidates_left_out: int = 0
    as_good: int = 0  # candidates with the winner's total, itself among them, also of those left out
    rejected: Sequence[RejectedState] = ()
    rejected_left_out: int = 0
    request: RequestState | None = None
    prefill: PrefillState | None = None  # None: nobody but the decode pod could compute the prompt
    admission: AdmissionState | None = None  # of an explanation
    missed: int = 0  # events of the feed that were left out before this one


class EndedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an exchange; seconds count from the request's arrival."""

    at: float
    decision_id: str | None
    request_id: str
    endpoint: str
    served_by: str | None
    status: int
    seconds_to_headers: float | None
    seconds: float
    usage: Usage | None
    missed: int = 0


class VariantState(msgspec.Struct, frozen=True, kw_only=True):
    """How many pods of one variant are wanted, and what one of them does within the promises."""

    name: str  # "": pods of a role without variants, or of none of them
    wanted: int
    told: int
    ready: int
    present: int
    source: str  # of what is known of a pod: learned, declared, assumed, unknown
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    pod_hour_price: float | None = None


class ActedState(msgspec.Struct, frozen=True, kw_only=True):
    """How it stands with one Deployment whose scale is to be written (the policy's autoscale.act)."""

    deployment: str
    variant: str
    wanted: int
    replicas: int | None  # that it says; None: it was not read
    state: str
    words: str


class ScaleState(msgspec.Struct, frozen=True, kw_only=True):
    """How many pods of one role are wanted (the policy's autoscale), and why."""

    role: str
    wanted: int
    told: int  # to autoscalers: in shadow the present number
    ready: int
    present: int
    state: str
    reason: str
    shadow: bool = False
    saturation: float | None = None
    prefill_lean: float | None = None  # the share of prompts in its work
    cost_per_hour: float | None = None  # of the pods that are there
    cost_per_million_tokens: float | None = None  # as served in the last minutes
    cost_per_million_output_tokens: float | None = None
    time_of_day: str = "learning"  # whether the days before say what is ahead
    variants: Sequence[VariantState] = ()
    acts: Sequence[ActedState] = ()


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """One of several pools in short."""

    pool: str
    endpoints: int = 0
    ready: int = 0
    prefill: int = 0  # that compute prompts for others
    open_requests: int = 0
    waiting: int = 0
    hosts: Sequence[str] = ()
    model: str | None = None
    policies: Sequence[str] = ()
    shadow: bool = False


class MeasuredState(msgspec.Struct, frozen=True, kw_only=True):
    """What the pods have measured since the picker saw them first, but for those that only prefill: a histogram."""

    bounds: Sequence[float] = ()  # seconds
    counts: Sequence[float] = ()  # requests by bucket, not cumulative; the last bucket has no bound


class PickerState(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /state`: one pool; decisions are newest first, classes the most important first."""

    now: float
    endpoints: Sequence[EndpointState] = ()
    index: IndexState = IndexState(state="unknown")
    classes: Sequence[ClassState] = ()
    scale: Sequence[ScaleState] = ()  # of roles that a policy's autoscale names
    quotas: Mapping[str, Any] = {}
    replicas: Mapping[str, Any] | None = None
    token_sources: Mapping[str, str] = {}  # model -> folder, pods or text: of most of its last prompts
    # model with a tokenizer folder -> exact, unverified or differs: its tokens compared with those of its pods, and why
    token_states: Mapping[str, tuple[str, str]] = {}
    findings: Sequence[FindingState] | None = None  # of the checks at start-up; None: they are still to come
    decisions: Sequence[DecisionState] = ()
    pool: str | None = ""  # None: the picker serves several, and none was named
    pools: Sequence[PoolState] = ()
    shadow: bool = False  # what the policy would refuse, degrade, offload or scale is only counted and shown
    ttft: MeasuredState = MeasuredState()


class ListedEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A pod of one of several pools."""

    pool: str
    address: str
    state: str


class PoolsState(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /state` where several pools are served and none was named; `PickerState` reads it, too."""

    now: float
    pool: None = None
    pools: Sequence[PoolState]
    endpoints: Sequence[ListedEndpoint]


class HolderState(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prefix a pod holds: estimated from the blocks that were looked up."""

    endpoint: str
    blocks: int
    tiers: Mapping[str, int]


class PrefixNode(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the prefix tree without a branch."""

    id: str
    parent: str | None
    model: str
    adapter: str | None
    depth: int
    from_tokens: int
    tokens: int
    blocks: int
    requests: float
    share_of_requests: float
    hit_tokens: int
    share_of_hits: float
    holders: Sequence[HolderState] | None  # None: the index was not to be had, or does not know such keys
    holders_left_out: int
    held_blocks: int | None
    share_of_memory: float | None
    last_at: float
    text: str | None


class PrefixesEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/prefixes` and the event `prefixes`: parents come before their children."""

    now: float
    pool: str
    since: float  # when remembering began
    half_life_seconds: float
    sampled_share: float
    requests: float
    hit_tokens: int
    cached_blocks: int | None  # of the pool, in the index
    index: str  # ok, unavailable or no-tokens
    text_shown: bool
    left_out: int
    nodes: Sequence[PrefixNode]


class PolicyState(msgspec.Struct, frozen=True, kw_only=True):
    """What of the policy the page shows or goes by."""

    strategy: str
    weights: Mapping[str, float]
    show_prompt_text: bool
    gpu_hour_price: float
    currency: str


class SnapshotEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The event `snapshot`: everything at once; where several pools are served and none is named, only the pools."""

    version: int
    now: float
    process_id: str
    kvmesh: str
    pool: str | None
    pools: Sequence[PoolState]
    picker: str = ""  # its name among the replicas
    docs: str = ""  # where the documentation is
    policy: PolicyState | None = None
    pods: PodsEvent | None = None
    classes: ClassesEvent | None = None
    index: IndexEvent | None = None
    prefixes: PrefixesEvent | None = None
    history: HistoryEvent | None = None
    decisions: Sequence[DecisionState] | None = None
