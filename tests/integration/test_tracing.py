"""Spans arrive at an OTLP collector, as children of the client's trace, for routed and for refused requests."""

import asyncio

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from extproc.adapters.tracing import PickTracing
from extproc.core.decision import decide
from extproc.core.endpoint import Candidate, Reachability
from extproc.core.exchange import RequestFacts
from extproc.core.policy import PickPolicy
from extproc.errors import ConfigError, RequestShedError
from extproc.service import _tracing

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
FACTS = RequestFacts(
    method="POST",
    path="/v1/completions?x=secret",
    objective=None,
    request_id="r1",
    traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01",
)


async def test_a_pick_is_a_child_span_of_the_clients_trace() -> None:
    received = ExportTraceServiceRequest()

    async def collect(request: web.Request) -> web.Response:
        received.MergeFromString(await request.read())
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    tracing = PickTracing(otlp_endpoint=f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces")
    pod = Candidate(
        address="10.0.0.1:8000",
        reachability=Reachability.READY,
        load=None,
        booked_requests=0,
        matched_tokens=32,
        prompt_tokens=40,
    )
    decision = decide([pod], policy=PickPolicy(), prompt_tokens=40, degraded={}, tie_break=lambda: 0.0)
    tracing.record(FACTS, decision, started_unix_ns=1_000, ended_unix_ns=3_000)
    tracing.record(FACTS, RequestShedError("busy"), started_unix_ns=5_000, ended_unix_ns=6_000)
    await asyncio.to_thread(tracing.close)
    await runner.cleanup()

    (scope,) = received.resource_spans[0].scope_spans
    routed, refused = scope.spans
    assert {(span.trace_id.hex(), span.parent_span_id.hex(), span.name) for span in scope.spans} == {
        (TRACE_ID, PARENT_ID, "kvmesh.pick")
    }
    assert (routed.start_time_unix_nano, routed.end_time_unix_nano) == (1_000, 3_000)
    values = {attribute.key: attribute.value for attribute in routed.attributes}
    assert values["kvmesh.endpoint"].string_value == "10.0.0.1:8000"
    assert values["kvmesh.matched_tokens"].int_value == 32
    assert (refused.status.code, refused.status.message) == (2, "shed")
    assert b"secret" not in received.SerializeToString()


def test_without_the_extra_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "extproc.adapters.tracing", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvmesh\[otel\]'"):
        _tracing("http://127.0.0.1:4318/v1/traces")


def test_without_the_flag_there_is_no_tracing() -> None:
    assert _tracing(None) is None
