"""Simulated pods behind a recorder each: what reaches a pod, byte for byte, and the pod's own answer."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import aiohttp
from aiohttp import web

from tests.e2e.stack import free_ports, simulated_pods

HOST = "127.0.0.1"


class Received:
    """One request as a pod got it."""

    def __init__(self, pod: str, request: web.Request, body: bytes) -> None:
        self.pod = pod
        self.path = request.path
        self.headers = {name.lower(): value for name, value in request.headers.items()}
        self.body = body


@asynccontextmanager
async def recorded_pods(count: int, *flags: str) -> AsyncIterator[tuple[list[str], list[Received]]]:
    """Start so many; yield the recorders' addresses, and what they have got of all that was posted."""
    received: list[Received] = []
    async with AsyncExitStack() as exits:
        pods = await exits.enter_async_context(simulated_pods(count, *flags))
        http = await exits.enter_async_context(aiohttp.ClientSession())
        places: list[str] = []
        for pod, port in zip(pods, free_ports(count), strict=True):
            places.append(f"{HOST}:{port}")
            app = web.Application(client_max_size=1 << 26)
            app.router.add_route("*", "/{path:.*}", partial(_pass_on, http, pod, places[-1], received))
            runner = web.AppRunner(app, auto_decompress=False, shutdown_timeout=0.1)
            await runner.setup()
            exits.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, HOST, port).start()
        yield places, received


async def _pass_on(
    http: aiohttp.ClientSession, pod: str, place: str, received: list[Received], request: web.Request
) -> web.Response:
    body = await request.read()
    if request.method == "POST":
        received.append(Received(place, request, body))
    kept = {name: value for name, value in request.headers.items() if name.lower() in ("content-type", "x-request-id")}
    async with http.request(request.method, f"http://{pod}{request.path_qs}", data=body, headers=kept) as answer:
        # vLLM's pages have types that aiohttp takes apart
        headers = {"content-type": answer.headers.get("content-type", "text/plain")}
        return web.Response(status=answer.status, body=await answer.read(), headers=headers)
