"""A collector's answers to exported spans cost the picker nothing, however large they are."""

import asyncio
import gzip
import json
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from tests.attack.mesh import resident_bytes
from tests.e2e.stack import running_stack

PACKED = gzip.compress(bytes(1 << 20)) * 1024  # unpacks to 1 GiB
PIECE = bytes(1 << 18)
SECONDS = 6.0
MOST_MORE_BYTES = 40 << 20


async def test_large_answers_of_a_collector_take_no_memory(tmp_path: Path) -> None:
    exports = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal exports
        await request.read()
        exports += 1
        if exports % 2:
            return web.Response(body=PACKED, headers={"content-encoding": "gzip"})
        response = web.StreamResponse()
        await response.prepare(request)
        with suppress(ConnectionError):
            while True:
                await response.write(PIECE)
        return response

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    settings = {"otlp_endpoint": f"http://127.0.0.1:{runner.addresses[0][1]}/", "trace_share": 1.0}
    try:
        async with running_stack(tmp_path, pods=1, settings=json.dumps(settings)) as stack:
            assert (await stack.complete("hello")).status == 200
            before = most = resident_bytes(stack.picker)
            loop = asyncio.get_running_loop()
            until, slowest = loop.time() + SECONDS, 0.0
            while loop.time() < until:
                asked = loop.time()
                assert (await stack.complete("hello")).status == 200
                slowest = max(slowest, loop.time() - asked)
                most = max(most, resident_bytes(stack.picker))
                await asyncio.sleep(0.05)
    finally:
        await runner.cleanup()
    print(f"{before >> 20} MiB before, {most >> 20} MiB at most, slowest {slowest:.2f} s, {exports} exports")
    assert exports > 2
    assert most - before <= MOST_MORE_BYTES
