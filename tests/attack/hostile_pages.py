"""A pod whose pages change with each question, at the address that picker and indexer look for."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from tests.attack.target import Target


@asynccontextmanager
async def hostile_pages(target: Target, pages: Callable[[str], web.Response | None]) -> AsyncIterator[None]:
    """Answer each path with what `pages` gives, 404 for None; each page given counts."""

    async def answer(request: web.Request) -> web.Response:
        page = pages(request.path)
        if page is None:
            return web.Response(status=404)
        target.done += 1
        return page

    app = web.Application()
    app.add_routes([web.get("/{path:.*}", answer)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    host, port = target.hostile_address()
    await web.TCPSite(runner, host, port).start()
    try:
        yield
    finally:
        await runner.cleanup()
