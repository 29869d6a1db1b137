"""Envoy's retries stay among the pods that may serve a request."""

from contextlib import AsyncExitStack
from pathlib import Path

from aiohttp import web

from tests.e2e.echo_pod import MODEL, echo_pod
from tests.e2e.stack import eventually, free_ports, running_stack

SLOW_SCRAPE_MS = 60_000  # the picker learns of the death from Envoy alone


async def test_a_retry_never_reaches_a_prefill_pod(tmp_path: Path) -> None:
    reached: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/completions":
            reached.append(request.host)
        return web.json_response({})

    decode, prefill = (f"127.0.0.1:{port}" for port in free_ports(2))
    settings = f"roles: {prefill}=prefill\nscrape_interval_ms: {SLOW_SCRAPE_MS}\npolicy: {{}}\n"
    async with AsyncExitStack() as pods:
        await pods.enter_async_context(echo_pod("127.0.0.1", int(prefill.rpartition(":")[2]), answer))
        dying = await pods.enter_async_context(AsyncExitStack())
        await dying.enter_async_context(echo_pod("127.0.0.1", int(decode.rpartition(":")[2]), answer))
        stack = await pods.enter_async_context(
            running_stack(tmp_path, "--model", MODEL, settings=settings, endpoints=[decode, prefill])
        )
        await eventually(stack.state, lambda state: all(pod["state"] == "ready" for pod in state["endpoints"]))
        served = await stack.complete("some prompt", model=MODEL)
        assert (served.status, len(reached)) == (200, 1)
        await dying.aclose()
        refused = await stack.complete("some prompt", model=MODEL)
        assert (refused.status, len(reached)) == (503, 1)
