"""The JSON of a picker's admin pages and live feed, as values for writers and readers.

Unknown numbers are None, times are unix seconds, shares are 0..1. All fields except identifiers have defaults, so that
answers of older pickers can be read; fields added by newer pickers are ignored. Text from clients is shortened before
it gets here. docs/reference/live-feed.md says when each event is sent.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from extproc.answers.realised import Usage
from extproc.pages.history_state import HistoryEvent
from kvmesh.blocks.source import SourceStatus


class EndpointState(msgspec.Struct, frozen=True, kw_only=True):
    """One pod as the picker sees it."""

    address: str
    state: str  # a `Reachability`
    cached_blocks: int = 0  # in the index, in all tiers
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    hit_rate: float | None = None
    bookings: int = 0  # open requests of this picker
    picks: int = 0  # since the picker started
    share: float = 0.0  # of all picks
    avoided: str | None = None  # why it gets no new requests
    since: float | None = None  # start of the avoidance, or of not being ready
    problem: str | None = None  # the last scrape's error, if the pod is not ready
    asked_every_seconds: float | None = None  # scrape interval until it reports again
    trial_at: float | None = None  # time of the next trial request, if it is avoided for failures
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
    """The event `pods`: the endpoints in configured order."""

    now: float
    pods: Sequence[EndpointState]
    left_out: int = 0
    totals: Mapping[str, int]  # sums over all endpoints


class StepState(msgspec.Struct, frozen=True, kw_only=True):
    """One degradation step in force."""

    step: str
    model_pool: str
    since_seconds: float
    pressure: float


class ClassState(msgspec.Struct, frozen=True, kw_only=True):
    """One priority class: its waiting requests and its degradation steps in force."""

    name: str = msgspec.field(name="class")
    priority: int = 0
    sheddable: bool = False
    target_ttft_ms: int | None = None
    target_inter_token_ms: float | None = None
    objective: float | None = None  # SLO: the share of requests that should meet all targets
    attainment: float | None = None  # the share that did, of requests judged in the last minutes; None without any
    judged: int = 0  # number of requests behind the attainment
    waiting: int = 0
    waiting_for_pod: int = 0  # the part that waits because no pod is ready
    steps: Sequence[str] = ()
    in_force: Sequence[StepState] = ()
    routed: int = 0  # among the remembered requests


class ClassesEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The event `classes`: highest priority first, with the outcomes of the remembered requests."""

    now: float
    waiting: int
    remembered: int
    classes: Sequence[ClassState]
    refusals: Mapping[str, int]  # reason -> requests
    quotas: Mapping[str, Any]
    shadow: bool = False  # the policy's refusals, degradations, offloads and scaling are only counted and shown


class FindingState(msgspec.Struct, frozen=True, kw_only=True):
    """A problem that causes no failure."""

    check: str
    severity: str
    subject: str
    seen: str
    fix: str = ""
    since: float | None = None
    found_by: str = "picker"


class MissingInput(msgspec.Struct, frozen=True, kw_only=True):
    """An input that some of the last decisions lacked."""

    reason: str
    words: str
    last_at: float
    count: int


class IndexEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The event `index`: the state of the prefix index."""

    now: float
    state: str  # ok, stale or unavailable
    problem: str | None
    indexer_alive: bool
    sources_count: int
    sources: Sequence[SourceStatus]
    left_out: int
    unreadable: Sequence[str]
    findings: Sequence[FindingState]
    findings_state: str  # done, or not-yet before the checks at start-up
    replicas: Mapping[str, Any] | None
    degraded: Sequence[MissingInput]


class IndexState(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of the index: ok, stale or unavailable."""

    state: str
    problem: str | None = None
    sources: int = 0


class CandidateState(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint from the view of one request."""

    endpoint: str
    state: str = "ready"
    fill: float | None = None  # fill level for the request's class; no room from 1.0 on
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
    held_back: str | None = None  # why fewer tokens are expected than full attention holds there
    scores: Mapping[str, float] = {}
    total: float | None = None  # None without a decision


class RejectedState(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint that a filter excluded, with the filter's reason."""

    endpoint: str
    filter: str


class RequestState(msgspec.Struct, frozen=True, kw_only=True):
    """A request, without anything of its prompt."""

    api: str = ""
    model: str | None = None
    served_model: str | None = None
    adapter: str | None = None
    arm: str = ""
    prompts: int = 0
    stream: bool = False
    max_tokens: int | None = None
    answer_tokens: float | None = None  # expected length of all its answers, None if unknown
    answer_spread: float | None = None  # its standard deviation
    class_name: str = msgspec.field(name="class")
    class_by: str = ""
    objective_ignored: str = ""  # why its objective is ignored: unknown or untrusted
    priority: int = 0
    tenant: str = ""
    steps: Sequence[str] = ()


class AdmissionState(msgspec.Struct, frozen=True, kw_only=True):
    """A request's admission verdict, and the targets of its class."""

    verdict: str  # go, wait or refuse
    expected_ttft_ms: int
    target_ttft_ms: int
    target_inter_token_ms: float | None = None
    attainment: float | None = None  # of its class, as in ClassState
    judged: int = 0
    waiting_requests: int = 0


class PrefillState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's prompt is computed, and the comparison behind it; the times are TTFTs for the client."""

    where: str  # "remote" or "local"
    why: str
    rule: str
    endpoint: str  # the prefill pod of the comparison
    uncached_tokens: int  # of the prompt, on the decode pod
    remote_uncached_tokens: int  # on the prefill pod
    prefill_queue: int  # requests
    decode_requests: int
    local_ms: float
    remote_ms: float
    transfer_ms: float  # part of the remote time
    races: bool = False  # a second prefill pod computes the same prompt at the same time
    race: str | None = None  # why, or why not; None without races in the policy


class ShadowState(msgspec.Struct, frozen=True, kw_only=True):
    """An action that the policy in shadow mode would have taken on a request."""

    rule: str  # admission, quota, degradation, disaggregation
    action: str  # refuse, wait, degrade, offload
    reason: str
    words: str = ""


class DecisionState(msgspec.Struct, frozen=True, kw_only=True):
    """One answered request, or one that `explain` asks about, with the basis of its decision.

    `status` is 200 for a routed request, whatever the pod answers.
    """

    id: str = ""
    at: float = 0.0
    pool: str | None = None
    request_id: str | None = None
    path: str | None = None
    model: str | None = None
    class_name: str | None = msgspec.field(name="class", default=None)
    queued_ms: float | None = None  # None if it did not wait for room
    decided_ms: float | None = None
    phases_ms: Mapping[str, float] = {}
    endpoint: str | None  # None if it was refused
    status: int = 200
    reason: str | None = None  # of a refusal, or `failed-open`
    message: str | None = None
    reasons: Sequence[str] = ()
    why: str = ""  # the choice in a sentence or two, only in `GET /state`, which has no candidates
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
    as_good: int = 0  # candidates with the winner's total, including the winner and candidates left out
    rejected: Sequence[RejectedState] = ()
    rejected_left_out: int = 0
    request: RequestState | None = None
    prefill: PrefillState | None = None  # None if only the decode pod could compute the prompt
    admission: AdmissionState | None = None  # only in explanations
    missed: int = 0  # feed events dropped before this one


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
    """The desired pods of one variant, and the throughput of one pod within the targets."""

    name: str  # "" for pods of a role without variants, or that match none
    wanted: int
    told: int
    ready: int
    present: int
    source: str  # of the throughput: learned, declared, assumed, unknown
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    pod_hour_price: float | None = None


class ScaleState(msgspec.Struct, frozen=True, kw_only=True):
    """The desired pods of one role (the policy's `autoscale`), and why."""

    role: str
    wanted: int
    told: int  # reported to autoscalers; in shadow mode, the present number
    ready: int
    present: int
    state: str
    reason: str
    shadow: bool = False
    saturation: float | None = None
    prefill_lean: float | None = None  # the share of prefill in its work
    cost_per_hour: float | None = None  # of the present pods
    cost_per_million_tokens: float | None = None  # of the last minutes' traffic
    cost_per_million_output_tokens: float | None = None
    variants: Sequence[VariantState] = ()


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of one of several pools."""

    pool: str
    endpoints: int = 0
    ready: int = 0
    prefill: int = 0  # prefill pods
    open_requests: int = 0
    waiting: int = 0
    hosts: Sequence[str] = ()
    model: str | None = None
    policies: Sequence[str] = ()
    shadow: bool = False


class MeasuredState(msgspec.Struct, frozen=True, kw_only=True):
    """A histogram measured by the pods (without prefill pods) since the picker first saw them."""

    bounds: Sequence[float] = ()  # seconds
    counts: Sequence[float] = ()  # requests by bucket, not cumulative; the last bucket has no bound


class PickerState(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /state`: one pool; decisions newest first, classes by descending priority."""

    now: float
    endpoints: Sequence[EndpointState] = ()
    index: IndexState = IndexState(state="unknown")
    classes: Sequence[ClassState] = ()
    scale: Sequence[ScaleState] = ()  # of roles named in the policy's `autoscale`
    quotas: Mapping[str, Any] = {}
    replicas: Mapping[str, Any] | None = None
    token_sources: Mapping[str, str] = {}  # model -> folder, pods or text: the source for most recent prompts
    # model with a tokenizer folder -> its tokens compared with the pods' (exact, unverified or differs), and why
    token_states: Mapping[str, tuple[str, str]] = {}
    findings: Sequence[FindingState] | None = None  # of the checks at start-up; None before they are done
    decisions: Sequence[DecisionState] = ()
    pool: str | None = ""  # None if the picker serves several and none was named
    pools: Sequence[PoolState] = ()
    shadow: bool = False  # the policy's refusals, degradations, offloads and scaling are only counted and shown
    ttft: MeasuredState = MeasuredState()


class ListedEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A pod of one of several pools."""

    pool: str
    address: str
    state: str


class PoolsState(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /state` of several pools, if none was named; `PickerState` can read it, too."""

    now: float
    pool: None = None
    pools: Sequence[PoolState]
    endpoints: Sequence[ListedEndpoint]


class HolderState(msgspec.Struct, frozen=True, kw_only=True):
    """A pod's part of a prefix, estimated from the sampled blocks."""

    endpoint: str
    blocks: int
    tiers: Mapping[str, int]


class PrefixNode(msgspec.Struct, frozen=True, kw_only=True):
    """One edge of the prefix tree: a run of blocks without a branch."""

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
    holders: Sequence[HolderState] | None  # None if the index is unavailable or does not contain such keys
    holders_left_out: int
    held_blocks: int | None
    share_of_memory: float | None
    last_at: float
    text: str | None


class PrefixesEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/prefixes` and the event `prefixes`: parents come before their children."""

    now: float
    pool: str
    since: float  # start of the statistics
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
    """The part of the policy that the page needs."""

    strategy: str
    weights: Mapping[str, float]
    show_prompt_text: bool
    pod_hour_price: float
    currency: str


class SnapshotEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The event `snapshot`: everything at once, or only the list of pools if none of several is named."""

    version: int
    now: float
    process_id: str
    kvmesh: str
    pool: str | None
    pools: Sequence[PoolState]
    picker: str = ""  # its name among the replicas
    docs: str = ""  # URL of the documentation
    policy: PolicyState | None = None
    pods: PodsEvent | None = None
    classes: ClassesEvent | None = None
    index: IndexEvent | None = None
    prefixes: PrefixesEvent | None = None
    history: HistoryEvent | None = None
    decisions: Sequence[DecisionState] | None = None
