"""Pods that fail in every way, in process, behind a whole mesh; and a steady load on them."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from tests.e2e.echo_pod import MODEL, echo_pod
from tests.e2e.stack import Stack, eventually, free_ports, running_stack

REQUESTS = 100
INTERVAL_SECONDS = 0.1
PATIENCE_SECONDS = 1.2  # of a client that has no headers yet
TOKEN_SECONDS = 0.03  # a whole answer is not brief
MOST_CHARACTERS = 1_000
CHATS = "/v1/chat/completions"
TOKEN = json.dumps({"choices": [{"index": 0, "delta": {"content": "x"}}]}).encode()
CHAT = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "hello"}]}
QUOTAS = [{"tenant": "greedy", "requestsPerMinute": 1, "burstSeconds": 60}]
POLICY = {"load": {"health": {"avoidSeconds": 2}}, "quotas": QUOTAS}

TLS_ALERT = b"\x15\x03\x01\x00\x02\x02\x46"  # fatal: protocol version

Way = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def _stream(request: web.Request, *events: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(b"data: " + event + b"\n\n")
        await asyncio.sleep(TOKEN_SECONDS)
    return response


async def well(request: web.Request) -> web.StreamResponse:
    return await _stream(request, *[TOKEN] * 6, b"[DONE]")


async def refuse(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "too many"}}, status=429, headers={"retry-after": "1"})


async def refuse_in_plain_text(_: web.Request) -> web.StreamResponse:
    return web.Response(text="local_rate_limited", status=429)


async def fail(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "engine dead"}}, status=500)


async def reset(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def speak_tls(request: web.Request) -> web.StreamResponse:
    """Answer like a server that wants TLS, to a client without it."""
    assert request.transport is not None
    request.transport.write(TLS_ALERT)
    request.transport.close()
    return web.Response()


async def break_off(request: web.Request) -> web.StreamResponse:
    response = await _stream(request)
    assert request.transport is not None
    request.transport.abort()
    return response


async def stream_an_error(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b'data: {"error": {"message": "engine dead", "type": "InternalServerError", "code": 500}}\n\n')
    await response.write(b"data: [DONE]\n\n")
    return response


async def break_off_late(request: web.Request) -> web.StreamResponse:
    response = await _stream(request)
    await asyncio.sleep(10 * TOKEN_SECONDS)
    assert request.transport is not None
    request.transport.abort()
    return response


async def hang_behind_headers(request: web.Request) -> web.StreamResponse:
    await _stream(request)
    return await hang(request)


async def hang(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("nobody ends it")


async def ordinary(request: web.Request) -> web.StreamResponse:
    """Answer as vLLM: 400 for what is wrong; a stream's headers before its first token, a document after its last."""
    try:
        body = await request.json()
        is_wrong = len(body["messages"][0]["content"]) > MOST_CHARACTERS
    except (ValueError, TypeError, KeyError):
        is_wrong = True
    if is_wrong:
        return web.json_response({"error": {"message": "wrong", "code": 400}}, status=400)
    if not body.get("stream"):
        await asyncio.sleep(2 * PATIENCE_SECONDS)
        return web.json_response({"choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}}]})
    response = await _stream(request)
    await asyncio.sleep(10 * TOKEN_SECONDS)
    for _ in range(6):
        await response.write(b"data: " + TOKEN + b"\n\n")
        await asyncio.sleep(TOKEN_SECONDS)
    await response.write(b"data: [DONE]\n\n")
    return response


@dataclass
class Pod:
    """A pod that answers in whatever way it is set to, and counts. Its page has an engine's numbers if `counts`."""

    way: Way = well
    counts: bool = False
    is_awake: bool = True
    answers: int = 0
    computed: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        if request.path != CHATS:
            return web.Response(status=404)
        self.answers += 1
        self.computed += self.way in (well, ordinary)
        return await self.way(request)

    def metrics(self) -> str:
        if not self.counts:
            return ""
        return (
            f'vllm:prefix_cache_queries_total{{engine="0"}} {self.computed}.0\n'
            f'vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {float(self.is_awake)}\n'
        )


@asynccontextmanager
async def mesh_of(tmp_path: Path, pods: Sequence[Pod]) -> AsyncIterator[Stack]:
    """Serve the pods behind a whole mesh."""
    ports = free_ports(len(pods))
    async with AsyncExitStack() as stack:
        for port, pod in zip(ports, pods, strict=True):
            await stack.enter_async_context(echo_pod("127.0.0.1", port, pod.answer, metrics=pod.metrics))
        settings = json.dumps({"policy": POLICY, "sample_share": 0.0})
        endpoints = [f"127.0.0.1:{port}" for port in ports]
        yield await stack.enter_async_context(
            running_stack(tmp_path, "--model", MODEL, settings=settings, endpoints=endpoints)
        )


async def is_served(mesh: Stack) -> bool:
    """Send one chat; tell whether its tokens came to the end."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            answer = await mesh.send("POST", CHATS, json=CHAT)
    except (aiohttp.ClientError, TimeoutError):
        return False
    return answer.status == 200 and b'"delta"' in answer.body and answer.body.endswith(b"data: [DONE]\n\n")


async def failures_of_a_load(mesh: Stack, *, requests: int = REQUESTS) -> int:
    """Send chats at a steady rate; return how many were not served."""
    sent = []
    for _ in range(requests):
        sent.append(asyncio.create_task(is_served(mesh)))
        await asyncio.sleep(INTERVAL_SECONDS)
    return (await asyncio.gather(*sent)).count(False)


async def all_serve(mesh: Stack, pods: Sequence[Pod]) -> None:
    """Wait until every pod gets requests and serves them."""
    for pod in pods:
        pod.answers = 0

    async def least() -> int:
        await asyncio.gather(*(is_served(mesh) for _ in pods))
        return min(pod.answers for pod in pods)

    await eventually(least, lambda answers: answers >= 3, seconds=30.0)
    await eventually(lambda: failures_of_a_load(mesh, requests=20), lambda failed: failed == 0, seconds=30.0)
