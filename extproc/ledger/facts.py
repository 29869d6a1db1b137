"""The facts of requests: `Decided` with the outcome, `Read` of a response, `Ended`; and of the endpoints they meet.

The request's path states them, and `Ledger` tells its listeners. They contain no part of a prompt.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Self

import msgspec

from extproc.admission.asked_request import AskedFor
from extproc.answers.judgement import Judgement, Measured
from extproc.answers.promise import AnswerPromise, IgnoredTarget, OpenPromise
from extproc.answers.realised import Comparison, Usage
from extproc.answers.response_plan import Miss
from extproc.choosing.decision import Decision
from extproc.disaggregation.prefill_plan import PrefillPlan
from extproc.disaggregation.transfer_protocols import LegOutcome
from extproc.errors import Cause, PickError
from extproc.ext_proc.exchange import NO_HEADERS, RequestFacts
from extproc.policy.shadow import Withheld


class ClientLeftError(PickError):
    """The client has left while its request waited. Never sent; 499 as in proxies' logs."""

    http_status = 499
    reason = "client-left"


class RequestOutcome(StrEnum):
    """The picker's decision on a request."""

    ROUTED = "routed"
    REFUSED = "refused"  # answered by the picker
    FAILED_OPEN = "failed-open"  # sent without a decision, because the pool says FailOpen
    ABANDONED = "abandoned"  # the client left before there was a decision


class NoDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The remembered facts of an error: the error itself would keep the body alive through its stack frames."""

    reason: str
    message: str
    status: int
    cause: Cause = Cause.OTHER

    @classmethod
    def of(cls, error: PickError) -> Self:
        """Return the error's facts."""
        return cls(reason=error.reason, message=error.message, status=error.status, cause=error.cause)


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One answered request; no part of its prompt."""

    at: float  # unix seconds
    id: str  # from `answers.response_plan`; request ids are the clients' and may repeat
    facts: RequestFacts
    model: str | None
    outcome: Decision | NoDecision
    asked: AskedFor | None = None  # None if refused before it was read
    prefill: PrefillPlan | None = None  # None if only the decode pod could compute its prompt
    shadow: tuple[Withheld, ...] = ()  # decisions withheld by shadow mode


class SpanContext(msgspec.Struct, frozen=True, kw_only=True):
    """The span of one exchange (https://www.w3.org/TR/trace-context/); exists only if tracing is on and sampled."""

    trace_id: int
    span_id: int
    parent_id: int = 0  # 0: this span begins the trace
    tracestate: str = ""

    @property
    def traceparent(self) -> str:
        """The header for the pod, which makes its spans children of this one."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"

    @property
    def set_headers(self) -> Mapping[str, str]:
        """The request headers for the pod."""
        state = {"tracestate": self.tracestate} if self.tracestate else {}
        return {"traceparent": self.traceparent} | state


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a request that are known when it is complete."""

    number: int = 0  # unique in this process; clients may reuse request ids. 0 for an explanation
    pool: str = ""  # "namespace/name", "" for the static pool
    request_id: str = ""
    at: float = 0.0  # monotonic seconds
    unix_ns: int = 0
    span: SpanContext | None = None
    trace_id: str = ""  # of the span, in the form of headers
    set_headers: Mapping[str, str] = NO_HEADERS  # make a pod's spans children of the exchange's span


class Held(StrEnum):
    """An inter-token target kept a request from an endpoint; a metric's label."""

    ELSEWHERE = "elsewhere"  # another one had room
    NO_ROOM = "no-room"


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """A request has its decision. After a refused or abandoned one no `Ended` follows."""

    arrival: Arrival
    outcome_kind: RequestOutcome
    record: DecisionRecord  # if it failed open, `outcome` is the error
    endpoint: str | None = None  # where it was sent, or None
    at: float = 0.0  # monotonic seconds
    queued_seconds: float | None = None  # None if it did not wait for room
    phases: Mapping[str, float] = {}  # seconds of the phases it went through: parse, tokenize, lookup, decide
    audit_share: float = 1.0  # share of the pool's requests to log, by its policy
    prompt_key: bytes = b""  # key of the prompt's last whole block; hash it with a secret before showing it
    label: str = ""  # requested model, if its name is configured
    served: str = ""  # configured name of the model that the pods serve
    promise: OpenPromise | None = None  # its targets, None if it is not judged
    is_late: bool = False  # for these
    ignored_targets: tuple[IgnoredTarget, ...] = ()
    held: Held | None = None
    expected_ttft_seconds: float | None = None  # None without an endpoint
    seconds_a_token: float = 0.0  # the endpoint's time to compute one prompt token

    @property
    def seconds(self) -> float:
        """The time from the request's arrival to the decision, waiting included."""
        return self.at - self.arrival.at


class LegEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A finished prefill request: the prefill pod computed the prompt for the decode pod."""

    endpoint: str
    outcome: LegOutcome
    began_seconds: float  # from the request's arrival here
    seconds: float
    lost_tokens: float | None = None  # computed for a race that another prefill pod won; None if none were
    problem: str = ""  # the reason of a failure
    trace_id: str = ""


class LegsEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A request's prefill requests are over, and the request goes to its decode pod."""

    race_winner: int | None = None  # 0 or 1, -1 if both failed; None without a race
    fell_back: bool = False  # all have failed: the decode pod computes the prompt


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """The judgement of one answer by its targets."""

    answer: AnswerPromise
    judgement: Judgement
    asked: Judgement | None  # by the targets in the request's headers
    served_by: str
    has_come: bool  # some of its body was seen; else its client has left, or Envoy does not send bodies
    failed: bool = False  # the stream reported a server error, or was empty
    measured: Measured


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """A response was read, or should have been; its request may be another picker's."""

    comparison: Comparison | None = None  # of its usage with the prediction
    judged: Judged | None = None
    missed: tuple[Miss, ...] = ()


class EndpointFailed(msgspec.Struct, frozen=True):
    """An endpoint failed a request: unreachable, broken off, or 5xx."""

    endpoint: str


class EndpointFull(msgspec.Struct, frozen=True):
    """An endpoint answered 429 or 503 itself: it has no room."""

    endpoint: str


class EndpointRemoved(msgspec.Struct, frozen=True):
    """A removed endpoint has no open request any more."""

    endpoint: str


class Rerouted(msgspec.Struct, frozen=True, kw_only=True):
    """A retry by Envoy moved a request from the picked endpoint to another one."""

    picked: str
    served_by: str


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The exchange of a request that was sent to an endpoint has ended, for whatever reason."""

    arrival: Arrival
    endpoint: str  # as picked
    served_by: str | None = None  # the endpoint that answered, which differs after a retry; None if none or unknown
    booked_on: str | None = None  # the endpoint with its booking; None if it was sent without a decision
    status: int = 0  # 0: no answer came
    unserved: bool = False  # Envoy answered instead of a pod, or the pod had no room
    at: float = 0.0  # monotonic seconds
    headers_at: float | None = None  # monotonic seconds; None without an answer
    booked_seconds: float = 0.0  # since the last booking
    label: str = ""  # labels of the metrics by model and arm: configured names, or ""
    arm: str = ""
    promise: OpenPromise | None = None  # None if not judged, or already missed at the decision
    usage: Usage | None = None  # if the response was read here: a sample, short ones, tenants with quotas
    stream_failed: bool = False  # it reported a server error after good headers, or was empty; if it was read here
    first_token_seconds: float | None = None  # from the request's arrival here; None if not a judged stream
    legs: tuple[LegEnd, ...] = ()  # prefill requests in the order of their ends; at most one has `answered`

    @property
    def seconds(self) -> float:
        """The time from the request's arrival here."""
        return self.at - self.arrival.at

    @property
    def seconds_to_headers(self) -> float | None:
        """The time from the request's arrival here to the answer's headers; None without an answer."""
        return self.headers_at - self.arrival.at if self.headers_at is not None else None
