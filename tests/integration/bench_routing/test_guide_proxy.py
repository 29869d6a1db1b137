"""The guide's proxy: a prompt is in flight until the first piece of its answer, however that ends."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.routing.guide_router import GuideProxy

CHAT = {"messages": [{"role": "user", "content": "x" * 4000}]}


@contextlib.asynccontextmanager
async def proxied(handler: Any) -> AsyncIterator[tuple[aiohttp.ClientSession, str, GuideProxy]]:
    pod_app, app = web.Application(), web.Application()
    pod_app.router.add_post("/v1/chat/completions", handler)
    async with TestServer(pod_app) as pod, aiohttp.ClientSession() as http:
        proxy = GuideProxy([f"{pod.host}:{pod.port}"], http=http)
        app.router.add_post("/{path:.*}", proxy.serve)
        async with TestServer(app) as server:
            yield http, str(server.make_url("/v1/chat/completions")), proxy


async def test_a_prompt_is_in_flight_until_its_first_piece_and_the_answer_passes_as_it_comes() -> None:
    go_on = asyncio.Event()

    async def pod(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await go_on.wait()
        await response.write(b"one")
        go_on.clear()
        await go_on.wait()
        await response.write(b"two")
        return response

    async with proxied(pod) as (http, url, proxy), http.post(url, json=CHAT) as answer:
        assert proxy.in_flight_tokens == [1001]
        go_on.set()
        assert await answer.content.readexactly(3) == b"one"
        assert proxy.in_flight_tokens == [0]
        go_on.set()
        assert await answer.read() == b"two"
        assert answer.content_type == "text/event-stream"


async def test_a_request_that_fails_is_in_flight_no_longer() -> None:
    async def pod(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError

    async with proxied(pod) as (http, url, proxy):
        async with http.post(url, json=CHAT) as answer:
            assert answer.status == 500
        assert proxy.in_flight_tokens == [0]
