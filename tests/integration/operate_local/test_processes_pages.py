"""What `kvmesh up` reads over HTTP: the picker's state and the model that a pod serves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from extproc.pages.picker_state import DecisionState, EndpointState, IndexState, PickerState
from kvmesh.pods.pod_access import PodAccess
from operate.local.envoy_config import SocketAddress
from operate.local.live_view import fetch_state
from operate.local.ports import pick_free_port
from operate.local.service import ModelCard, ServedModels, first_served_models

HOST = "127.0.0.1"


@asynccontextmanager
async def serving(path: str, content: object, *, status: int = 200) -> AsyncIterator[SocketAddress]:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(content, status=status)

    app = web.Application()
    app.router.add_get(path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    try:
        yield SocketAddress(host=HOST, port=runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def fetched(address: SocketAddress) -> PickerState | str:
    async with aiohttp.ClientSession() as session:
        return await fetch_state(session, f"http://{address}")


async def test_the_pickers_state_is_read_and_fields_that_are_not_shown_are_ignored() -> None:
    content = {
        "now": 2.0,
        "endpoints": [{"address": "a:1", "state": "ready", "hit_rate": None, "picks": 3, "share": 1.0, "new": 1}],
        "index": {"state": "ok", "sources": 1, "problem": None},
        "decisions": [{"at": 1.0, "endpoint": None, "status": 503, "reasons": ["x"], "degraded": []}],
    }
    async with serving("/state", content) as address:
        state = await fetched(address)

    assert state == PickerState(
        now=2.0,
        endpoints=[EndpointState(address="a:1", state="ready", picks=3, share=1.0)],
        index=IndexState(state="ok", sources=1),
        decisions=[DecisionState(at=1.0, endpoint=None, status=503, reasons=["x"], degraded=[])],
    )


@pytest.mark.parametrize(
    ("content", "status", "problem"),
    [({}, 500, "status 500"), ({"now": "soon"}, 200, "Expected `float`, got `str`")],
)
async def test_a_state_that_is_not_to_be_had_says_why(content: object, status: int, problem: str) -> None:
    async with serving("/state", content, status=status) as address:
        state = await fetched(address)

    assert isinstance(state, str)
    assert state.startswith(f"GET http://{address}/state: {problem}")


async def test_a_picker_that_is_gone_says_so() -> None:
    address = SocketAddress(host=HOST, port=pick_free_port(host=HOST, avoid=()))

    state = await fetched(address)

    assert isinstance(state, str)
    assert state.startswith(f"GET http://{address}/state: Cannot connect to host")


async def test_the_first_pod_that_serves_something_says_what() -> None:
    dead = SocketAddress(host=HOST, port=pick_free_port(host=HOST, avoid=()))
    models = {"object": "list", "data": [{"id": "tiny", "root": "/m"}, {"id": "adapter", "root": None}]}
    other = {"data": [{"id": "other"}]}
    async with (
        serving("/v1/models", models) as pod,
        serving("/v1/models", {"data": []}) as empty,
        serving("/v1/models", "no list") as odd,
        serving("/v1/models", other) as second,
    ):
        assert await first_served_models([dead, odd, empty, pod, second], PodAccess()) == ServedModels(
            pod=str(pod), data=(ModelCard(id="tiny", root="/m"), ModelCard(id="adapter"))
        )
        assert await first_served_models([dead, empty], PodAccess()) is None
