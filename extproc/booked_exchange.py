"""One routed request until its exchange ends: who holds its booking, who really served it, what its response teaches.

Made by `service` for every pick; `adapters.ext_proc_call` tells it what Envoy tells. What is learned here goes through
`ExchangeBooks`, which the service is. A response may reach another picker than its request did: `ReadResponse` needs
the plan alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from extproc.core.inflight import Booking
from extproc.core.realised import Comparison, compare
from extproc.core.response_plan import PASS_PLAN, ResponseHandling, ResponsePlan
from extproc.wire.ext_proc import ResponseHead
from extproc.wire.response_model import ModelRewriter, rewriter_for
from extproc.wire.response_usage import UsageReader, usage_reader_for

EVENT_STREAM = "text/event-stream"
NOT_IMPLEMENTED = 501  # vLLM's answer to a request for what its model cannot do: the pod is well
# why a plan was not carried out: a closed set, a metric's label
COMPRESSED = "compressed"  # we read plain bytes only
NO_MODEL_FIELD = "other-content-type"  # neither JSON nor events: no `model` to rewrite
NO_USAGE = "no-usage"  # a stream whose client did not ask for it (stream_options.include_usage)
NO_CACHED_TOKENS = "no-cached-tokens"  # vLLM without --enable-prompt-tokens-details
NOT_DELIVERED = "not-delivered"  # Envoy was asked for the body and sent nothing: allow_mode_override is off
NO_RESPONSE_FILTER = "no-response-filter"  # duplex bodies without the second filter of envoy/local.yaml
TOO_LARGE = "too-large"
SERVED_ELSEWHERE = "served-elsewhere"  # a retry: the prediction was for another pod
MISSES = (
    *(COMPRESSED, NO_MODEL_FIELD, NO_USAGE, NO_CACHED_TOKENS, NOT_DELIVERED, NO_RESPONSE_FILTER, TOO_LARGE),
    SERVED_ELSEWHERE,
)


class ExchangeBooks(Protocol):
    """What an exchange needs of the service."""

    def knows(self, endpoint: str) -> bool:
        """Tell whether it is one of ours: only those take over bookings and have labels."""

    def rebook(self, booking: Booking, endpoint: str) -> Booking:
        """Move a booking to the pod that really serves, after a retry; count it, and return the new one."""

    def endpoint_answered(self, endpoint: str, *, failed: bool) -> None:
        """Note for `core.health`: it answered, or it could not be reached, broke off, or answered 5xx."""

    def release(self, booking: Booking, *, status: int, model: str, arm: str) -> None:
        """End the booking and count the request; status 0: no answer came. The labels are configured names or ""."""

    def realised(self, comparison: Comparison) -> None:
        """Take what was predicted and what came true."""

    def response_missed(self, why: str) -> None:
        """Count a response whose plan was not carried out; `why` is one of MISSES."""


@dataclass(slots=True, kw_only=True)
class BookedExchange:
    """One request, its booking, and who answered. The shape is `adapters.ext_proc_call.OpenExchange`."""

    books: ExchangeBooks
    endpoints: Sequence[str]  # the winner, then the fallbacks in order
    booking: Booking
    model: str = ""  # labels of the metrics by model and arm: configured names, or ""
    arm: str = ""
    body: bytes | None = None  # in place of the client's; None: unchanged
    removed_headers: tuple[str, ...] = ()  # e.g. content-encoding, where `body` is the decoded one
    plan: ResponsePlan = PASS_PLAN
    status: int = 0  # the answer's, 0 until it came

    def responded(self, *, status: int, served_by: str | None, from_pod: bool) -> None:
        """Take note of the answer: who failed before it came, who gave it, and who therefore holds the booking."""
        self.status = status
        asked = self._asked(served_by)
        for endpoint in asked[:-1]:
            self.books.endpoint_answered(endpoint, failed=True)  # Envoy's retry went past it
        last = asked[-1]
        if not self.books.knows(last):
            return
        if from_pod or status >= 500:  # a refusal by another of Envoy's filters says nothing of the pod
            self.books.endpoint_answered(last, failed=status >= 500 and status != NOT_IMPLEMENTED)
        if last != self.booking.endpoint:
            self.booking = self.books.rebook(self.booking, last)

    def response_missed(self, why: str) -> None:
        """Count that the response's plan cannot be carried out."""
        self.books.response_missed(why)

    def finish(self) -> None:
        """Release the booking."""
        self.books.release(self.booking, status=self.status, model=self.model, arm=self.arm)

    def _asked(self, served_by: str | None) -> Sequence[str]:
        """Return the endpoints that Envoy has tried, in order; it walks our list, and behind it takes any."""
        if served_by is None:
            return self.endpoints[:1]
        if served_by in self.endpoints:
            return self.endpoints[: self.endpoints.index(served_by) + 1]
        return (*self.endpoints, served_by) if self.books.knows(served_by) else (served_by,)


class ReadResponse:
    """One response: its model rewritten, its usage compared. The shape is `adapters.ext_proc_call.OpenResponse`."""

    __slots__ = ("_books", "_chunks", "_ended", "_handling", "_plan", "_rewriter", "_usage")

    def __init__(self, *, books: ExchangeBooks, plan: ResponsePlan) -> None:
        self._books = books
        self._plan = plan
        self._handling = ResponseHandling.PASS
        self._rewriter: ModelRewriter | None = None
        self._usage: UsageReader | None = None
        self._chunks = 0
        self._ended = False

    def begin(self, head: ResponseHead, *, served_by: str | None) -> ResponseHandling:
        """Return what is needed of the body that these headers announce. Errors of the pod pass as they are."""
        if not 200 <= head.status < 300:
            return ResponseHandling.PASS
        if head.content_encoding not in ("", "identity"):
            self._books.response_missed(COMPRESSED)
            return ResponseHandling.PASS
        if self._plan.requested_model is not None:
            self._rewriter = rewriter_for(head.content_type, model=self._plan.requested_model)
            if self._rewriter is None:
                self._books.response_missed(NO_MODEL_FIELD)
        if self._is_to_be_compared(head, served_by):
            self._usage = usage_reader_for(head.content_type)
        if self._rewriter is not None:
            self._handling = ResponseHandling.REWRITE
        elif self._usage is not None:
            self._handling = ResponseHandling.READ
        return self._handling

    def chunk(self, content: bytes, *, end_of_stream: bool) -> bytes:
        """Take a part of the body and return what goes to the client now."""
        self._chunks += 1
        self._ended = self._ended or end_of_stream
        if self._usage is not None:
            self._usage.feed(content)
        return content if self._rewriter is None else self._rewriter.feed(content, end_of_stream=end_of_stream)

    @property
    def holds_back(self) -> bool:
        """Whether bytes were taken that have not been given back."""
        return self._rewriter is not None and self._rewriter.holds_back

    def finish(self) -> None:
        """Compare, if the whole body was there."""
        if self._handling is ResponseHandling.PASS:
            return
        if not self._chunks:
            self._books.response_missed(NOT_DELIVERED)
        elif self._rewriter is not None and self._rewriter.gave_up:
            self._books.response_missed(TOO_LARGE)
        if self._usage is not None and self._ended:
            self._compare(self._usage)

    def _is_to_be_compared(self, head: ResponseHead, served_by: str | None) -> bool:
        plan, prediction = self._plan, self._plan.prediction
        if prediction is None:
            return False
        is_small = (
            head.content_length is not None
            and head.content_length <= plan.read_below_bytes
            and not head.content_type.startswith(EVENT_STREAM)
        )
        if not (plan.sampled or is_small):
            return False
        if served_by is not None and served_by != prediction.endpoint:
            self._books.response_missed(SERVED_ELSEWHERE)
            return False
        return True

    def _compare(self, reader: UsageReader) -> None:
        assert self._plan.prediction is not None, "usage is read to be compared with it"
        usage = reader.usage()
        if usage is None:
            self._books.response_missed(TOO_LARGE if reader.gave_up else NO_USAGE)
        elif (comparison := compare(self._plan.prediction, usage)) is None:
            self._books.response_missed(NO_CACHED_TOKENS)
        else:
            self._books.realised(comparison)
