"""A collector of traces for tests: takes OTLP/HTTP exports in JSON."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


@asynccontextmanager
async def collector(received: list[Any], *, status: int = 200) -> AsyncIterator[str]:
    """An OTLP/HTTP collector; yields its address."""

    async def collect(request: web.Request) -> web.Response:
        received.append(await request.json())
        return web.json_response({}, status=status)

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    finally:
        await runner.cleanup()


def spans_of(received: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        span | {"attributes": {one["key"]: next(iter(one["value"].values())) for one in span.get("attributes", ())}}
        for export in received
        for resource in export["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
