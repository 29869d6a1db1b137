"""Requests that wait for room hold a bounded memory: the largest leave first, small ones keep their places."""

import asyncio
import gzip
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.attack.mesh import resident_bytes
from tests.attack.programs.gzip_bombs import PLAIN
from tests.e2e.echo_pod import echo_pod
from tests.e2e.stack import eventually, free_ports, running_stack

BOMBS = 60  # each takes 32 MiB while it waits
MOST_MORE_BYTES = 512 << 20
BATCH = {"name": "batch", "priority": -1, "sheddable": True, "ttftSeconds": 100, "queueSeconds": 100}
SMALL = {"model": "tiny", "messages": [{"role": "user", "content": "small"}]}
PATH = "/v1/chat/completions"


@pytest.mark.parametrize("is_sheddable", [True, False], ids=["refused", "sent on"])
async def test_bombs_that_wait_take_little_memory_and_no_small_requests_place(
    is_sheddable: bool, tmp_path: Path
) -> None:
    is_full, packed = True, gzip.compress(PLAIN)

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.json_response({})

    (port,) = free_ports(1)
    classes: dict[str, Any] = {"classes": [BATCH], "defaultClass": "batch"} if is_sheddable else {}
    moves = itertools.cycle((0.97, 0.99))  # the picker distrusts numbers that stand still
    full_pod = echo_pod(
        *("127.0.0.1", port, answer), model="tiny", running=lambda: 1, kv_usage=lambda: next(moves) if is_full else 0.0
    )
    settings = json.dumps({"policy": {"priorities": classes}})
    async with full_pod, running_stack(tmp_path, settings=settings, endpoints=[f"127.0.0.1:{port}"]) as stack:
        await eventually(stack.state, lambda state: (state["endpoints"][0]["kv_usage"] or 0.0) > 0.9)
        before = most = resident_bytes(stack.picker)
        small = [asyncio.create_task(stack.send("POST", PATH, json=SMALL)) for _ in range(8)]

        async def bomb(http: aiohttp.ClientSession) -> int:
            headers = {"content-encoding": "gzip", "content-type": "application/json"}
            async with http.post(stack.ready["gateway"] + PATH, data=packed, headers=headers) as got:
                await got.read()
                return got.status

        async with aiohttp.ClientSession() as http:
            bombs = [asyncio.create_task(bomb(http)) for _ in range(BOMBS)]
            while sum(task.done() for task in bombs) < BOMBS // 2:
                most = max(most, resident_bytes(stack.picker))
                await asyncio.sleep(0.05)
            assert not any(task.done() for task in small)
            is_full = False
            ends = Counter(await asyncio.gather(*bombs))
            assert [answered.status for answered in await asyncio.gather(*small)] == [200] * 8
        print(f"{before >> 20} MiB before, {most >> 20} MiB at most; {ends}")
        assert most - before <= MOST_MORE_BYTES
        assert ends[503] >= BOMBS // 2 if is_sheddable else ends == {200: BOMBS}
