"""A pod of the conformance suite's kind: it has what the picker asks of a pod; the rest is answered by the test."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from aiohttp import web

MODEL = "conformance-fake-model"  # what the suite's requests name
PAGE = """\
vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_waiting{{engine="0"}} 0.0
vllm:kv_cache_usage_perc{{engine="0"}} {kv_usage}
"""


@asynccontextmanager
async def echo_pod(
    host: str,
    port: int,
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
    *,
    model: str = MODEL,
    running: Callable[[], int] = lambda: 0,
    kv_usage: Callable[[], float] = lambda: 0.0,
    metrics: Callable[[], str] = lambda: "",
) -> AsyncIterator[None]:
    """Serve it, until the block ends; its page has `running` requests, `kv_usage`, and `metrics` as lines."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=PAGE.format(running=running(), kv_usage=kv_usage()) + metrics())

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
