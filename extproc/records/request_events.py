"""The events of one request, for observers: `Decided` with its outcome, `Ended` when its exchange is over.

`pools.request_watch` makes them and calls the observers. No part of a prompt is in them.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

import msgspec

from extproc.choosing.decision import Decision
from extproc.disaggregation.prefill_plan import PrefillPlan
from extproc.errors import PickError
from extproc.ext_proc.exchange import RequestFacts
from extproc.policy.request_class import RequestClass
from extproc.policy.shadow import Withheld
from extproc.responses.realised import Usage


class ClientLeftError(PickError):
    """The client has left while its request waited. Never sent; 499 as proxies write it."""

    http_status = 499
    reason = "client-left"


class RequestOutcome(StrEnum):
    """What the picker has done with a request."""

    ROUTED = "routed"
    REFUSED = "refused"  # answered by the picker itself
    FAILED_OPEN = "failed-open"  # sent without a decision, because the pool says FailOpen
    ABANDONED = "abandoned"  # the client left before there was a decision


class AskedFor(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of a request; no part of its prompt."""

    api: str
    model: str | None  # as the client wrote it
    served_model: str | None  # what the pod gets
    adapter: str | None
    arm: str
    prompts: int
    stream: bool
    max_tokens: int | None
    block_tokens: int  # 0 where tokens are unknown
    request_class: RequestClass
    steps: tuple[str, ...] = ()  # of degradation, that changed it
    prompt_tokens: int = 0  # 0: not known, as of what is refused before it is looked up


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One answered request; no part of its prompt."""

    at: float  # unix seconds
    id: str  # of `pools.decision_headers`: clients choose request ids, so one of these may come twice
    facts: RequestFacts
    model: str | None
    outcome: Decision | PickError
    asked: AskedFor | None = None  # None: it was refused before it was read
    prefill: PrefillPlan | None = None  # None: nobody but the decode pod could compute its prompt
    shadow: tuple[Withheld, ...] = ()  # what the policy would have done to it, were it not in shadow


class SpanContext(msgspec.Struct, frozen=True, kw_only=True):
    """The span of one exchange (https://www.w3.org/TR/trace-context/); exists only where traces are on and sampled."""

    trace_id: int
    span_id: int
    parent_id: int = 0  # 0: this span begins the trace
    tracestate: str = ""

    @property
    def traceparent(self) -> str:
        """Return the header for the pod, so that its spans are children of this one."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """A request has its outcome. If that is refused or abandoned, no `Ended` follows."""

    number: int  # unique in this picker process; the same in `Ended`. Clients may reuse request ids
    pool: str  # "namespace/name", "" for the static pool
    outcome_kind: RequestOutcome
    record: DecisionRecord  # where it failed open, `outcome` is the error that made it so
    endpoint: str | None  # where it was sent
    started_unix_ns: int
    seconds: float  # from the request's arrival here to the decision, waiting included
    queued_seconds: float | None = None  # None: it did not wait for room
    phases: Mapping[str, float]  # parse, tokenize, lookup, decide: seconds; those that it went through
    span: SpanContext | None = None
    audit_share: float = 1.0  # of the pool's requests that are to be written down, by its policy
    prompt_key: bytes = b""  # of the prompt's last whole block; to be hashed with a key before it is shown


class LegEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill leg that is over: a request to a pod that computed the prompt for the one that decodes."""

    endpoint: str
    outcome: str  # a `LegOutcome`
    began_seconds: float  # from the request's arrival here
    seconds: float


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The exchange of a request that was sent to an endpoint is over, for whatever reason."""

    number: int
    pool: str
    request_id: str
    endpoint: str  # as picked
    served_by: str | None  # the endpoint that answered, another one after a retry; None: none, or not known
    status: int  # 0: no answer came
    unserved: bool  # Envoy answered in a pod's place, or the pod had no room
    seconds_to_headers: float | None  # from the request's arrival here; None: no answer came
    seconds: float  # from the request's arrival here
    usage: Usage | None = None  # where the response was read here: a sample, short ones, tenants with quotas
    first_token_seconds: float | None = None  # from the request's arrival here; None: no stream, or it was not judged
    legs: tuple[LegEnd, ...] = ()  # in the order in which they ended; at most one has `answered`
    span: SpanContext | None = None


class RequestObserver(Protocol):
    """Called on the event loop; must not wait. What it raises is logged and affects no request."""

    def decided(self, decided: Decided, /) -> None:
        """Take the outcome of a request."""

    def ended(self, ended: Ended, /) -> None:
        """Take the end of an exchange. It may have begun before this observer was there."""
