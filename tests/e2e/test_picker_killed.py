"""What becomes of the answers under way when a picker is killed behind a real Envoy that lives on: docs/limits.md."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from operate.local.envoy_config import SocketAddress, named
from tests.e2e.stack import eventually, free_ports, is_running, kill, listens, running_stack, simulated_pods
from tests.integration.envoy_process import running_envoy

HOST = "127.0.0.1"
TOKENS = 300
AWAY_SECONDS = 1.0
KILLS = 5  # at most
LAST = "data: [DONE]"
DESTINATION = "x-gateway-destination-endpoint"
PICKER = "envoy.filters.http.ext_proc.kvmesh"

Change = Callable[[dict[str, Any]], None]


def as_it_is(_: dict[str, Any]) -> None:
    """Change nothing."""


def failing_open(config: dict[str, Any]) -> None:
    """Have Envoy go on without a picker that is lost, which it cannot once a byte of a body was streamed."""
    (chain,) = config["static_resources"]["listeners"][0]["filter_chains"]
    manager = chain["filters"][0]["typed_config"]
    named(manager["http_filters"], PICKER)["typed_config"]["failure_mode_allow"] = True


@asynccontextmanager
async def picker(pods: Iterable[str], *, port: int) -> AsyncIterator["subprocess.Popen[bytes]"]:
    admin, no_redis = free_ports(2)
    flags = ("--endpoints", ",".join(pods), "--redis", f"redis://{HOST}:{no_redis}/0", "--sample-share", "0")
    ports = ("--grpc-port", str(port), "--admin-port", str(admin))
    started = subprocess.Popen((sys.executable, "-m", "operate", "extproc", *flags, *ports))
    try:
        await eventually(partial(listens, port), bool)
        yield started
    finally:
        started.kill()
        started.wait(20)


@pytest.mark.parametrize(
    ("file", "change", "goes_on"),
    [
        pytest.param("local.yaml", as_it_is, False, id="streamed"),
        pytest.param("local.yaml", failing_open, False, id="streamed, failing open"),
        pytest.param("buffered.yaml", as_it_is, True, id="buffered"),
    ],
)
async def test_a_picker_that_is_killed_cuts_the_streams_under_way_unless_envoy_buffers(
    tmp_path: Path, file: str, change: Change, goes_on: bool
) -> None:
    (port,) = free_ports(1)
    async with (
        simulated_pods(2) as pods,
        picker(pods, port=port) as killed,
        running_envoy(
            tmp_path,
            file=file,
            picker_port=port,
            pods=[SocketAddress.parse(pod) for pod in pods],
            change=change,
        ) as envoy,
        aiohttp.ClientSession(base_url=envoy.gateway) as http,
    ):

        async def routed() -> int:
            async with http.get("/health") as response:
                return response.status

        await eventually(routed, lambda status: status == 200)
        body = {"model": "tiny", "prompt": "The sea", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        async with http.post("/v1/completions", json=body) as answer:
            assert answer.status == 200
            first = await answer.content.readline()
            killed.kill()
            await asyncio.to_thread(killed.wait, 20)
            rest, was_cut = b"", False
            try:
                rest = await answer.content.read()
            except aiohttp.ClientPayloadError:
                was_cut = True
            if change is as_it_is:  # all files fail closed: nobody has picked for these, nor can a client
                async with http.post("/v1/completions", json=body | {"max_tokens": 1}) as refused:
                    assert refused.status == 503
                async with http.get("/health", headers={DESTINATION: next(iter(pods))}) as refused:
                    assert refused.status == 503
        lines = (first + rest).decode().split("\n\n")
        assert was_cut is not goes_on
        if goes_on:
            assert lines[-2:] == [LAST, ""]
            assert sum('"text"' in line for line in lines) == TOKENS


@pytest.mark.parametrize(("mode", "goes_on"), [("duplex", False), ("buffered", True)])
async def test_kvmesh_up_has_a_killed_picker_back_at_once(tmp_path: Path, mode: str, goes_on: bool) -> None:
    async with running_stack(tmp_path, "--body-mode", mode, pods=2) as stack:
        pickers, seconds = [stack.picker], []

        async def status() -> int:
            return (await stack.send("GET", "/health")).status

        async def killed_runs() -> bool:
            return is_running(pickers[-1])

        async def kill_picker() -> None:
            kill(pickers[-1])
            killed_at = time.monotonic()
            await eventually(killed_runs, lambda runs: not runs)
            await eventually(status, lambda found: found == 200)
            seconds.append(time.monotonic() - killed_at)
            pickers.append(stack.picker)

        url = f"{stack.ready['gateway']}/v1/completions"
        body = {"model": "tiny", "prompt": "The sea", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        async with stack.http.post(url, json=body) as answer:
            first = await answer.content.readline()
            await kill_picker()
            with nullcontext() if goes_on else pytest.raises(aiohttp.ClientPayloadError):
                lines = (first + await answer.content.read()).decode().split("\n\n")
                assert lines[-2:] == [LAST, ""]
                assert sum('"text"' in line for line in lines) == TOKENS
        # again if other work was in its way
        while len(seconds) < 2 or (min(seconds) >= AWAY_SECONDS and len(seconds) < KILLS):
            await kill_picker()
        print("away for", [f"{each:.3f} s" for each in seconds])
        assert min(seconds) < AWAY_SECONDS
        assert stack.process.poll() is None
        stack.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(stack.process.wait, 20) == 0
        assert not [pid for pid in (*stack.ready["pids"].values(), *pickers) if is_running(pid)]
        addresses = [
            stack.ready["extproc"],
            *(stack.ready[name].removeprefix("http://") for name in ("gateway", "admin")),
        ]
        assert not [address for address in addresses if await listens(int(address.rpartition(":")[2]))]
