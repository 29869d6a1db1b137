"""A pod of the conformance suite's kind: it has what the picker asks of a pod; the rest is answered by the test."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

MODEL = "conformance-fake-model"  # what the suite's requests name


@asynccontextmanager
async def echo_pod(
    host: str, port: int, answer: Callable[[web.Request], Awaitable[web.Response]]
) -> AsyncIterator[None]:
    """Serve it, until the block ends."""
    app = web.Application()
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/v1/models", _models)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()


async def _metrics(_: web.Request) -> web.Response:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return web.Response(text="".join(f'vllm:{name}{{engine="0"}} 0.0\n' for name in names))


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": MODEL, "parent": None, "max_model_len": 4096}]})
