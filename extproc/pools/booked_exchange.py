"""One routed request until its exchange ends: who holds its booking, who really served it, what its response teaches.

`ext_proc.call` tells it what Envoy tells. A response may reach another picker than its request did: `ReadResponse`
needs the plan alone.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from extproc.ext_proc.answers import ResponseHead
from extproc.ext_proc.exchange import NO_HEADERS
from extproc.pods.inflight import Booking
from extproc.pools.decision_headers import predicted_anew
from extproc.pools.request_watch import RequestTrace
from extproc.quotas.quota import QuotaNote
from extproc.requests.kept_responses import tag_in, tag_of
from extproc.responses.realised import Comparison, compare
from extproc.responses.response_plan import PASS_PLAN, Prediction, ResponseHandling, ResponsePlan
from extproc.responses.response_usage import ModelRewriter, UsageReader, rewriter_for, usage_reader_for
from extproc.slo.judgement import NOT_MEASURED, Judgement, Measured, StreamTimes, judge_document, judge_stream
from extproc.slo.promise import AnswerPromise, OpenPromise, TokenTargets

EVENT_STREAM = "text/event-stream"
BUSY = 503  # a pod's own: its queue limits (vLLM's --max-num-queued-reqs)
GATEWAY_TIMEOUT = 504  # Envoy's own: a pod has the request, and its answer took too long
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
    """The books of a pool, as far as an exchange changes them."""

    def knows(self, endpoint: str) -> bool:
        """Tell whether it is one of ours: only those take over bookings and have labels."""

    def rebook(self, booking: Booking, endpoint: str) -> Booking:
        """Move a booking to the pod that really serves, after a retry; count it, and return the new one."""

    def computes_itself(self, booking: Booking, uncached_tokens: int) -> Booking:
        """Book so many tokens more for its pod, which were to come from another one; return the new booking."""

    def release_leg(self, booking: Booking) -> None:
        """End the booking of a prefill leg."""

    def endpoint_answered(self, endpoint: str, *, failed: bool) -> None:
        """Note for `choosing.health`: it answered, or it could not be reached, broke off, or answered 5xx."""

    def endpoint_full(self, endpoint: str) -> None:
        """Note that the pod itself has answered 503: it has no room, which is no failure."""

    def release(self, booking: Booking, *, status: int, model: str, arm: str, unserved: bool) -> None:
        """End the booking and count the request; status 0: no answer came. The labels are configured names or "".

        `unserved`: no pod has taken the request, which therefore has used nothing.
        """

    def keeps(self, response_id: str, endpoint: str) -> None:
        """Remember who keeps a response, where its id does not say so."""

    def realised(self, comparison: Comparison) -> None:
        """Take what was predicted and what came true."""

    def generated(self, note: QuotaNote, tokens: int) -> None:
        """Take the tokens that a response of that tenant has brought, in place of those reserved for it."""

    def judged(
        self,
        answer: AnswerPromise,
        judgement: Judgement,
        asked: Judgement | None,
        *,
        served_by: str | None,
        has_come: bool,
        measured: Measured,
    ) -> None:
        """Count whether an answer was within its targets; `asked`: those of its request's headers.

        `has_come`: some of its body was seen; else its client has left, or no body ever comes here.
        """

    def unanswered(self, promise: OpenPromise, *, status: int, endpoint: str) -> None:
        """Count a promise of which no answer came (status 0), or a 5xx."""

    def response_missed(self, why: str) -> None:
        """Count a response whose plan was not carried out; `why` is one of MISSES."""


class BookedExchange(msgspec.Struct, kw_only=True, eq=False):
    """One request, its booking, and who answered. Implements `ext_proc.call.OpenExchange`."""

    books: ExchangeBooks
    endpoints: Sequence[str]  # the winner, then the fallbacks in order
    booking: Booking | None  # None: sent without a decision, because its pool says FailOpen; nothing is learned of it
    model: str = ""  # labels of the metrics by model and arm: configured names, or ""
    arm: str = ""
    body: bytes | None = None  # in place of the client's; None: unchanged
    removed_headers: tuple[str, ...] = ()  # e.g. content-encoding, where `body` is the decoded one
    response_headers: Mapping[str, str] = NO_HEADERS  # what the client is told besides
    plan: ResponsePlan = PASS_PLAN
    trace: RequestTrace | None = None  # None: it is not observed
    set_headers: Mapping[str, str] = NO_HEADERS  # of the request that the pod gets, over what the client sent
    status: int = 0  # the answer's, 0 until it came
    served_by: str | None = None  # who gave it
    unserved: bool = False  # Envoy answered in a pod's place, or the pod had no room
    response_id: str | None = None  # of the response, which the pod may keep
    leg: Booking | None = None  # on the prefill pod of a leg that others run; None: there is none, or it is over
    promise: OpenPromise | None = None  # None: none was made, or it is known already that it was broken
    end_leg: Callable[[int], None] | None = None  # ends the leg that runs beside the request, by the answer's status

    def responded(self, *, status: int, served_by: str | None, from_pod: bool, content_type: str = "") -> None:
        """Take note of the answer: who failed before it came, who gave it, and who therefore holds the booking.

        `content_type` counts for a 503: vLLM's own is JSON, what a proxy before it says in its place is not.
        """
        self.status = status
        self._end_leg()
        self.unserved = not from_pod and status != GATEWAY_TIMEOUT
        if self.trace is not None:
            self.served_by = served_by if served_by is not None or not from_pod else self.endpoints[0]
            self.trace.responded()
        if self.booking is None:
            return
        if self.response_id is not None and from_pod and status < 300:
            self._remember_keeper(self.response_id, served_by or self.endpoints[0])
        first = self.endpoints[0]
        if from_pod and status < 500 and served_by == first == self.booking.endpoint:  # nearly always
            self.books.endpoint_answered(first, failed=False)
            return
        self._take_back_prediction(served_by, from_pod=from_pod)
        asked = self._asked(served_by)
        for endpoint in asked[:-1]:
            self.books.endpoint_answered(endpoint, failed=True)  # Envoy's retry went past it
        last = asked[-1]
        if not self.books.knows(last):
            return
        if from_pod and status == BUSY and content_type.startswith("application/json"):
            self.unserved = True
            self.books.endpoint_full(last)
        elif from_pod or status >= 500:  # a refusal by another of Envoy's filters says nothing of the pod
            self.books.endpoint_answered(last, failed=status >= 500 and status != NOT_IMPLEMENTED)
        if last != self.booking.endpoint:
            self.booking = self.books.rebook(self.booking, last)

    def response_missed(self, why: str) -> None:
        """Count that the response's plan cannot be carried out."""
        self.books.response_missed(why)

    def finish(self) -> None:
        """Release what is booked."""
        self._end_leg()
        if self.end_leg is not None:
            self.end_leg(self.status)
        if self.trace is not None:
            self.trace.end(
                endpoint=self.endpoints[0], served_by=self.served_by, status=self.status, unserved=self.unserved
            )
        if self.booking is not None:
            if self.promise is not None and not 0 < self.status < 500:
                self.books.unanswered(self.promise, status=self.status, endpoint=self.booking.endpoint)
            self.books.release(self.booking, status=self.status, model=self.model, arm=self.arm, unserved=self.unserved)

    def comes_from(self, *, cached_tokens: int | None) -> None:
        """Note that the prompt was computed by a pod that held so much of it, if the answer's usage has that number.

        None: what it will have of cached tokens is not known, and nothing is compared.
        """
        self.response_headers = predicted_anew(self.response_headers, cached_tokens)
        if cached_tokens is None:
            self.plan = msgspec.structs.replace(self.plan, prediction=None)
        elif (prediction := self.plan.prediction) is not None:
            prediction = msgspec.structs.replace(
                prediction, matched_tokens=cached_tokens, best_matched_tokens=cached_tokens
            )
            self.plan = msgspec.structs.replace(self.plan, prediction=prediction)

    def move(self, endpoints: Sequence[str]) -> None:
        """Send it to others than those that were picked, before it has gone anywhere."""
        self.endpoints = endpoints
        if self.booking is not None and self.booking.endpoint != endpoints[0]:
            self.booking = self.books.rebook(self.booking, endpoints[0])
        if (prediction := self.plan.prediction) is not None:
            self.plan = msgspec.structs.replace(
                self.plan, prediction=msgspec.structs.replace(prediction, endpoint=endpoints[0])
            )

    def computes_itself(self, uncached_tokens: int) -> None:
        """Note that the pod will compute the prompt that was to come from a prefill pod."""
        if self.booking is not None:
            self.booking = self.books.computes_itself(self.booking, uncached_tokens)

    def _take_back_prediction(self, served_by: str | None, *, from_pod: bool) -> None:
        if not from_pod or served_by not in (None, self.endpoints[0]):  # it was said of another pod
            self.response_headers = predicted_anew(self.response_headers, None)

    def _end_leg(self) -> None:
        if self.leg is not None:
            leg, self.leg = self.leg, None
            self.books.release_leg(leg)

    def _remember_keeper(self, response_id: str, keeper: str) -> None:
        if tag_in(response_id) != tag_of(keeper):  # the client's own id, or Envoy's retry went past the pod
            self.books.keeps(response_id, keeper)

    def _asked(self, served_by: str | None) -> Sequence[str]:
        """Return the endpoints that Envoy has tried, in order; it walks our list, and behind it takes any."""
        if served_by is None:
            return self.endpoints[:1]
        if served_by in self.endpoints:
            return self.endpoints[: self.endpoints.index(served_by) + 1]
        return (*self.endpoints, served_by) if self.books.knows(served_by) else (served_by,)


class ReadResponse:
    """One response: its model rewritten, its usage compared and counted, its times judged.

    Implements `ext_proc.call.OpenResponse`.
    """

    __slots__ = (
        "_books",
        "_chunks",
        "_compares",
        "_ended",
        "_first_seconds",
        "_first_token_at",
        "_handling",
        "_is_stream",
        "_judges",
        "_last_token_at",
        "_plan",
        "_rewriter",
        "_served_by",
        "_trace",
        "_usage",
    )

    def __init__(self, *, books: ExchangeBooks | None, plan: ResponsePlan, trace: RequestTrace | None = None) -> None:
        """`books`: None where the pool is not known here: the plan is carried out, and nothing is learned.

        `trace` is the request's, where it was picked here and is observed.
        """
        self._books = books
        self._trace = trace
        self._plan = plan
        self._handling = ResponseHandling.PASS
        self._rewriter: ModelRewriter | None = None
        self._usage: UsageReader | None = None
        self._chunks = 0
        self._compares = False
        self._is_stream = False
        self._ended = False
        self._first_seconds: float | None = None  # from the pick to the first bytes of a stream
        self._served_by: str | None = None
        self._judges = False
        self._first_token_at: float | None = None  # unix seconds, as the next; of a stream that is judged
        self._last_token_at = 0.0

    def begin(self, head: ResponseHead, *, served_by: str | None) -> ResponseHandling:
        """Return what is needed of the body that these headers announce. Errors of the pod pass as they are."""
        if not 200 <= head.status < 300:
            return ResponseHandling.PASS
        if head.content_encoding not in ("", "identity"):
            self._missed(COMPRESSED)
            return ResponseHandling.PASS
        if self._plan.requested_model is not None:
            self._rewriter = rewriter_for(head.content_type, model=self._plan.requested_model)
            if self._rewriter is None:
                self._missed(NO_MODEL_FIELD)
        self._is_stream = head.content_type.startswith(EVENT_STREAM)
        self._compares = self._is_to_be_compared(head, served_by)
        counts, is_judged = self._plan.quota is not None, self._plan.promise is not None
        if self._compares or counts or is_judged:
            self._usage = usage_reader_for(head.content_type, count_events=counts, find_tokens=is_judged)
        if is_judged and self._usage is not None:
            self._served_by, self._judges = served_by, True
        if self._rewriter is not None:
            self._handling = ResponseHandling.REWRITE
        elif self._usage is not None:
            self._handling = ResponseHandling.READ
        return self._handling

    def chunk(self, content: bytes, *, end_of_stream: bool) -> bytes:
        """Take a part of the body and return what goes to the client now."""
        if not self._chunks and self._compares and self._is_stream:
            self._first_seconds = _seconds_since(self._plan.prediction)
        self._chunks += 1
        self._ended = self._ended or end_of_stream
        if self._usage is not None:
            before = self._usage.token_events
            self._usage.feed(content)
            if self._judges and self._usage.token_events > before:
                self._last_token_at = time.time()
                if self._first_token_at is None:
                    self._first_token_at = self._last_token_at
                    self._tell_first_token(self._first_token_at)
            if end_of_stream and self._trace is not None and not self._usage.gave_up:
                self._trace.usage = self._usage.usage()  # now: its exchange ends before this response's stream may
        return content if self._rewriter is None else self._rewriter.feed(content, end_of_stream=end_of_stream)

    def _tell_first_token(self, at: float) -> None:
        """Tell the trace of the first token of a stream: `at` in unix seconds."""
        if self._trace is not None and self._is_stream and self._plan.promise is not None:
            self._trace.first_token_seconds = max(at - self._plan.promise.arrived_at, 0.0)

    @property
    def holds_back(self) -> bool:
        """Whether bytes were taken that have not been given back."""
        return self._rewriter is not None and self._rewriter.holds_back

    def finish(self) -> None:
        """Compare, if the whole body was there, and count what was generated."""
        if self._handling is ResponseHandling.PASS:
            return
        if not self._chunks:
            self._missed(NOT_DELIVERED)
        elif self._rewriter is not None and self._rewriter.gave_up:
            self._missed(TOO_LARGE)
        if self._usage is not None:
            if self._compares and self._ended:
                self._compare(self._usage)
            self._count(self._usage)
            if self._judges:
                self._judge(self._usage)

    def _is_to_be_compared(self, head: ResponseHead, served_by: str | None) -> bool:
        plan, prediction = self._plan, self._plan.prediction
        if prediction is None:
            return False
        is_small = (
            head.content_length is not None and head.content_length <= plan.read_below_bytes and not self._is_stream
        )
        if not (plan.sampled or is_small):
            return False
        if served_by is not None and served_by != prediction.endpoint:
            self._missed(SERVED_ELSEWHERE)
            return False
        return True

    def _count(self, reader: UsageReader) -> None:
        """Tell the quota what was generated; what cannot be known stays as it was reserved."""
        note = self._plan.quota
        if self._books is None or note is None or not (self._ended or self._is_stream):
            return  # half a document tells nothing, half a stream has its events
        usage = reader.usage()
        told = usage.output_tokens if usage is not None else None
        if told is not None and self._ended:
            self._books.generated(note, told)
        elif self._is_stream:
            # what an unread line has brought is not known: nothing is given back
            least = note.reserved_tokens if reader.gave_up else 0
            self._books.generated(note, max(told or 0, reader.generated_tokens, least))

    def _judge(self, reader: UsageReader) -> None:
        """Tell the books whether it was within its targets; of half a document nothing can be said."""
        answer = self._plan.promise
        if self._books is None or answer is None or not (self._ended or self._is_stream):
            return
        usage, now = reader.usage(), max(time.time() - answer.arrived_at, 0.0)
        times = StreamTimes.since(answer.arrived_at, first_at=self._first_token_at, last_at=self._last_token_at)
        tokens = usage.output_tokens if usage is not None and self._ended else None
        if tokens is None:
            tokens = reader.token_events or None
        if not reader.has_one_answer:
            tokens = None  # several answers side by side

        def verdict(targets: TokenTargets) -> Judgement:
            if self._is_stream:
                return judge_stream(targets, times, tokens=tokens, ended=self._ended, now=now)
            return judge_document(targets, seconds=now, tokens=tokens)

        self._books.judged(
            answer,
            verdict(answer.promise.targets),
            verdict(answer.asked) if answer.asked is not None else None,
            served_by=self._served_by,
            has_come=self._chunks > 0,
            measured=Measured(ttft_seconds=times.first_seconds, inter_token_seconds=times.mean_inter_token(tokens))
            if self._is_stream
            else NOT_MEASURED,
        )

    def _compare(self, reader: UsageReader) -> None:
        assert self._plan.prediction is not None, "usage is read to be compared with it"
        usage = reader.usage()
        if usage is None or reader.gave_up:
            self._missed(TOO_LARGE if reader.gave_up else NO_USAGE)
        elif (comparison := compare(self._plan.prediction, usage, first_token_seconds=self._first_seconds)) is None:
            self._missed(NO_CACHED_TOKENS)
        elif self._books is not None:
            if self._trace is not None and self._trace.span is not None:
                comparison = msgspec.structs.replace(comparison, trace_id=self._trace.trace_id)
            self._books.realised(comparison)

    def _missed(self, why: str) -> None:
        if self._books is not None:
            self._books.response_missed(why)


def _seconds_since(prediction: Prediction | None) -> float | None:
    """Return the time since the pick by the clocks of this picker and of the one that picked."""
    if prediction is None or not prediction.sent_at:
        return None
    return max(time.time() - prediction.sent_at, 0.0)
