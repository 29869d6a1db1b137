"""Spans arrive at an OTLP collector, as children of the client's trace, for routed and for refused requests."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from extproc.adapters.tracing import PickTracing
from extproc.core.endpoint import Candidate, Reachability
from extproc.core.exchange import RequestFacts
from extproc.core.policy import PickPolicy
from extproc.errors import ConfigError, RequestShedError
from extproc.picker_parts import _tracing
from tests.unit.extproc_core.pick_candidates import decided

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
FACTS = RequestFacts(
    method="POST",
    path="/v1/completions?x=secret",
    objective=None,
    request_id="r1",
    traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01",
)


async def test_a_pick_is_a_child_span_of_the_clients_trace() -> None:
    received: list[Any] = []

    async def collect(request: web.Request) -> web.Response:
        received.append(await request.json())
        return web.json_response({})

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
    decision = decided([pod], policy=PickPolicy(), prompt_tokens=40, degraded={}, tie_break=lambda: 0.0)
    tracing.record(FACTS, decision, started_unix_ns=1_000, ended_unix_ns=3_000)
    tracing.record(FACTS, RequestShedError("busy"), started_unix_ns=5_000, ended_unix_ns=6_000)
    await asyncio.to_thread(tracing.close)
    await runner.cleanup()

    (export,) = received
    routed, refused = export["resourceSpans"][0]["scopeSpans"][0]["spans"]
    for span in (routed, refused):
        assert (span["traceId"], span["parentSpanId"], span["name"]) == (TRACE_ID, PARENT_ID, "kvmesh.pick")
    assert (routed["startTimeUnixNano"], routed["endTimeUnixNano"]) == ("1000", "3000")
    values = {attribute["key"]: attribute["value"] for attribute in routed["attributes"]}
    assert values["kvmesh.endpoint"] == {"stringValue": "10.0.0.1:8000"}
    assert values["kvmesh.matched_tokens"] == {"intValue": "32"}
    assert refused["status"] == {"code": 2, "message": "shed"}
    assert "secret" not in json.dumps(export)


def test_without_the_extra_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "extproc.adapters.tracing", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvmesh\[otel\]'"):
        _tracing("http://127.0.0.1:4318/v1/traces")


def test_without_the_flag_there_is_no_tracing() -> None:
    assert _tracing(None) is None
