"""A pod of the conformance suite's kind: it has what the picker asks of a pod; the rest is answered by the test."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from aiohttp import web

MODEL = "conformance-fake-model"  # what the suite's requests name
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
IDLE = "".join(f'vllm:{name}{{engine="0"}} 0.0\n' for name in GAUGES)


@asynccontextmanager
async def echo_pod(
    host: str,
    port: int,
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
    *,
    model: str = MODEL,
    metrics: Callable[[], str] = lambda: "",
) -> AsyncIterator[None]:
    """Serve it, until the block ends; `metrics` are further lines of its page."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=IDLE + metrics())

    app = web.Application(client_max_size=1 << 26)
    app.router.add_get("/metrics", page)
    app.router.add_get("/v1/models", partial(_models, model))
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()


async def _models(model: str, _: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": model, "parent": None, "max_model_len": 4096}]})
