"""What becomes of the answers under way when a picker is killed behind a real Envoy that lives on: docs/limits.md."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.local.envoy_config import SocketAddress, named
from tests.e2e.stack import eventually, free_ports, listens, simulated_pods
from tests.integration.envoy_process import running_envoy

HOST = "127.0.0.1"
TOKENS = 300
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
    started = subprocess.Popen((sys.executable, "-m", "extproc", "extproc", *flags, *ports))
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
            async with http.get("/v1/models") as response:
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
                async with http.get("/v1/models", headers={DESTINATION: next(iter(pods))}) as refused:
                    assert refused.status == 503
        lines = (first + rest).decode().split("\n\n")
        assert was_cut is not goes_on
        if goes_on:
            assert lines[-2:] == [LAST, ""]
            assert sum('"text"' in line for line in lines) == TOKENS
