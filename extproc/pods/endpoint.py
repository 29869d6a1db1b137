"""Endpoints as the picker knows them: what each pod reported, what was booked since, how much of a prompt it holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvmesh.pods.pod_report import EndpointLoad
from kvmesh.pods.served_models import first_base_model, model_cards


class Reachability(StrEnum):
    """What the last scrapes say of an endpoint."""

    READY = "ready"  # it reported its load recently
    UNKNOWN = "unknown"  # it is there as far as we know, but its load is not known: never taken for idle
    UNREACHABLE = "unreachable"  # nothing listens there
    NOT_READY = "not-ready"  # its platform keeps requests away from it
    TERMINATING = "terminating"  # it finishes what it has


class Role(StrEnum):
    """What an endpoint is for, where prefill and decode are split."""

    BOTH = "both"
    PREFILL = "prefill"  # computes prompts for others; takes no client's request
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointTrend:
    """Rates, which follow from the difference of two reports of one pod."""

    inter_token_seconds: float | None = None  # mean of the last window; None: too few tokens to say
    memory_bytes_per_second: float | None = None
    prefill_tokens_per_second: float | None = None  # what the pod manages when it has enough to do
    prompt_tokens_per_second: float = 0.0  # that it has begun to compute, in that window or the one before: the more


NO_TREND = EndpointTrend()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointModels:
    """What a pod's /v1/models says it serves."""

    models: frozenset[str]  # base models under all their served names
    adapters: Mapping[str, str | None]  # LoRA adapter -> its base model, where the pod says
    max_model_len: int | None = None  # tokens of prompt and output
    first: str = ""  # of the base models: vLLM's first --served-model-name, by which blocks are indexed

    def serves(self, name: str) -> bool:
        """Tell whether requests for the name are answered."""
        return name in self.models or name in self.adapters


def parse_served_models(body: bytes) -> EndpointModels | None:
    """Read a pod's /v1/models, or return None where it is none or lists no model: then every model may be there."""
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
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStatus:
    """One endpoint between two scrapes."""

    address: str  # host:port, IPv6 bracketed
    reachability: Reachability
    load: EndpointLoad | None  # None: never reported, or too old to be used
    trend: EndpointTrend = NO_TREND
    models: EndpointModels | None = None  # None: not known; every model may be there
    ready_since: float | None = None  # monotonic seconds since when it serves; None: since before we looked


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One endpoint as one request sees it: the input of filters and scorers. Made once a request and endpoint.

    Nothing in it leads back to it, so that the garbage collector need not look.
    """

    address: str
    reachability: Reachability
    load: EndpointLoad | None
    booked_requests: int  # sent by all pickers and not yet in the report
    matched_tokens: int  # leading prompt tokens that the endpoint is expected to hold, at most prompt_tokens - 1
    prompt_tokens: int  # 0 when neither the prompt's tokens nor their number are known
    worth_tokens: float | None = None  # the same as GPU tokens: a hit in a slower tier counts less; None: all of them
    indexed_tokens: int = 0  # what the index alone says
    recent_tokens: int = 0  # what recent routing alone says
    open_requests: int = 0  # sent by all pickers and not ended
    backlog_tokens: float = 0.0  # uncached prompt tokens sent there that are not computed yet, all pickers
    context_tokens: int = 0  # prompt tokens of the open requests: what decoding there reads again and again
    filled_tokens: float = 0.0  # prompt tokens computed there of late: what has taken room in its cache
    trend: EndpointTrend = NO_TREND
    models: EndpointModels | None = None
    promised: Mapping[str, int] = {}  # open streams there by class, of classes with a promised inter-token time
    role: Role = Role.BOTH
    cordoned: bool = False  # the operator keeps new requests away
    unhealthy: str | None = None  # why it is avoided
    session: bool = False  # this session's last request went there
    adapter_placed: bool = False  # the request's LoRA adapter was sent there lately
    ready_since: float | None = None  # monotonic seconds since when it serves; None: it is not new
    held_back: str = ""  # why the index expects less than what full attention holds there, in words
    source_state: str = ""  # what the index says of the endpoint's events where that is not "live", "" else

    @property
    def queue_depth(self) -> int | None:
        """Requests waiting there for their turn plus those that were sent since, or None when the load is unknown."""
        return None if self.load is None else self.load.waiting_requests + self.booked_requests

    @property
    def active_requests(self) -> int | None:
        """Requests waiting for whatever, running or on their way there, or None when the load is unknown."""
        if self.load is None:
            return None
        return max(self.load.unfinished_requests + self.booked_requests, self.open_requests)

    @property
    def saved_tokens(self) -> float:
        """Matched tokens in the worth of GPU hits."""
        return self.matched_tokens if self.worth_tokens is None else self.worth_tokens


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a request that filters and scorers use."""

    model: str | None = None  # the name that the pod gets
    adapter: str | None = None  # the same name where it is a LoRA adapter's
    prompt_tokens: int = 0  # of the longest prompt; 0 when unknown, an estimate where only the text is known
    subset: frozenset[str] | None = None  # endpoints that the route allows (`envoy.lb.subset_hint`); None: all
    max_model_len: int | None = None  # from the configuration, where the pods do not say
    turn: int = 0  # counts requests: what round robin goes by
    class_name: str = ""  # of its priority; "": none


NOTHING_ASKED = Ask()
