"""Traces that are on: which requests have a span, what is dropped without a collector, and the extra they need."""

from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from extproc.answers.realised import Usage
from extproc.disaggregation.transfer_protocols import LegOutcome
from extproc.errors import ConfigError, PickError, RequestShedError
from extproc.ext_proc.exchange import RequestFacts
from extproc.ledger import tracing
from extproc.ledger.facts import (
    Arrival,
    Decided,
    DecisionRecord,
    Ended,
    LegEnd,
    NoDecision,
    RequestOutcome,
    SpanContext,
)
from extproc.ledger.tracing import ExchangeTraces
from extproc.pods.endpoint import Candidate, Reachability
from extproc.policy.values import PickPolicy
from extproc.pools.shared_resources import _tracing
from tests.unit.extproc_choosing.pick_candidates import decided as decision_of

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
POD = "10.0.0.1:8000"
SECOND = 1_000_000_000


class Exporter(SpanExporter):
    def __init__(self, result: SpanExportResult = SpanExportResult.SUCCESS) -> None:
        self.result = result
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans.extend(spans)
        return self.result


def traces(exporter: SpanExporter | None = None, *, share: float = 1.0) -> ExchangeTraces:
    return ExchangeTraces(otlp_endpoint="http://nowhere", share=share, exporter=exporter or Exporter())


def facts(**changes: Any) -> RequestFacts:
    return RequestFacts(
        **{"method": "POST", "path": "/v1/completions", "objective": None, "request_id": "r1"} | changes
    )


def decided(span: SpanContext, *, error: PickError | None = None, **changes: Any) -> Decided:
    pod = Candidate(
        address=POD,
        reachability=Reachability.READY,
        load=None,
        booked_requests=0,
        matched_tokens=32,
        prompt_tokens=40,
    )
    decision = decision_of([pod], policy=PickPolicy(), prompt_tokens=40, degraded={}, tie_break=lambda: 0.0)
    outcome = NoDecision.of(error) if error else decision
    values: dict[str, Any] = {
        "arrival": Arrival(number=1, unix_ns=SECOND, span=span),
        "outcome_kind": RequestOutcome.REFUSED if error else RequestOutcome.ROUTED,
        "record": DecisionRecord(
            at=0.0, id="d-1", facts=facts(path="/v1/completions?x=secret"), model=None, outcome=outcome
        ),
        "endpoint": None if error else POD,
        "at": 0.5,
        "phases": {"parse": 0.125, "tokenize": 0.125, "lookup": 0.125, "decide": 0.001},
    }
    return Decided(**values | changes)


def ended(span: SpanContext, **changes: Any) -> Ended:
    values: dict[str, Any] = {
        "arrival": Arrival(number=1, request_id="r1", unix_ns=SECOND, span=span),
        "endpoint": POD,
        "served_by": POD,
        "status": 200,
        "unserved": False,
        "headers_at": 1.0,
        "at": 2.0,
    }
    return Ended(**values | changes)


def test_each_prefill_leg_has_a_span_and_a_failed_one_says_why() -> None:
    exporter = Exporter()
    on = traces(exporter)
    span = on.open(facts())
    assert span is not None
    on.decided(decided(span))
    legs = (
        LegEnd(endpoint="p1:80", outcome=LegOutcome.FAILED, began_seconds=0.5, seconds=0.25),
        LegEnd(endpoint="p2:80", outcome=LegOutcome.ANSWERED, began_seconds=0.75, seconds=0.125),
        LegEnd(endpoint="p3:80", outcome=LegOutcome.LOST, began_seconds=0.75, seconds=0.25),  # no error
    )
    on.ended(ended(span, legs=legs))
    on.close()
    found = [each for each in exporter.spans if each.name == "kvmesh.prefill"]
    assert [(each.start_time, each.end_time, each.status.description) for each in found] == [
        (1.5 * SECOND, 1.75 * SECOND, "failed"),
        (1.75 * SECOND, 1.875 * SECOND, None),
        (1.75 * SECOND, 2.0 * SECOND, None),
    ]
    assert [dict(each.attributes or {}) for each in found] == [
        {"kvmesh.endpoint": "p1:80", "kvmesh.outcome": "failed"},
        {"kvmesh.endpoint": "p2:80", "kvmesh.outcome": "answered"},
        {"kvmesh.endpoint": "p3:80", "kvmesh.outcome": "lost"},
    ]


def test_a_client_that_samples_has_its_trace_continued() -> None:
    on = traces(share=0.0)
    span = on.open(facts(traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01", headers={"tracestate": "a=1"}))
    on.close()
    assert span is not None
    assert (span.trace_id, span.parent_id, span.tracestate) == (int(TRACE_ID, 16), int(PARENT_ID, 16), "a=1")
    assert span.span_id not in (0, span.parent_id)


def test_a_client_that_does_not_sample_has_no_span_whatever_the_share() -> None:
    on = traces(share=1.0)
    assert on.open(facts(traceparent=f"00-{TRACE_ID}-{PARENT_ID}-00")) is None
    on.close()


def test_without_a_parent_the_share_decides() -> None:
    all_of_them, none_of_them = traces(share=1.0), traces(share=0.0)
    assert all_of_them.open(facts(traceparent="nonsense")) is not None
    assert none_of_them.open(facts()) is None
    all_of_them.close()
    none_of_them.close()


def test_an_exchange_has_spans_for_the_pick_the_lookup_and_the_wait() -> None:
    exporter = Exporter()
    on = traces(exporter)
    span = on.open(facts())
    assert span is not None
    on.decided(decided(span, queued_seconds=0.25))
    on.ended(ended(span, usage=Usage(prompt_tokens=40, cached_tokens=32, output_tokens=7)))
    on.close()

    spans = {each.name: each for each in exporter.spans}
    times = {name: (each.start_time, each.end_time) for name, each in spans.items()}
    assert times == {
        "request": (SECOND, 3 * SECOND),
        "kvmesh.pick": (SECOND, 1.5 * SECOND),
        "kvmesh.lookup": (1.25 * SECOND, 1.375 * SECOND),
        "kvmesh.queue": (1.25 * SECOND, 1.5 * SECOND),
    }
    exchange = spans["request"]
    assert exchange.context is not None
    assert (exchange.context.trace_id, exchange.context.span_id) == (span.trace_id, span.span_id)
    assert exchange.attributes is not None
    assert (
        exchange.attributes.items()
        >= {
            "gen_ai.usage.input_tokens": 40,
            "gen_ai.usage.cache_read.input_tokens": 32,
            "gen_ai.usage.output_tokens": 7,
            "http.response.status_code": 200,
            "server.address": "10.0.0.1",
            "server.port": 8000,
            "url.path": "/v1/completions",
        }.items()
    )
    pick = spans["kvmesh.pick"]
    assert pick.attributes is not None
    assert pick.attributes["kvmesh.matched_tokens"] == 32
    assert on.exported_spans == 4


def test_a_refusal_is_an_error_and_ends_at_once() -> None:
    exporter = Exporter()
    on = traces(exporter)
    span = on.open(facts())
    assert span is not None
    on.decided(decided(span, error=RequestShedError("busy")))
    on.close()
    exchange = next(each for each in exporter.spans if each.name == "request")
    assert (exchange.status.description, exchange.end_time) == ("shed", 1.5 * SECOND)


def test_what_ends_faster_than_it_is_exported_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "MOST_WAITING", 2)
    exporter = Exporter()
    on = ExchangeTraces(otlp_endpoint="http://nowhere", share=1.0, exporter=exporter, pause_seconds=60.0)
    span = on.open(facts())
    assert span is not None
    for _ in range(3):
        on.decided(decided(span, error=RequestShedError("busy")))
    on.close()
    assert (on.dropped_spans, len(exporter.spans)) == (2, 2 * 3)
    assert caplog.text.count("spans are dropped") == 1


def test_spans_that_the_collector_refuses_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    on = traces(Exporter(SpanExportResult.FAILURE))
    span = on.open(facts())
    assert span is not None
    on.decided(decided(span, error=RequestShedError("busy")))
    on.close()
    assert (on.exported_spans, on.dropped_spans) == (0, 3)
    assert "spans are dropped" in caplog.text


def test_without_the_extra_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "extproc.ledger.tracing", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvmesh\[otel\]'"):
        _tracing("http://127.0.0.1:4318/v1/traces", share=1.0)


def test_without_the_flag_there_is_no_tracing() -> None:
    assert _tracing(None, share=1.0) is None
