"""Pods under a test's command: what each says of itself, when it answers, and whether it refuses or falls silent.

They take inference requests for real, so that whole stacks can stand before them; the test decides when a request ends.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

HOST = "127.0.0.1"
MODEL = "tiny"
STARTS_A_SECOND, FIRST_TOKEN_SECONDS = 20.0, 0.5  # of a pod that says it is full
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
# as vLLM 0.32 answers beyond --max-num-queued-reqs
FULL = {"error": {"message": "Too many queued requests", "type": "ServiceUnavailableError", "param": None, "code": 503}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One request as a pod got it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass(slots=True, kw_only=True, eq=False)
class HeldPod:
    """One pod; its answers are held until `release`."""

    models: tuple[str, ...] = (MODEL,)
    waiting: int = 0  # as it reports
    running: int | None = None  # as it reports; None: those that are open
    kv_usage: float = 0.0
    first_tokens: float = 0.0  # that it has counted
    life: int = 1  # another number is another process
    is_mute: bool = False  # /metrics gives no answer at all
    told: asyncio.Event | None = None  # until it is set, /v1/models gives no answer
    scrapes: int = 0
    asked_for_models: asyncio.Event = field(default_factory=asyncio.Event)
    refuses: bool = False  # with vLLM's 503
    wants_key: bool = False  # to list its models, as with vLLM's --api-key
    address: str = ""
    received: list[Received] = field(default_factory=list)
    open_requests: int = 0
    most_open: int = 0
    released: asyncio.Event = field(default_factory=asyncio.Event)
    runner: web.AppRunner | None = None
    asked_at: float | None = None  # for /metrics

    def fill(self) -> None:
        """Say that many wait and that they start at a usual pace: full for every class."""
        self.waiting, self.running = 100, 4

    def free(self) -> None:
        """Say what is true again."""
        self.waiting, self.running = 0, None

    def release(self) -> None:
        """Answer what is open and whatever comes."""
        self.released.set()

    def hold(self) -> None:
        """Answer nothing from now on."""
        self.released.clear()

    def metrics(self) -> str:
        """Return vLLM's page, as far as routing reads it."""
        running = self.open_requests if self.running is None else self.running
        now = time.monotonic()
        if self.waiting and self.asked_at is not None:
            self.first_tokens += STARTS_A_SECOND * (now - self.asked_at)
        self.asked_at = now
        return (
            f"process_start_time_seconds {1_700_000_000 + self.life}.0\n"
            f'vllm:num_requests_running{{engine="0"}} {running}.0\n'
            f'vllm:num_requests_waiting{{engine="0"}} {self.waiting}.0\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {self.kv_usage}\n'
            f'vllm:time_to_first_token_seconds_sum{{engine="0"}} {self.first_tokens * FIRST_TOKEN_SECONDS}\n'
            f'vllm:time_to_first_token_seconds_count{{engine="0"}} {self.first_tokens // 1}\n'
        )

    async def start(self, port: int = 0, *, host: str = HOST) -> None:
        """Listen, at the port of an earlier life if it is given."""
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._cards)
        app.router.add_get("/health", self._health)
        for path in ("/tokenize", "/{path:.*}/render"):
            app.router.add_post(path, self._unknown)
        app.router.add_post("/{path:.*}", self._infer)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True, access_log=None)
        await self.runner.setup()
        await web.TCPSite(self.runner, host, port, reuse_address=True).start()
        self.address = f"{host}:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Go away: connections are refused, open requests are cut off."""
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def again(self) -> None:
        """Come back at the same address as another process."""
        self.life += 1
        host, _, port = self.address.rpartition(":")
        await self.start(int(port), host=host)

    async def _metrics(self, _: web.Request) -> web.Response:
        self.scrapes += 1
        if self.is_mute:
            await asyncio.Event().wait()
        return web.Response(text=self.metrics())

    async def _cards(self, _: web.Request) -> web.Response:
        self.asked_for_models.set()
        if self.told is not None:
            await self.told.wait()
        if self.wants_key:
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response(
            {"data": [{"id": name, "parent": None, "max_model_len": 8192} for name in self.models]}
        )

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _unknown(self, _: web.Request) -> web.StreamResponse:
        """Know no tokens, as what is no vLLM does."""
        return web.Response(status=404)

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.received.append(Received(path=request.path, headers=dict(request.headers), body=body))
        if self.refuses:
            return web.json_response(FULL, status=503)
        self.open_requests += 1
        self.first_tokens += 1
        self.most_open = max(self.most_open, self.open_requests)
        try:
            if body.get("stream"):
                return await self._stream(request, body)
            await self.released.wait()
            return web.json_response(_answer(request.path, body) | {"usage": USAGE})
        finally:
            self.open_requests -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Headers at once and the first token later, as vLLM does it."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await self.released.wait()
        event = _answer(request.path, body)
        for choice in event["choices"]:
            choice["delta"] = choice.pop("message", None)
        event["object"] = "chat.completion.chunk"
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n")
        await response.write_eof()
        return response


def _answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None}
    is_chat = path.endswith("/chat/completions")
    choice |= {"message": {"role": "assistant", "content": "yes"}} if is_chat else {"text": "yes"}
    kind = "chat.completion" if is_chat else "text_completion"
    return {"id": "an-id", "object": kind, "created": 1, "model": body.get("model"), "choices": [choice]}


@asynccontextmanager
async def held_pods(count: int, **changes: Any) -> AsyncIterator[list[HeldPod]]:
    """Start so many pods; those that are still there are stopped in the end."""
    async with AsyncExitStack() as stack:
        pods = [HeldPod(**changes) for _ in range(count)]
        for pod in pods:
            await pod.start()
            stack.push_async_callback(pod.stop)
        yield pods


async def until(condition: Callable[[], Any], *, seconds: float = 15.0) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
