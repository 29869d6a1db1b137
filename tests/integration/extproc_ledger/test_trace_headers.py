"""The pod gets the exchange's span as its parent, through a real Envoy, in both body modes; else all as it was sent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from operate.local.envoy_config import SocketAddress
from tests.integration.envoy_process import HOST, running_envoy
from tests.integration.hermetic_pods import BASE_MODEL, PodState
from tests.integration.otlp_collector import collector, spans_of
from tests.integration.overload_picker import picker_before

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01", f"00-{TRACE_ID}-{PARENT_ID}-00"


@dataclass
class Pod:
    address: str = ""
    received: list[dict[str, str]] = field(default_factory=list)


@asynccontextmanager
async def running_pod() -> AsyncIterator[Pod]:
    pod, state = Pod(), PodState()

    async def answer(request: web.Request) -> web.Response:
        pod.received.append({name.lower(): value for name, value in request.headers.items()})
        return web.json_response({"choices": []})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=state.metrics())

    async def models(_: web.Request) -> web.Response:
        return web.json_response(state.cards())

    app = web.Application()
    app.add_routes([web.post("/v1/completions", answer), web.get("/metrics", metrics), web.get("/v1/models", models)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, 0).start()
        pod.address = f"{HOST}:{runner.addresses[0][1]}"
        yield pod
    finally:
        await runner.cleanup()


async def sent_on(file: str, tmp_path: Path, *headers: dict[str, str], **settings: Any) -> list[dict[str, str]]:
    """Send a request with each of these headers and return those that the pod got."""
    async with running_pod() as pod, picker_before(cast("Any", [pod]), **settings) as picker:
        picker_port = int(picker.grpc_address.rpartition(":")[2])
        address = SocketAddress(host=HOST, port=int(pod.address.rpartition(":")[2]))
        async with (
            running_envoy(tmp_path, file=file, picker_port=picker_port, pods=[address]) as envoy,
            aiohttp.ClientSession() as http,
        ):
            for each in headers:
                body = {"model": BASE_MODEL, "prompt": "x"}
                async with asyncio.timeout(20.0):
                    async with http.post(f"{envoy.gateway}/v1/completions", json=body, headers=each) as response:
                        assert response.status == 200
        return pod.received


@pytest.mark.parametrize("file", ["local.yaml", "buffered.yaml"])
async def test_the_pods_parent_is_the_exchanges_span_and_tracestate_is_passed_on(file: str, tmp_path: Path) -> None:
    spans: list[Any] = []
    async with collector(spans) as address:
        sampled, not_sampled = await sent_on(
            file,
            tmp_path,
            {"traceparent": SAMPLED, "tracestate": "vendor=1"},
            {"traceparent": NOT_SAMPLED},
            otlp_endpoint=address,
        )
    (exchange,) = [span for span in spans_of(spans) if span["kind"] == 2]
    assert sampled["traceparent"] == f"00-{TRACE_ID}-{exchange['spanId']}-01"
    assert exchange["parentSpanId"] == PARENT_ID
    assert sampled["tracestate"] == "vendor=1"
    assert not_sampled["traceparent"] == NOT_SAMPLED


async def test_without_traces_the_clients_headers_go_on_as_they_came(tmp_path: Path) -> None:
    (received,) = await sent_on("local.yaml", tmp_path, {"traceparent": SAMPLED, "tracestate": "vendor=1"})
    assert (received["traceparent"], received["tracestate"]) == (SAMPLED, "vendor=1")
