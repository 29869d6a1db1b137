"""The command `sim` as a process of its own."""

import asyncio
import json
import signal
import socket
import sys
import urllib.request
from pathlib import Path

import aiohttp
import pytest

CHECKOUT = Path(__file__).parents[3]
DEADLINE_SECONDS = 20.0


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "podsim", *arguments),
        cwd=CHECKOUT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def wait_for_line(process: asyncio.subprocess.Process, text: str) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE_SECONDS):
        while line := (await process.stdout.readline()).decode():
            if text in line:
                return line
    raise AssertionError(f"the process ended without saying {text!r}")


async def kill(process: asyncio.subprocess.Process) -> None:
    process.kill()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await process.wait()


async def run(*arguments: str) -> tuple[int, str]:
    process = await start(*arguments)
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            await kill(process)
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_pods_serve_until_a_signal_and_then_end_at_once_and_cleanly() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        process = await start("--sim-port", "0", "--pods", "2", "--model", "m")
        try:
            line = await wait_for_line(process, "serves m")
            address = line.split("pod ")[1].split(" ")[0]
            models = await asyncio.to_thread(read_json, f"http://{address}/v1/models")
            assert models["data"][0]["id"] == "m"
            process.send_signal(number)
            async with asyncio.timeout(5):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                await kill(process)


def read_json(url: str) -> dict[str, list[dict[str, str]]]:
    with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as response:
        content: dict[str, list[dict[str, str]]] = json.load(response)
        return content


async def test_a_signal_cuts_off_the_answers_in_progress() -> None:
    process = await start("--sim-port", "0", "--inter-token-ms", "1000")
    try:
        line = await wait_for_line(process, "serves")
        url = f"http://{line.split('pod ')[1].split(' ')[0]}/v1/completions"
        async with aiohttp.ClientSession() as session:
            body = {"prompt": "abc", "max_tokens": 1000, "ignore_eos": True}
            whole = asyncio.create_task(session.post(url, json=body))
            streamed = await session.post(url, json={**body, "stream": True})
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(5):
                assert await process.wait() == 0
            for request in (whole, streamed.read()):
                with pytest.raises(aiohttp.ClientError):
                    await request
    finally:
        if process.returncode is None:
            await kill(process)


async def test_a_port_in_use_is_one_line_that_names_it_and_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = await run("--sim-port", str(port))
        assert code == 2
        assert output.splitlines() == [f"podsim: cannot listen on 127.0.0.1:{port}: Address already in use"]


async def test_an_events_port_in_use_is_one_line_that_names_it_and_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = await run("--sim-port", "0", "--events-port", str(port))
        assert code == 2
        assert output.splitlines() == [f"podsim: cannot bind 127.0.0.1:{port} for KV events: Address already in use"]


async def test_ports_that_do_not_exist_are_one_line_and_a_failure() -> None:
    code, output = await run("--sim-port", "65535", "--pods", "2")
    assert (code, output) == (1, "podsim: sim-port 65535 leaves no ports for 2 pods: lower one of them\n")


async def test_settings_that_contradict_each_other_are_one_line_and_a_failure() -> None:
    code, output = await run("--kv-blocks", "10", "--max-model-len", "1000")
    assert code == 1
    assert output.splitlines() == [
        "podsim: max-model-len 1000 does not fit into the KV cache of 144 tokens: "
        "raise kv-blocks or lower max-model-len"
    ]


async def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    code, output = await run("--tokenizer", str(tmp_path))
    assert (code, f"podsim: no tokenizer in {tmp_path}" in output) == (1, True)
