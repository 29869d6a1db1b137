"""Pods for the hermetic cases: each says of itself what a case wants it to say, on an address of its own.

They answer GET /metrics and /v1/models in vLLM's words and no inference request: where a request goes is asked of the
picker alone.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

BASE_MODEL = "my-model"
ADAPTERS = ("foo", "bar", "sql-lora-1fdg2", "sql-lora-1fdg3")  # every pod could serve each of them


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    """What a pod reports."""

    waiting: int = 0
    kv_usage: float = 0.0  # 0..1
    running_adapters: tuple[str, ...] = ()
    adapter_slots: int = 4
    models: tuple[str, ...] = (BASE_MODEL,)
    adapters: tuple[str, ...] = ADAPTERS

    def metrics(self) -> str:
        """Return the page that vLLM 0.32 would serve, as far as routing reads it."""
        adapters = f'max_lora="{self.adapter_slots}",running_lora_adapters="{",".join(self.running_adapters)}"'
        return "\n".join(
            (
                'vllm:num_requests_running{engine="0"} 0.0',
                f'vllm:num_requests_waiting{{engine="0"}} {self.waiting}.0',
                f'vllm:kv_cache_usage_perc{{engine="0"}} {self.kv_usage}',
                f'vllm:lora_requests_info{{{adapters},waiting_lora_adapters=""}} 1.7e+09',
                "",
            )
        )

    def cards(self) -> dict[str, object]:
        """Return the page of /v1/models."""
        base = [{"id": name, "parent": None, "max_model_len": 4096} for name in self.models]
        return {"data": base + [{"id": name, "parent": self.models[0]} for name in self.adapters]}


@asynccontextmanager
async def running_pods(states: Sequence[PodState]) -> AsyncIterator[tuple[str, ...]]:
    """Serve each state at 127.0.0.1, 127.0.0.2, … and yield the addresses in the same order."""
    async with AsyncExitStack() as stack:
        yield tuple([await _start(state, f"127.0.0.{number}", stack) for number, state in enumerate(states, start=1)])


async def _start(state: PodState, host: str, stack: AsyncExitStack) -> str:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=state.metrics())

    async def models(_: web.Request) -> web.Response:
        return web.json_response(state.cards())

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, host, 0).start()
    return f"{host}:{runner.addresses[0][1]}"
