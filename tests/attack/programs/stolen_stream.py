"""A pod that announces another pod's event stream as its own."""

import asyncio

import aiohttp

from tests.attack.raw_pod import page, raw_pod
from tests.attack.target import Target

# so much to do that nobody sends it anything: it would not answer
METRICS = page(b"vllm:num_requests_waiting 9000\nvllm:num_requests_running 0\nvllm:kv_cache_usage_perc 1\n")
MODELS = page(b'{"data": [{"id": "tiny", "object": "model"}]}')
NOTHING = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


async def attack(target: Target) -> None:
    """Answer with what another pod says of its events; requests get nothing."""
    target.begin()
    async with aiohttp.ClientSession() as http, http.get(f"http://{target.pods[0]}/kv_event_sources") as answer:
        sources = page(await answer.read())
    pages = {"/metrics": METRICS, "/v1/models": MODELS, "/kv_event_sources": sources}

    async def answer_of(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(pages.get(path, NOTHING))

    async with raw_pod(target, answer_of):
        await asyncio.Event().wait()
