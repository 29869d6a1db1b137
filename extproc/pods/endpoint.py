"""Endpoints as the picker knows them: each pod's report, the bookings since, and its share of a prompt."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvmesh.pods.pod_report import EndpointLoad
from kvmesh.pods.served_models import first_base_model, model_cards


class Reachability(StrEnum):
    """An endpoint's state according to its last scrapes and its platform."""

    READY = "ready"  # it reported its load recently
    UNKNOWN = "unknown"  # it does not refuse connections, but has no recent report: never treated as idle
    UNREACHABLE = "unreachable"  # nothing listens there
    NOT_READY = "not-ready"  # its platform keeps requests away from it
    TERMINATING = "terminating"  # it only finishes its open requests


class Role(StrEnum):
    """An endpoint's role where prefill and decode are disaggregated."""

    BOTH = "both"
    PREFILL = "prefill"  # computes prompts for others; takes no client's request
    DECODE = "decode"


class EndpointTrend(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Rates computed from the difference of two reports of one pod."""

    inter_token_seconds: float | None = None  # mean of the last window, or None with too few tokens
    memory_bytes_per_second: float | None = None
    prefill_tokens_per_second: float | None = None  # prefill rate under load
    prompt_tokens_per_second: float = 0.0  # rate of started prompts: the higher one of the last two windows


NO_TREND = EndpointTrend()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointModels:
    """The models in a pod's /v1/models."""

    models: frozenset[str]  # base models under all their served names
    adapters: Mapping[str, str | None]  # LoRA adapter -> base model, None if the pod does not name it
    max_model_len: int | None = None  # tokens of prompt and output
    first: str = ""  # first base model: vLLM's first --served-model-name, the model name in the block index
    is_sglang: bool = False

    def serves(self, name: str) -> bool:
        """Tell whether the pod answers requests for this model or adapter."""
        return name in self.models or name in self.adapters


def parse_served_models(body: bytes) -> EndpointModels | None:
    """Read a pod's /v1/models, or return None if it is invalid or lists no model: then any model may be served."""
    try:
        cards = model_cards(body)
    except ValueError:
        return None
    lengths = [length for card in cards if (length := card.context_tokens) is not None]
    names = [card.id for card in cards if card.parent is None]
    if not names:
        return None
    return EndpointModels(
        models=frozenset(names),
        adapters={card.id: card.parent for card in cards if card.parent is not None},
        max_model_len=min(lengths, default=None),
        first=first_base_model(cards) or "",
        is_sglang=cards[0].owned_by == "sglang",
    )


class EndpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint's state between two scrapes."""

    address: str  # host:port, IPv6 bracketed
    reachability: Reachability
    load: EndpointLoad | None  # None if it never reported or the report is stale
    trend: EndpointTrend = NO_TREND
    models: EndpointModels | None = None  # None if unknown; then any model may be served
    ready_since: float | None = None  # monotonic seconds of its first report (or arrival); None if not new


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One endpoint as one request sees it: the input of filters and scorers. Made once per request and endpoint.

    It is never part of a reference cycle, so the garbage collector need not track it (`gc=False`).
    """

    address: str
    reachability: Reachability
    load: EndpointLoad | None
    booked_requests: int  # sent by all pickers, not yet in the report
    matched_tokens: int  # expected prefix hit, at most prompt_tokens - 1
    prompt_tokens: int  # 0 if neither the prompt's tokens nor their number are known
    worth_tokens: float | None = None  # matched_tokens weighted by cache tier (GPU = 1); None if all count fully
    indexed_tokens: int = 0  # hit according to the index alone
    recent_tokens: int = 0  # hit according to recent routing alone
    open_requests: int = 0  # sent by all pickers, not ended
    backlog_tokens: float = 0.0  # uncached prompt tokens sent by all pickers, not yet computed
    context_tokens: int = 0  # prompt tokens of the open requests, read by each decode step
    filled_tokens: float = 0.0  # prompt tokens computed recently: they fill its cache
    growth_tokens: float = 0.0  # of the open requests' answers, still to come; 0 if it does not count
    trend: EndpointTrend = NO_TREND
    models: EndpointModels | None = None
    promised: Mapping[str, int] = {}  # open streams by class, only of classes with an inter-token target
    role: Role = Role.BOTH
    cordoned: bool = False  # the policy keeps new requests away
    unhealthy: str | None = None  # why it is avoided
    failing: bool = False  # because every request fails there
    session: bool = False  # this session's last request went there
    adapter_placed: bool = False  # the request's LoRA adapter was sent there lately
    ready_since: float | None = None  # monotonic seconds of its first report; None if it is not new
    held_back: str = ""  # why the usable hit is shorter than the one of full attention, for people
    source_state: str = ""  # state of the endpoint's KV events in the index, "" if "live"

    @property
    def queue_depth(self) -> int | None:
        """Waiting requests in the report plus the bookings since, or None if the load is unknown."""
        return None if self.load is None else self.load.waiting_requests + self.booked_requests

    @property
    def active_requests(self) -> int | None:
        """Requests waiting, fetching, running or on their way there, or None if the load is unknown."""
        if self.load is None:
            return None
        return max(self.load.unfinished_requests + self.booked_requests, self.open_requests)

    @property
    def saved_tokens(self) -> float:
        """Matched tokens, weighted by cache tier (GPU = 1)."""
        return self.matched_tokens if self.worth_tokens is None else self.worth_tokens


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """The request's facts for filters and scorers."""

    model: str | None = None  # the name sent to the pod
    adapter: str | None = None  # the same name if it is a LoRA adapter
    prompt_tokens: int = 0  # of the longest prompt; 0 if unknown, an estimate if only the text is known
    subset: frozenset[str] | None = None  # the route's endpoints (`envoy.lb.subset_hint`); None allows all
    max_model_len: int | None = None  # from the configuration, if the pods do not report it
    turn: int = 0  # request counter for round robin
    class_name: str = ""  # priority class, "" without one
    answer_tokens: float = 0.0  # expected length of all its answers; 0 if unknown
    answer_spread: float = 0.0  # its standard deviation


NOTHING_ASKED = Ask()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointTrouble:
    """One endpoint's trouble according to its scrapes or its platform; times are monotonic seconds."""

    since: float
    problem: str | None  # last problem of its scrapes, or None if only its platform keeps requests away
    asked_every_seconds: float
