"""A picker that is told to stop behind an Envoy that lives on: no answer is cut, no request is lost on the way."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp

from operate.local.envoy_config import SocketAddress, fill_in, read_template
from operate.local.processes import find_envoy
from tests.e2e.stack import eventually, free_ports, listens, simulated_pods

HOST = "127.0.0.1"


@asynccontextmanager
async def process(*command: str, ready_port: int) -> AsyncIterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(command)
    try:
        await eventually(partial(listens, ready_port), bool)
        yield started
    finally:
        started.kill()
        started.wait(20)


async def test_a_restarting_picker_cuts_no_answer_and_refuses_no_request(tmp_path: Path) -> None:
    gateway, admin, grpc, picker_admin, no_redis = free_ports(5)
    async with simulated_pods(2) as pods:
        config = fill_in(
            read_template("local.yaml"),
            gateway=SocketAddress(host=HOST, port=gateway),
            admin=SocketAddress(host=HOST, port=admin),
            picker=SocketAddress(host=HOST, port=grpc),
            pods=[SocketAddress.parse(pod) for pod in pods],
        )
        envoy_file = tmp_path / "envoy.json"
        envoy_file.write_text(json.dumps(config), encoding="utf-8")
        picker_flags = ("--endpoints", ",".join(pods), "--redis", f"redis://{HOST}:{no_redis}/0")
        ports = ("--grpc-port", str(grpc), "--admin-port", str(picker_admin))
        picker_command = (sys.executable, "-m", "operate", "extproc", *picker_flags, *ports, "--drain-seconds", "0.5")
        envoy_command = (str(find_envoy()), "-c", str(envoy_file), "--disable-hot-restart", "--log-level", "error")
        async with (
            process(*picker_command, ready_port=grpc) as picker,
            process(*envoy_command, ready_port=gateway),
            aiohttp.ClientSession(base_url=f"http://{HOST}:{gateway}") as http,
        ):

            async def routed() -> int:
                async with http.get("/health") as response:
                    return response.status

            await eventually(routed, lambda status: status == 200)
            body = {"model": "tiny", "prompt": "The sea", "max_tokens": 400, "ignore_eos": True, "stream": True}
            async with http.post("/v1/completions", json=body) as answer:
                await answer.content.readline()
                picker.send_signal(signal.SIGTERM)
                assert await routed() == 200  # while it drains
                assert await asyncio.to_thread(picker.wait, 20) == 0
                lines = (await answer.content.read()).decode().split("\n\n")
            assert lines[-2:] == ["data: [DONE]", ""]
            assert sum('"text"' in line for line in lines) >= 399
            async with process(*picker_command, ready_port=grpc):
                await eventually(routed, lambda status: status == 200)
