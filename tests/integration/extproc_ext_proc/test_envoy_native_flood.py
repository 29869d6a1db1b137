"""Bodies in frames of one byte, through the filter of Istio's native InferencePools: they end no other exchange."""

import asyncio
import re
from pathlib import Path

import aiohttp
from aiohttp import web

from extproc.http2 import frames as http2
from tests.attack.http2_client import raw_client
from tests.integration.extproc_ext_proc.test_envoy_native_pool import as_istio
from tests.integration.scripted_picker import DOCUMENT, DUPLEX, Mesh, document, mesh

FRAMES = 65_000  # of one stream: Envoy's window for it, and six times its limit of queued frames
FLOODS = 2
INNOCENTS = 24


async def stat(running: Mesh, name: str) -> int:
    async with aiohttp.ClientSession() as http, http.get(f"{running.admin}/stats?filter={name}") as response:
        return sum(map(int, re.findall(r": (\d+)", await response.text())))


async def test_bodies_in_frames_of_one_byte_end_no_other_exchange(tmp_path: Path) -> None:
    is_over = asyncio.Event()

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        await is_over.wait()
        return await document(request, body)

    async def ask() -> bytes | int:
        async with running.post() as response:
            return await response.read() if response.status == 200 else response.status

    async with mesh(DUPLEX, tmp_path, answer, edit=as_istio) as running:
        innocents = [asyncio.create_task(ask()) for _ in range(INNOCENTS)]
        while len(running.received) < INNOCENTS:
            await asyncio.sleep(0.01)
        host, port = running.gateway.removeprefix("http://").split(":")
        for _ in range(FLOODS):
            sent = await stat(running, "ext_proc.stream_msgs_sent")
            async with raw_client(host, int(port)) as client:
                stream, head = client.open(f"{host}:{port}", content_type=b"application/json")
                await client.send(head + http2.frame(http2.DATA, 0, stream, b"x") * FRAMES)
                while await stat(running, "ext_proc.stream_msgs_sent") < sent + FRAMES:
                    await asyncio.sleep(0.05)
        is_over.set()
        assert await asyncio.gather(*innocents) == [DOCUMENT] * INNOCENTS
        assert await stat(running, "cluster.picker.http2.outbound_flood") == 0
