"""OpenTelemetry spans of each traced exchange, sent to one OTLP/HTTP address; loaded only if tracing is configured.

`request_watch` asks for a request's span and reports its events. The event loop only queues them: a thread of this
module makes and exports the spans, from a bounded queue. An unreachable collector costs spans, which are counted and
logged, but never delays a pick. Spans contain no prompt, no generated text, no tenant.

    <operation> <model>       SERVER: from the request's arrival here to the end of its exchange
    ├── kvmesh.pick           from its arrival to the decision
    │   ├── kvmesh.lookup     the query to the index
    │   └── kvmesh.queue      the wait for room, if any
    ├── kvmesh.prefill        each request to a prefill pod, if any
    └── the pods' own spans, which get our `traceparent`
"""

import logging
import random
import re
import threading
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from extproc.choosing.decision import Decision
from extproc.disaggregation.transfer_protocols import LegOutcome
from extproc.ext_proc.exchange import RequestFacts
from extproc.ledger.facts import Decided, Ended, LegEnd, RequestOutcome, SpanContext
from extproc.ledger.ledger import Throttle
from extproc.ledger.otlp_exporter import span_exporter

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_INVALID_VERSION, _CURRENT_VERSION = "ff", "00"
_SAMPLED = 0x01
LONGEST_TRACESTATE = 512  # characters that the standard requires to propagate; a longer tracestate is left out
_TRACESTATE = re.compile(r"[\x20-\x7e]*", re.ASCII)


class Parent(msgspec.Struct, frozen=True, kw_only=True):
    """The client's span."""

    trace_id: int
    span_id: int
    is_sampled: bool


def parse_traceparent(text: str | None) -> Parent | None:
    """Return the client's span, or None without a valid header. Later versions are read as 00."""
    if text is None or (found := _TRACEPARENT.fullmatch(text)) is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == _INVALID_VERSION or (version == _CURRENT_VERSION and rest):
        return None
    parent = Parent(trace_id=int(trace_id, 16), span_id=int(span_id, 16), is_sampled=bool(int(flags, 16) & _SAMPLED))
    return parent if parent.trace_id and parent.span_id else None


def passed_on(tracestate: str | None) -> str:
    """Return the `tracestate` for the pod, or "" if it is too long or malformed."""
    if not tracestate or len(tracestate) > LONGEST_TRACESTATE or not _TRACESTATE.fullmatch(tracestate):
        return ""
    return tracestate


def is_chosen(trace_id: int, *, share: float) -> bool:
    """Return whether to record a trace without a parent's decision, by the random half of its id.

    As OpenTelemetry's TraceIdRatioBased, so that services with the same share record the same traces.
    """
    return (trace_id & ((1 << 64) - 1)) < round(share * (1 << 64))


log = logging.getLogger(__name__)

MOST_WAITING = 4096  # ended exchanges waiting for export; more are dropped
BATCH = 256  # exchanges
PAUSE_SECONDS = 1.0  # between two exports
EXPORT_SECONDS = 5.0  # until a batch is dropped
END_SECONDS = 2.0  # to export the rest when the picker stops
LONGEST_TEXT = 200  # characters of client text
PICK, LOOKUP, QUEUE, PREFILL = "kvmesh.pick", "kvmesh.lookup", "kvmesh.queue", "kvmesh.prefill"
SERVER, INTERNAL, CLIENT = trace.SpanKind.SERVER, trace.SpanKind.INTERNAL, trace.SpanKind.CLIENT

# https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/: gen_ai.operation.name
OPERATIONS: Mapping[str, str] = {
    "chat-completions": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
    "generate": "text_completion",
    "embeddings": "embeddings",
}

Value = str | int | float | bool | Sequence[str]


class _Pick(msgspec.Struct, frozen=True, kw_only=True):
    span: SpanContext
    name: str
    started_unix_ns: int
    seconds: float
    queued_seconds: float | None
    before_lookup_seconds: float
    lookup_seconds: float | None
    attributes: Mapping[str, Value]  # of the pick
    common: Mapping[str, Value]  # of the exchange
    error: str | None


class ExchangeTraces:
    """Implements `request_watch.Traces` on the event loop; `close` blocks, and may be called from any thread."""

    def __init__(
        self,
        *,
        otlp_endpoint: str,
        share: float,
        exporter: SpanExporter | None = None,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        """`share` is the sampled share of requests without a client's sampling decision; a client's decision holds."""
        self.exported_spans = 0
        self.dropped_spans = 0
        self._share = share
        self._open: dict[int, _Pick] = {}  # by exchange number; bounded by the open exchanges
        self._over: deque[tuple[_Pick, Ended | None]] = deque()
        self._exporter = exporter or span_exporter(otlp_endpoint, timeout_seconds=EXPORT_SECONDS)
        self._endpoint = otlp_endpoint
        self._spans = _Spans()
        self._pause_seconds = pause_seconds
        self._throttle = Throttle()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="export spans", daemon=True)
        self._thread.start()

    def open(self, facts: RequestFacts) -> SpanContext | None:
        """Return the span of a new request, or None if it is not traced."""
        parent = parse_traceparent(facts.traceparent)
        if parent is not None:
            if not parent.is_sampled:
                return None
            return SpanContext(
                trace_id=parent.trace_id,
                span_id=random.getrandbits(64) or 1,
                parent_id=parent.span_id,
                tracestate=passed_on(facts.headers.get("tracestate")),
            )
        trace_id = random.getrandbits(128) or 1
        if not is_chosen(trace_id, share=self._share):
            return None
        return SpanContext(trace_id=trace_id, span_id=random.getrandbits(64) or 1)

    def decided(self, decided: Decided, /) -> None:
        """Note the decision; if nothing was sent, the exchange is over."""
        if decided.arrival.span is None:
            return
        pick = _pick(decided, decided.arrival.span)
        if decided.outcome_kind in (RequestOutcome.ROUTED, RequestOutcome.FAILED_OPEN):
            self._open[decided.arrival.number] = pick
        else:
            self._is_over(pick, None)

    def ended(self, ended: Ended, /) -> None:
        """Queue the exchange's spans for export."""
        pick = self._open.pop(ended.arrival.number, None)
        if pick is not None:
            self._is_over(pick, ended)

    def close(self) -> None:
        """Export the rest within `END_SECONDS`; spans not exported by then are dropped."""
        self._ending.set()
        self._thread.join(END_SECONDS)
        self._exporter.shutdown()

    def _is_over(self, pick: _Pick, ended: Ended | None) -> None:
        if len(self._over) >= MOST_WAITING:
            self._dropped(2, "more exchanges end than can be exported")
            return
        self._over.append((pick, ended))

    def _run(self) -> None:
        while True:
            is_last = self._ending.wait(self._pause_seconds)
            while self._over:
                self._export([self._over.popleft() for _ in range(min(len(self._over), BATCH))])
            if is_last:
                return

    def _export(self, batch: Sequence[tuple[_Pick, Ended | None]]) -> None:
        spans: Sequence[ReadableSpan] = ()
        try:
            spans = self._spans.made(batch)
            result = self._exporter.export(spans)
        except Exception as error:
            self._dropped(len(spans) or len(batch), f"{type(error).__name__}: {error}")
            return
        if result is SpanExportResult.SUCCESS:
            self.exported_spans += len(spans)
        else:
            self._dropped(len(spans), f"the collector at {self._endpoint} does not take them")

    def _dropped(self, spans: int, why: str) -> None:
        self.dropped_spans += spans
        if self._throttle.passes():
            log.warning("spans are dropped", extra={"why": why, "dropped_spans": self.dropped_spans})


class _Spans:
    """Makes the spans of exchanges with their predefined ids. Used by one thread."""

    def __init__(self) -> None:
        self._ids = _Ids()
        self._done = _Collected()
        provider = TracerProvider(
            resource=Resource.create({"service.name": "kvmesh-extproc"}),
            sampler=ALWAYS_ON,  # unsampled exchanges never get here
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._done)
        self._tracer = provider.get_tracer("kvmesh")

    def made(self, batch: Sequence[tuple[_Pick, Ended | None]]) -> Sequence[ReadableSpan]:
        for pick, ended in batch:
            self._exchange(pick, ended)
        return self._done.taken()

    def _exchange(self, pick: _Pick, ended: Ended | None) -> None:
        own, began = pick.span, pick.started_unix_ns
        self._ids.next = (own.trace_id, own.span_id)
        decided_at = began + int(pick.seconds * 1e9)
        over_at = decided_at if ended is None else began + int(ended.seconds * 1e9)
        exchange = self._tracer.start_span(
            pick.name,
            context=_parent(own),
            kind=SERVER,
            start_time=began,
            attributes={**pick.common, **(_outcome(ended) if ended is not None else {})},
        )
        error = pick.error if ended is None else _error(ended)
        if error is not None:
            exchange.set_status(trace.Status(trace.StatusCode.ERROR, error))
        within = trace.set_span_in_context(exchange)
        decision = self._tracer.start_span(PICK, context=within, start_time=began, attributes=pick.attributes)
        if pick.error is not None:
            decision.set_status(trace.Status(trace.StatusCode.ERROR, pick.error))
        self._inner(pick, trace.set_span_in_context(decision), decided_at=decided_at)
        decision.end(end_time=decided_at)
        for leg in ended.legs if ended is not None else ():
            self._leg(leg, within, began=began + int(leg.began_seconds * 1e9))
        exchange.end(end_time=max(over_at, decided_at))

    def _inner(self, pick: _Pick, within: Context, *, decided_at: int) -> None:
        if pick.lookup_seconds is not None:
            began = pick.started_unix_ns + int(pick.before_lookup_seconds * 1e9)
            lookup = self._tracer.start_span(LOOKUP, context=within, kind=CLIENT, start_time=began)
            lookup.end(end_time=began + int(pick.lookup_seconds * 1e9))
        if pick.queued_seconds is not None:
            queue = self._tracer.start_span(
                QUEUE, context=within, kind=INTERNAL, start_time=decided_at - int(pick.queued_seconds * 1e9)
            )
            queue.end(end_time=decided_at)

    def _leg(self, leg: LegEnd, within: Context, *, began: int) -> None:
        attributes = {"kvmesh.endpoint": leg.endpoint, "kvmesh.outcome": leg.outcome}
        span = self._tracer.start_span(PREFILL, context=within, kind=CLIENT, start_time=began, attributes=attributes)
        if leg.outcome not in (LegOutcome.ANSWERED, LegOutcome.LOST, LegOutcome.LATE):
            span.set_status(trace.Status(trace.StatusCode.ERROR, leg.outcome))
        span.end(end_time=began + int(leg.seconds * 1e9))


class _Ids(IdGenerator):
    """Generates the predefined ids of the next span, if any, otherwise new ones."""

    def __init__(self) -> None:
        self.next: tuple[int, int] | None = None
        self._random = random.SystemRandom()

    def generate_trace_id(self) -> int:
        """Return the trace id; called only without a parent, before `generate_span_id`."""
        return self.next[0] if self.next is not None else self._random.getrandbits(128) or 1

    def generate_span_id(self) -> int:
        given, self.next = self.next, None
        return given[1] if given is not None else self._random.getrandbits(64) or 1


class _Collected(SpanProcessor):
    def __init__(self) -> None:
        self._ended: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._ended.append(span)

    def taken(self) -> Sequence[ReadableSpan]:
        taken, self._ended = self._ended, []
        return taken


def _parent(span: SpanContext) -> Context:
    if not span.parent_id:
        return Context()
    carrier = {"traceparent": f"00-{span.trace_id:032x}-{span.parent_id:016x}-01", "tracestate": span.tracestate}
    return TraceContextTextMapPropagator().extract(carrier, Context())


def _pick(decided: Decided, span: SpanContext) -> _Pick:
    record, phases = decided.record, decided.phases
    asked, outcome = record.asked, record.outcome
    operation = OPERATIONS.get(asked.api, asked.api) if asked is not None else None
    model = asked.served_model if asked is not None else None
    common: dict[str, Value] = {
        "http.request.method": record.facts.method[:LONGEST_TEXT],
        "url.path": record.facts.path.partition("?")[0][:LONGEST_TEXT],
        "kvmesh.request_id": record.facts.request_id[:LONGEST_TEXT],
        "kvmesh.decision_id": record.id,
        "gen_ai.provider.name": "vllm",
    }
    if decided.arrival.pool:
        common["kvmesh.pool"] = decided.arrival.pool
    if asked is not None and operation is not None:
        common["gen_ai.operation.name"] = operation
        common["gen_ai.request.stream"] = asked.stream
        common["kvmesh.class"] = asked.request_class.class_name
        if asked.model is not None:
            common["gen_ai.request.model"] = asked.model
        if asked.max_tokens is not None:
            common["gen_ai.request.max_tokens"] = asked.max_tokens
    attributes: dict[str, Value] = {"kvmesh.fate": decided.outcome_kind.value}
    error = None
    if isinstance(outcome, Decision):
        attributes["kvmesh.endpoint"] = outcome.endpoints[0]
        attributes["kvmesh.prompt_tokens"] = outcome.prompt_tokens
        attributes["kvmesh.matched_tokens"] = outcome.matched_tokens
        attributes["kvmesh.degraded"] = tuple(outcome.degraded)
    else:
        error = outcome.reason
        attributes["error.type"] = common["error.type"] = error
        if decided.outcome_kind is RequestOutcome.REFUSED:
            common["http.response.status_code"] = outcome.status
    return _Pick(
        span=span,
        name=" ".join(word for word in (operation or "request", model) if word),
        started_unix_ns=decided.arrival.unix_ns,
        seconds=decided.seconds,
        queued_seconds=decided.queued_seconds,
        before_lookup_seconds=phases.get("parse", 0.0) + phases.get("tokenize", 0.0),
        lookup_seconds=phases.get("lookup"),
        attributes=attributes,
        common=common,
        error=error,
    )


def _outcome(ended: Ended) -> Mapping[str, Value]:
    host, _, port = (ended.served_by or ended.endpoint).rpartition(":")
    outcome: dict[str, Value] = {"server.address": host.strip("[]")}
    if port.isdecimal():
        outcome["server.port"] = int(port)
    if ended.status:
        outcome["http.response.status_code"] = ended.status
    if (error := _error(ended)) is not None:
        outcome["error.type"] = error
    if ended.seconds_to_headers is not None:
        outcome["kvmesh.seconds_to_headers"] = ended.seconds_to_headers
    usage = ended.usage
    if usage is not None:
        for name, tokens in (
            ("gen_ai.usage.input_tokens", usage.prompt_tokens),
            ("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens),
            ("gen_ai.usage.output_tokens", usage.output_tokens),
        ):
            if tokens is not None:
                outcome[name] = tokens
    return outcome


def _error(ended: Ended) -> str | None:
    if not ended.status:
        return "no-answer"
    return str(ended.status) if ended.status >= 500 else None
