"""`kvmesh indexer` as a process: signals, ports, settings."""

import asyncio
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.integration.kv_redis import RedisServer, free_port

COMMAND = (sys.executable, "-c", "from kv_indexer.cli import app; app()", "indexer", "--model", "tiny")


async def start(*options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *COMMAND, *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def is_open(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_within_a_second_and_without_a_failure(
    redis_server: RedisServer, number: signal.Signals
) -> None:
    port = free_port()
    down = f"127.0.0.1:{free_port()}"
    process = await start("--redis", redis_server.url, "--indexer-admin-port", str(port), "--endpoints", down)
    deadline = time.monotonic() + 20
    while not await is_open(port):
        assert process.returncode is None
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)

    asked_at = time.monotonic()
    process.send_signal(number)
    _, errors = await asyncio.wait_for(process.communicate(), 10)

    assert (process.returncode, b"Traceback" in errors) == (0, False)
    assert time.monotonic() - asked_at < 1.0


async def test_a_port_in_use_is_one_clear_line_and_a_failure(redis_server: RedisServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await start(
            "--redis", redis_server.url, "--indexer-admin-port", str(port), "--endpoints", "127.0.0.1:1"
        )
        _, errors = await asyncio.wait_for(process.communicate(), 20)

    assert process.returncode == 1
    assert errors.decode().splitlines()[-1] == (
        f"kvmesh indexer: port {port} on 127.0.0.1 is already in use (choose another with --indexer-admin-port)"
    )
    assert b"Traceback" not in errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--endpoints", "nowhere"), "endpoint 'nowhere' is not HOST:PORT"),
        (("--endpoints", "a:1,a:1"), "an endpoint is listed twice"),
        (("--endpoints", "a:1", "--event-sources", "{"), "event sources are not JSON"),
        (("--endpoints", "a:1", "--event-sources", '{"a:1": {"event": 1}}'), "event source of a:1"),
    ],
)
async def test_a_malformed_setting_is_named(options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    process = await start(*options)
    _, errors = await asyncio.wait_for(process.communicate(), 20)

    assert process.returncode == 2
    assert words in " ".join(errors.decode().replace("│", " ").split())
