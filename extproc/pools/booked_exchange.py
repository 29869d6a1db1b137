"""One routed request until its exchange ends: its booking, the pod that really served it, lessons from its response.

`ext_proc.call` forwards Envoy's messages to it. A response may reach another picker than its request, so `ReadResponse`
needs only the plan.
"""

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec
from msgspec import structs

from extproc.answers.judgement import NOT_MEASURED, Judgement, Measured, StreamTimes, judge_document, judge_stream
from extproc.answers.promise import OpenPromise, TokenTargets
from extproc.answers.realised import Comparison, Usage, compare
from extproc.answers.response_plan import PASS_PLAN, Miss, Prediction, ResponseHandling, ResponsePlan
from extproc.answers.response_usage import ModelRewriter, UsageReader, rewriter_for, usage_reader_for
from extproc.choosing.endpoint_health import Outcome, Seen, outcome_of, outcome_of_headers
from extproc.ext_proc.answers import ResponseHead
from extproc.ext_proc.exchange import NO_HEADERS
from extproc.ledger.facts import Arrival, Ended, Judged, LegEnd, Read
from extproc.ledger.ledger import Ledger
from extproc.pods.inflight import Booking
from extproc.pods.pod_ranks import RANK_HEADER, named_in
from extproc.pools.plan_response import predicted_anew
from extproc.requests.responses_api import owner_in
from extproc.shared.quota import QuotaNote

EVENT_STREAM = "text/event-stream"
CODINGS = frozenset(("gzip", "x-gzip", "deflate"))  # unpacked for reading; the client gets the pod's bytes
MOST_INFLATED_BYTES = 4 << 20  # of one chunk: a few bytes may unpack to a thousand times as many
GATEWAY_TIMEOUT = 504  # from Envoy: a pod has the request, and its answer took too long


class ExchangeBooks(Protocol):
    """The part of a pool's books that an exchange changes."""

    ledger: Ledger
    reading: "dict[tuple[float, str], BookedExchange]"  # those whose responses may be read

    @property
    def response_key(self) -> bytes:
        """The key of kept responses' ids."""

    def knows(self, endpoint: str) -> bool:
        """Tell whether the endpoint belongs to the pool: only such endpoints can take over bookings and have labels."""

    def rebook(self, booking: Booking, endpoint: str) -> Booking:
        """Move a booking to the pod that really serves after a retry; count the retry, and return the new booking."""

    def computes_itself(self, booking: Booking, uncached_tokens: int) -> Booking:
        """Book tokens on the pod itself that a prefill pod should have computed; return the new booking."""

    def release_leg(self, booking: Booking) -> None:
        """End the booking of a prefill leg."""

    def endpoint_answered(self, endpoint: str, *, failed: bool) -> None:
        """Record for `choosing.candidates` that the pod answered, or failed: unreachable, broken off, or 5xx."""

    def endpoint_full(self, endpoint: str) -> None:
        """Record that the pod itself answered 429 or 503: it has no room, which is not a failure."""

    def stream_read(self, endpoint: str, outcome: Outcome, *, seconds: float) -> None:
        """Record the outcome of a stream read for `seconds`."""

    def clock(self) -> float:
        """Return monotonic seconds."""

    def release(
        self,
        booking: Booking,
        *,
        status: int,
        unserved: bool,
        answered_at: float,
        is_watched: bool,
        generated: int | None,
    ) -> None:
        """End the booking; status 0 means no answer.

        `unserved`: no pod accepted the request, so it used nothing. `answered_at`: arrival of the answer's headers in
        monotonic seconds. `is_watched`: its events should have been read for `stream_read`, perhaps elsewhere.
        `generated`: the answer's tokens if it was read to its end.
        """

    def keeps(self, response_id: str, endpoint: str) -> None:
        """Remember the pod that stores a response, if the response's id does not name it."""

    def generated(self, note: QuotaNote, tokens: int) -> None:
        """Charge the tenant's quota the generated tokens, in place of the reserved ones."""


ARRIVAL = Arrival()


class BookedExchange(msgspec.Struct, kw_only=True, eq=False):
    """One request, its booking and its answering pod. Implements `ext_proc.call.OpenExchange`."""

    books: ExchangeBooks
    endpoints: Sequence[str]  # the winner, then the fallbacks in order
    booking: Booking | None  # None if sent without a decision (FailOpen); nothing is learned from it
    model: str = ""  # labels of the metrics by model and arm: configured names, or ""
    arm: str = ""
    body: bytes | None = None  # replaces the client's; None leaves it unchanged
    removed_headers: tuple[str, ...] = ()  # e.g. content-encoding, if `body` is decoded
    response_headers: Mapping[str, str] = NO_HEADERS  # added to the client's answer
    plan: ResponsePlan = PASS_PLAN
    arrival: Arrival = ARRIVAL
    set_headers: Mapping[str, str] = NO_HEADERS  # for the pod; they override the client's
    status: int = 0  # of the answer, 0 before it arrives
    served_by: str | None = None  # the pod that answered
    answered_at: float = 0.0  # arrival of the answer's headers, monotonic seconds
    unserved: bool = False  # Envoy answered instead of a pod, or the pod had no room
    response_id: str | None = None  # of the response, which the pod may store
    leg: Booking | None = None  # of an open leg on a prefill pod that a sidecar runs
    promise: OpenPromise | None = None  # None if not judged, or already known to be missed
    end_leg: Callable[[int], None] | None = None  # ends the legs that the picker runs; takes the answer's status
    legs: Sequence[LegEnd] = ()  # that have ended
    reading_key: tuple[float, str] | None = None  # where its response finds it
    usage: Usage | None = None  # read from the response, like the next two
    stream_failed: bool = False
    first_token_seconds: float | None = None  # since the request's arrival

    def responded(self, *, status: int, served_by: str | None, from_pod: bool, content_type: str = "") -> None:
        """Record the answer: the pods that failed before it, and the pod that gave it, which then holds the booking.

        `content_type` matters for a 503: vLLM's own is JSON, that of a proxy in front of it is not.
        """
        self.status = status
        self._end_leg()
        self.unserved = not from_pod and status != GATEWAY_TIMEOUT
        served_by = served_by if served_by in self.endpoints else named_in(self.endpoints, served_by)
        self.served_by = served_by if served_by is not None or not from_pod else self.endpoints[0]
        self.answered_at = self.books.clock()
        if self.booking is None:
            return
        if self.response_id is not None and from_pod and status < 300:
            self._remember_keeper(self.response_id, served_by or self.endpoints[0])
        first = self.endpoints[0]
        outcome = outcome_of_headers(status, from_pod=from_pod, content_type=content_type)
        self.booking.is_engines = self.booking.is_engines and status < 400
        self.booking.is_cut = self.unserved
        is_served = outcome is Outcome.GOOD or outcome is Outcome.NEITHER
        if from_pod and is_served and served_by == first == self.booking.endpoint:  # nearly always
            self.books.endpoint_answered(first, failed=False)
            return
        if not from_pod or served_by not in (None, first):  # the prediction was for another pod
            self.response_headers = predicted_anew(self.response_headers, None)
        asked = self._asked(served_by)
        for endpoint in asked[:-1]:
            self.books.endpoint_answered(endpoint, failed=True)  # Envoy retried elsewhere
        last = asked[-1]
        if not self.books.knows(last):
            return
        if outcome is Outcome.FULL:
            self.unserved = True
            self.books.endpoint_full(last)
        elif from_pod or outcome is Outcome.FAILED:  # a refusal by another Envoy filter says nothing about the pod
            self.books.endpoint_answered(last, failed=outcome is Outcome.FAILED)
        if last != self.booking.endpoint:
            self.booking = self.books.rebook(self.booking, last)

    def response_missed(self, why: Miss) -> None:
        """Record that the response's plan cannot be carried out."""
        self.books.ledger.tell(Read(missed=(why,)))

    def finish(self) -> None:
        """Release all bookings."""
        if self.leg is not None:
            self._end_leg()
        if self.end_leg is not None:
            self.end_leg(self.status)
        if self.reading_key is not None:
            self.books.reading.pop(self.reading_key, None)
        booking, now = self.booking, self.books.clock()
        if booking is not None:
            self.books.release(
                booking,
                status=self.status,
                unserved=self.unserved,
                answered_at=self.answered_at,
                is_watched=self.plan.watched,
                generated=self.usage.output_tokens if self.usage is not None and not self.stream_failed else None,
            )
        fact = Ended(
            arrival=self.arrival,
            endpoint=self.endpoints[0],
            served_by=self.served_by,
            booked_on=booking.endpoint if booking is not None else None,
            status=self.status,
            unserved=self.unserved,
            at=now,
            headers_at=self.answered_at if self.status else None,
            booked_seconds=now - booking.booked_at if booking is not None else 0.0,
            label=self.model,
            arm=self.arm,
            promise=self.promise,
            usage=self.usage,
            stream_failed=self.stream_failed,
            first_token_seconds=self.first_token_seconds,
            legs=tuple(self.legs),
        )
        self.books.ledger.tell_now(fact)

    def comes_from(self, *, cached_tokens: int | None) -> None:
        """Expect the prefill pod's number of cached tokens in the answer's usage; compare nothing if it is unknown."""
        self.response_headers = predicted_anew(self.response_headers, cached_tokens)
        if cached_tokens is None:
            self.plan = structs.replace(self.plan, prediction=None)
        elif (prediction := self.plan.prediction) is not None:
            prediction = structs.replace(prediction, matched_tokens=cached_tokens, best_matched_tokens=cached_tokens)
            self.plan = structs.replace(self.plan, prediction=prediction)

    def move(self, endpoints: Sequence[str], rank: dict[str, str]) -> None:
        """Replace the picked endpoints, and the header with the rank, before the request is sent."""
        self.endpoints = endpoints
        self.set_headers = {name: self.set_headers[name] for name in self.set_headers if name != RANK_HEADER} | rank
        if self.booking is not None and self.booking.endpoint != endpoints[0]:
            self.booking = self.books.rebook(self.booking, endpoints[0])
        if (prediction := self.plan.prediction) is not None:
            self.plan = structs.replace(self.plan, prediction=structs.replace(prediction, endpoint=endpoints[0]))

    def computes_itself(self, uncached_tokens: int) -> None:
        """Book that the pod computes the prompt itself, instead of a prefill pod."""
        if self.booking is not None:
            self.booking = self.books.computes_itself(self.booking, uncached_tokens)

    def _end_leg(self) -> None:
        if self.leg is not None:
            leg, self.leg = self.leg, None
            self.books.release_leg(leg)

    def _remember_keeper(self, response_id: str, keeper: str) -> None:
        if owner_in(response_id, (keeper,), key=self.books.response_key) is None:
            # the client's own id, or Envoy retried on another pod
            self.books.keeps(response_id, keeper)

    def _asked(self, served_by: str | None) -> Sequence[str]:
        """Return the endpoints that Envoy tried, in order: first our list, then any other."""
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
        *("_began_at", "_books", "_chunks", "_compares", "_ended", "_exchange", "_first_seconds"),
        *("_first_token_at", "_handling", "_inflater", "_is_stream", "_judges", "_last_token_at", "_misses"),
        *("_plan", "_rewriter", "_served_by", "_usage"),
    )

    def __init__(
        self, *, books: ExchangeBooks | None, plan: ResponsePlan, exchange: BookedExchange | None = None
    ) -> None:
        """`books` is None for an unknown pool: the plan is carried out, but nothing is learned.

        `exchange` is the request's, if it was picked here and is open.
        """
        self._books = books
        self._exchange = exchange
        self._plan = plan
        self._misses: list[Miss] = []
        self._handling = ResponseHandling.PASS
        self._inflater: zlib._Decompress | None = None
        self._rewriter: ModelRewriter | None = None
        self._usage: UsageReader | None = None
        self._began_at = 0.0  # unix seconds
        self._chunks = 0
        self._compares = False
        self._is_stream = False
        self._ended = False
        self._first_seconds: float | None = None  # from the pick to the first bytes of a stream
        self._served_by: str | None = None
        self._judges = False
        self._first_token_at: float | None = None  # of a judged stream, unix seconds
        self._last_token_at = 0.0  # unix seconds

    def begin(self, head: ResponseHead, *, served_by: str | None) -> ResponseHandling:
        """Return how to handle the body that follows these headers. A pod's errors pass unread."""
        if not 200 <= head.status < 300:
            return ResponseHandling.PASS
        coding = head.content_encoding.strip().lower()
        is_plain = coding in ("", "identity")
        if not is_plain and (self._plan.requested_model is not None or coding not in CODINGS):
            self._misses.append(Miss.COMPRESSED)
            if coding not in CODINGS:
                return ResponseHandling.PASS
        self._inflater = None if is_plain else zlib.decompressobj(zlib.MAX_WBITS | 32)  # as its first bytes say
        if self._plan.requested_model is not None and is_plain:
            self._rewriter = rewriter_for(head.content_type, model=self._plan.requested_model)
            if self._rewriter is None:
                self._misses.append(Miss.NO_MODEL_FIELD)
        self._is_stream = head.content_type.startswith(EVENT_STREAM)
        picked = self._plan.prediction or self._plan.promise
        if picked is not None and served_by != picked.endpoint:
            served_by = named_in((picked.endpoint,), served_by)
        self._served_by, self._began_at = served_by, time.time()
        self._compares = self._is_to_be_compared(head, served_by)
        counts, is_judged = self._plan.quota is not None, self._plan.promise is not None
        is_watched = self._plan.watched and self._is_stream
        if self._compares or counts or is_judged or is_watched:
            finds_tokens = is_judged or is_watched or self._compares  # each tells the pod's health
            self._usage = usage_reader_for(head.content_type, count_events=counts, find_tokens=finds_tokens)
        self._judges = is_judged and self._usage is not None
        if self._rewriter is not None:
            self._handling = ResponseHandling.REWRITE
        elif self._usage is not None:
            self._handling = ResponseHandling.READ
        return self._handling

    def chunk(self, content: bytes, *, end_of_stream: bool) -> bytes:
        """Process a part of the body, and return the bytes for the client."""
        if not self._chunks and self._compares and self._is_stream:
            self._first_seconds = _seconds_since(self._plan.prediction)
        self._chunks += 1
        self._ended = self._ended or end_of_stream
        plain = content if self._inflater is None else self._inflated(content, self._inflater)
        if self._usage is not None:
            before = self._usage.token_events
            self._usage.feed(plain + b"\n\n" if end_of_stream else plain)  # the last event may lack its end
            if self._judges and self._usage.token_events > before:
                self._last_token_at = time.time()
                if self._first_token_at is None:
                    self._first_token_at = self._last_token_at
                    self._tell_first_token(self._first_token_at)
            if self._exchange is not None:  # now: it may end before this response's stream
                self._exchange.stream_failed = self._has_failed(self._usage)
                if end_of_stream and not self._usage.gave_up:
                    self._exchange.usage = self._usage.usage()
        return content if self._rewriter is None else self._rewriter.feed(content, end_of_stream=end_of_stream)

    def _inflated(self, content: bytes, inflater: "zlib._Decompress") -> bytes:
        """Return the content unpacked, or read no more of the response if that fails."""
        with suppress(zlib.error):
            plain = inflater.decompress(content, MOST_INFLATED_BYTES)
            if not inflater.unconsumed_tail:
                return plain
        self._misses.append(Miss.COMPRESSED)
        self._usage, self._inflater, self._judges = None, None, False
        return content

    def _tell_first_token(self, at: float) -> None:
        """Record a stream's first token in its exchange; `at` is in unix seconds."""
        if self._exchange is not None and self._is_stream and self._plan.promise is not None:
            self._exchange.first_token_seconds = max(at - self._plan.promise.arrived_at, 0.0)

    @property
    def holds_back(self) -> bool:
        """Whether some received bytes have not been returned yet."""
        return self._rewriter is not None and self._rewriter.holds_back

    def finish(self) -> None:
        """Compare if the body was complete, count generated tokens, and judge targets and the pod's health."""
        comparison = judged = None
        if self._handling is not ResponseHandling.PASS:
            if not self._chunks:
                self._misses.append(Miss.NOT_DELIVERED)
            elif self._rewriter is not None and self._rewriter.gave_up:
                self._misses.append(Miss.TOO_LARGE)
            if self._usage is not None:
                is_comparable = self._compares and self._ended and not self._has_failed(self._usage)
                comparison = self._comparison(self._usage) if is_comparable else None
                if self._plan.quota is not None:
                    self._count(self._usage, self._plan.quota)
                judged = self._judged(self._usage) if self._judges else None
                if self._is_stream:
                    self._tell_health(self._usage)
        if self._books is not None and (comparison is not None or judged is not None or self._misses):
            self._books.ledger.tell_now(Read(comparison=comparison, judged=judged, missed=tuple(self._misses)))

    def _has_failed(self, reader: UsageReader) -> bool:
        return reader.has_failed or (self._ended and self._is_stream and reader.is_empty)

    def _is_to_be_compared(self, head: ResponseHead, served_by: str | None) -> bool:
        plan, prediction = self._plan, self._plan.prediction
        if prediction is None:
            return False
        size = head.content_length if not self._is_stream else None
        if not (plan.sampled or (size is not None and size <= plan.read_below_bytes)):
            return False
        if served_by is not None and served_by != prediction.endpoint:
            self._misses.append(Miss.SERVED_ELSEWHERE)
            return False
        return True

    def _count(self, reader: UsageReader, note: QuotaNote) -> None:
        """Charge the quota for generated tokens; unknown ones stay reserved."""
        if self._books is None or not (self._ended or self._is_stream):
            return  # an incomplete document has no usage; an incomplete stream still has events
        usage = reader.usage()
        told = usage.output_tokens if usage is not None else None
        if told is not None and self._ended:
            self._books.generated(note, told)
        elif self._is_stream:
            # tokens of an unread line are unknown: return no reserved tokens
            least = note.reserved_tokens if reader.gave_up else 0
            self._books.generated(note, max(told or 0, reader.generated_tokens, least))

    def _tell_health(self, reader: UsageReader) -> None:
        if self._books is None or self._served_by is None:
            return
        seconds = time.time() - self._began_at
        seen = Seen(
            status=200,
            is_stream=True,
            is_whole=self._ended,
            tokens=reader.token_events,
            has_failed=self._has_failed(reader),
        )
        self._books.stream_read(self._served_by, outcome_of(seen), seconds=seconds)

    def _judged(self, reader: UsageReader) -> Judged | None:
        """Return whether the answer met its targets, or None for an incomplete document."""
        answer = self._plan.promise
        if answer is None or not (self._ended or self._is_stream):
            return None
        usage, now = reader.usage(), max(time.time() - answer.arrived_at, 0.0)
        times = StreamTimes.since(answer.arrived_at, first_at=self._first_token_at, last_at=self._last_token_at)
        tokens = usage.output_tokens if usage is not None and self._ended else None
        if tokens is None:
            tokens = reader.token_events or None
        if not reader.has_one_answer:
            tokens = None  # several choices in one answer

        failed = self._has_failed(reader)

        def verdict(targets: TokenTargets) -> Judgement:
            if failed:
                return Judgement(whole=False)
            if reader.has_refused:
                return Judgement()
            if self._is_stream:
                return judge_stream(targets, times, tokens=tokens, ended=self._ended, now=now)
            return judge_document(targets, seconds=now, tokens=tokens)

        return Judged(
            answer=answer,
            judgement=verdict(answer.promise.targets),
            asked=verdict(answer.asked) if answer.asked is not None else None,
            served_by=self._served_by or answer.endpoint,
            has_come=self._chunks > 0,
            failed=failed,
            measured=Measured(ttft_seconds=times.first_seconds, inter_token_seconds=times.mean_inter_token(tokens))
            if self._is_stream and not failed
            else NOT_MEASURED,
        )

    def _comparison(self, reader: UsageReader) -> Comparison | None:
        assert self._plan.prediction is not None, "usage is read to be compared with it"
        usage = reader.usage()
        if usage is None or reader.gave_up:
            self._misses.append(Miss.TOO_LARGE if reader.gave_up else Miss.NO_USAGE)
            return None
        comparison = compare(self._plan.prediction, usage, first_token_seconds=self._first_seconds)
        if comparison is None:
            self._misses.append(Miss.NO_CACHED_TOKENS)
        elif self._exchange is not None and self._exchange.arrival.span is not None:
            comparison = structs.replace(comparison, trace_id=self._exchange.arrival.trace_id)
        return comparison


def _seconds_since(prediction: Prediction | None) -> float | None:
    """Return the time since the pick, by the wall clocks of both pickers."""
    if prediction is None or not prediction.sent_at:
        return None
    return max(time.time() - prediction.sent_at, 0.0)
