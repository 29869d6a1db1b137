"""`kvmesh indexer` as a process: signals, ports, settings."""

import asyncio
import signal
import socket
import sys
import time

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
async def test_a_signal_ends_it_without_a_failure(redis_server: RedisServer, number: signal.Signals) -> None:
    port = free_port()
    down = f"127.0.0.1:{free_port()}"
    process = await start(
        *("--redis", redis_server.url, "--indexer-admin-port", str(port), "--endpoints", down, "--event-sources", "")
    )
    deadline = time.monotonic() + 20
    while not await is_open(port):
        assert process.returncode is None
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)

    process.send_signal(number)
    _, errors = await asyncio.wait_for(process.communicate(), 10)

    assert (process.returncode, b"Traceback" in errors) == (0, False)


async def test_a_port_in_use_is_one_clear_line_and_wrong_usage(redis_server: RedisServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await start(
            "--redis", redis_server.url, "--indexer-admin-port", str(port), "--endpoints", "127.0.0.1:1"
        )
        _, errors = await asyncio.wait_for(process.communicate(), 20)

    assert (process.returncode, errors.decode()) == (
        2,
        f"kvmesh indexer: port {port} on 127.0.0.1 is already in use (choose another with --indexer-admin-port)\n",
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--endpoints", "nowhere"), "endpoint 'nowhere' is not HOST:PORT"),
        (("--endpoints", "a:1,a:1"), "an endpoint is listed twice"),
        (("--endpoints", "a:1", "--event-sources", "{"), "event sources are not JSON"),
        (("--endpoints", "a:1", "--event-sources", '{"a:1": {"event": 1}}'), "event source of a:1"),
        (("--endpoints", "a:1", "--redis", "foo"), "Redis address 'foo': it must begin with redis://"),
        (("--endpoints", "a:1", "--redis", "http://x"), "Redis address 'http://x': it must begin with redis://"),
        (("--endpoints", "a:1", "--redis", "redis://:s3cret@h:port"), "Redis address 'redis://***@h:port': its port"),
        (("--endpoints", "a:1", "--host", "203.0.113.1"), "cannot listen on '203.0.113.1', port 9091: "),
        (("--endpoints", "a:1", "--host", "no..host"), "cannot listen on 'no..host', port 9091: "),
    ],
)
async def test_a_setting_that_cannot_be_is_one_line_and_wrong_usage(options: tuple[str, ...], words: str) -> None:
    process = await start(*options)
    _, errors = await asyncio.wait_for(process.communicate(), 20)

    assert process.returncode == 2
    assert errors.decode().startswith(f"kvmesh indexer: {words}")
    assert errors.count(b"\n") == 1


@pytest.mark.parametrize("option", [("--indexer-admin-port", "70000"), ("--lease-seconds", "0.5")])
async def test_a_number_that_cannot_be_is_refused(option: tuple[str, str]) -> None:
    process = await start("--endpoints", "a:1", *option)
    _, errors = await asyncio.wait_for(process.communicate(), 20)

    assert process.returncode == 2
    assert f"Invalid value for '{option[0]}'" in errors.decode()
