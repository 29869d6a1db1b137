"""The supervisor of `kvmesh up` with real child processes."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from operate.local.errors import ChildEndedError, MissingProgramError, NotReadyError
from operate.local.ports import pick_free_port
from operate.local.processes import HttpReady, ProcessSpec, Supervisor

HOST = "127.0.0.1"
DEADLINE_SECONDS = 20.0
SLEEP = "import time; print('here', flush=True); time.sleep(600)"
IGNORE_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True);" + SLEEP
LISTEN = (
    "from http.server import HTTPServer, SimpleHTTPRequestHandler;"
    "HTTPServer(('127.0.0.1', {port}), SimpleHTTPRequestHandler).serve_forever()"
)
WITH_GRANDCHILD = (
    "import subprocess, sys, time;"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "open({path!r}, 'w').write(str(p.pid)); time.sleep(600)"
)


def child(name: str, code: str, *, ready: tuple[HttpReady, ...] = (), within: float = 10.0) -> ProcessSpec:
    return ProcessSpec(name=name, argv=(sys.executable, "-S", "-c", code), ready=ready, ready_within_seconds=within)


def is_alive(pid: int) -> bool:
    """A zombie counts as alive: it has not been reaped."""
    return Path(f"/proc/{pid}").exists()


async def until(condition: object, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"waited too long for: {what}"
        await asyncio.sleep(0.01)


async def run_until_ready(
    supervisor: Supervisor, stages: Sequence[Sequence[ProcessSpec]], *, ready: asyncio.Event
) -> None:
    """Run the stages; set `ready` when all are; go on until cancelled."""

    async def when_ready() -> None:
        ready.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(DEADLINE_SECONDS):
        await supervisor.run(stages, environment=os.environ, when_ready=when_ready)


async def test_children_that_are_ready_are_reported_with_their_pids_and_ended_when_the_run_is_over(
    tmp_path: Path,
) -> None:
    supervisor = Supervisor(log_directory=tmp_path)
    seen: dict[str, int] = {}

    async def when_ready() -> None:
        seen.update(supervisor.pids)
        assert all(is_alive(pid) for pid in seen.values())

    await supervisor.run(
        [[child("one", SLEEP), child("two", SLEEP)], [child("three", SLEEP)]],
        environment=os.environ,
        when_ready=when_ready,
    )

    assert list(seen) == ["one", "two", "three"]
    assert [name for name, pid in seen.items() if is_alive(pid)] == []


async def test_a_stage_starts_only_when_the_one_before_is_ready(tmp_path: Path) -> None:
    port = pick_free_port(host=HOST, avoid=())
    waits = "import socket; socket.create_connection(('127.0.0.1', {port})); print('reached', flush=True);" + SLEEP
    supervisor = Supervisor(log_directory=tmp_path)

    async def when_ready() -> None:
        log = tmp_path / "client.log"
        await until(lambda: b"reached" in log.read_bytes(), "the client's connection")

    await supervisor.run(
        [
            [child("server", LISTEN.format(port=port), ready=(HttpReady(url=f"http://{HOST}:{port}/"),))],
            [child("client", waits.format(port=port))],
        ],
        environment=os.environ,
        when_ready=when_ready,
    )


async def test_a_child_that_dies_is_named_with_its_exit_code_and_last_words_and_the_others_end(tmp_path: Path) -> None:
    supervisor = Supervisor(log_directory=tmp_path)
    dying = "import sys; print('first'); print('cannot go on', file=sys.stderr); sys.exit(7)"

    with pytest.raises(ChildEndedError) as raised:
        await run_until_ready(supervisor, [[child("steady", SLEEP)], [child("weak", dying)]], ready=asyncio.Event())

    assert raised.value.message == "weak ended with exit code 7"
    assert set(raised.value.log_lines) == {"first", "cannot go on"}
    assert [name for name, pid in supervisor.pids.items() if is_alive(pid)] == []


async def test_a_child_that_is_killed_while_the_stack_runs_ends_it_and_the_signal_is_named(tmp_path: Path) -> None:
    supervisor = Supervisor(log_directory=tmp_path)
    ready = asyncio.Event()
    run = asyncio.create_task(
        run_until_ready(supervisor, [[child("steady", SLEEP), child("victim", SLEEP)]], ready=ready)
    )
    async with asyncio.timeout(DEADLINE_SECONDS):
        await ready.wait()

    os.kill(supervisor.pids["victim"], signal.SIGKILL)

    with pytest.raises(ChildEndedError) as raised:
        await run

    assert raised.value.message == "victim was killed by SIGKILL"
    assert [name for name, pid in supervisor.pids.items() if is_alive(pid)] == []


async def test_a_child_that_may_be_killed_is_started_again_and_both_are_told(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    supervisor = Supervisor(log_directory=tmp_path, tell=lambda *what: told.append(what))
    ready = asyncio.Event()
    stages = [[child("steady", SLEEP), replace(child("victim", SLEEP), restart_seconds=0.05)]]
    run = asyncio.create_task(run_until_ready(supervisor, stages, ready=ready))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await ready.wait()
    steady, first = supervisor.pids["steady"], supervisor.pids["victim"]

    async def written(times: int) -> None:
        await until(lambda: (tmp_path / "victim.log").read_text() == "here\n" * times, f"{times} lines in its log")

    for number in (1, 2):
        await written(number)
        os.kill(supervisor.pids["victim"], signal.SIGKILL)
        await until(lambda: len(told) == 2 * number, "the end and the new start to be told")  # noqa: B023

    second = supervisor.pids["victim"]
    assert told[0] == ("victim", "was killed by SIGKILL and starts again in 0.05 s")
    assert told[3] == ("victim", f"is ready again, as process {second}")
    assert supervisor.running == {"steady": steady, "victim": second}
    assert second != first
    await written(3)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert [pid for pid in (steady, first, second) if is_alive(pid)] == []


async def test_a_child_that_was_told_to_end_is_started_again_too(tmp_path: Path) -> None:
    told: list[str] = []
    supervisor = Supervisor(log_directory=tmp_path, tell=lambda _, what: told.append(what))
    ready = asyncio.Event()
    obedient = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); " + SLEEP
    stages = [[replace(child("victim", obedient), restart_seconds=0.05)]]
    run = asyncio.create_task(run_until_ready(supervisor, stages, ready=ready))
    await until(lambda: ready.is_set() and "here" in (tmp_path / "victim.log").read_text(), "its first words")

    os.kill(supervisor.pids["victim"], signal.SIGTERM)

    await until(lambda: len(told) == 2, "the end and the new start to be told")
    assert told[0] == "ended with exit code 0 and starts again in 0.05 s"
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


async def test_a_child_that_is_away_does_not_count_as_running(tmp_path: Path) -> None:
    told: list[str] = []
    supervisor = Supervisor(log_directory=tmp_path, tell=lambda _, what: told.append(what))
    ready = asyncio.Event()
    stages = [[replace(child("victim", SLEEP), restart_seconds=600.0)]]
    run = asyncio.create_task(run_until_ready(supervisor, stages, ready=ready))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await ready.wait()

    os.kill(supervisor.pids["victim"], signal.SIGKILL)

    await until(lambda: told, "the end to be told")
    assert supervisor.running == {}
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


@pytest.mark.parametrize("is_killed_first", [False, True], ids=["at once", "when it is started again"])
async def test_a_child_that_ends_by_itself_ends_the_run_though_it_may_be_killed(
    tmp_path: Path, is_killed_first: bool
) -> None:
    supervisor = Supervisor(log_directory=tmp_path)
    ready, mark = asyncio.Event(), tmp_path / "mark"
    if is_killed_first:
        mark.touch()
    once = f"import os, sys; os.path.exists({str(mark)!r}) or sys.exit(7); os.unlink({str(mark)!r}); " + SLEEP
    stages = [[replace(child("victim", once), restart_seconds=0.05)]]
    run = asyncio.create_task(run_until_ready(supervisor, stages, ready=ready))
    if is_killed_first:
        await until(lambda: "victim" in supervisor.pids and not mark.exists(), "the first one to run")
        os.kill(supervisor.pids["victim"], signal.SIGKILL)

    with pytest.raises(ChildEndedError, match="victim ended with exit code 7"):
        await run


async def test_a_child_that_ignores_term_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    supervisor = Supervisor(log_directory=tmp_path, grace_seconds=0.2)
    log = tmp_path / "deaf.log"

    async def when_ready() -> None:
        await until(lambda: b"deaf" in log.read_bytes(), "the child to ignore TERM")

    await supervisor.run([[child("deaf", IGNORE_TERM)]], environment=os.environ, when_ready=when_ready)

    assert not is_alive(supervisor.pids["deaf"])


async def test_what_a_child_has_started_itself_ends_with_it(tmp_path: Path) -> None:
    note = tmp_path / "grandchild"
    supervisor = Supervisor(log_directory=tmp_path)

    async def when_ready() -> None:
        await until(lambda: note.exists() and note.read_text() != "", "the grandchild")

    await supervisor.run(
        [[child("parent", WITH_GRANDCHILD.format(path=str(note)))]], environment=os.environ, when_ready=when_ready
    )

    grandchild = int(note.read_text())
    await until(lambda: not is_alive(grandchild) or is_zombie(grandchild), "the end of the grandchild")


def is_zombie(pid: int) -> bool:
    """An orphan waits for process 1 to reap it; that is not ours to do."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_a_child_that_does_not_become_ready_is_named_with_what_was_asked(tmp_path: Path) -> None:
    port = pick_free_port(host=HOST, avoid=())
    url = f"http://{HOST}:{port}/readyz"
    supervisor = Supervisor(log_directory=tmp_path)

    with pytest.raises(NotReadyError) as raised:
        await run_until_ready(
            supervisor, [[child("slow", SLEEP, ready=(HttpReady(url=url),), within=0.5)]], ready=asyncio.Event()
        )

    assert raised.value.message.startswith(f"slow was not ready within 0.5 s (GET {url}: ")
    assert [name for name, pid in supervisor.pids.items() if is_alive(pid)] == []


async def test_a_program_that_does_not_exist_is_named_and_what_was_started_ends(tmp_path: Path) -> None:
    supervisor = Supervisor(log_directory=tmp_path)
    missing = ProcessSpec(name="envoy", argv=("/nonexistent/envoy",))

    with pytest.raises(MissingProgramError, match=r"^envoy cannot be started: /nonexistent/envoy: No such file"):
        await run_until_ready(supervisor, [[child("steady", SLEEP), missing]], ready=asyncio.Event())

    assert [name for name, pid in supervisor.pids.items() if is_alive(pid)] == []


async def test_cancelling_the_run_ends_the_children(tmp_path: Path) -> None:
    supervisor = Supervisor(log_directory=tmp_path)
    ready = asyncio.Event()
    run = asyncio.create_task(run_until_ready(supervisor, [[child("one", SLEEP)]], ready=ready))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await ready.wait()

    run.cancel()

    with pytest.raises(asyncio.CancelledError):
        await run
    assert not is_alive(supervisor.pids["one"])


async def test_the_children_die_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    script = f"""
import asyncio, os
from pathlib import Path
from operate.local.processes import ProcessSpec, Supervisor

async def main():
    supervisor = Supervisor(log_directory=Path({str(tmp_path)!r}))
    async def when_ready():
        Path({str(note)!r} + ".tmp").write_text(" ".join(str(pid) for pid in supervisor.pids.values()))
        os.replace({str(note)!r} + ".tmp", {str(note)!r})
        await asyncio.Event().wait()
    deaf = ProcessSpec(name="deaf", argv=({sys.executable!r}, "-S", "-c", {IGNORE_TERM!r}))
    await supervisor.run([[deaf, ProcessSpec(name="two", argv=("/bin/sleep", "600"))]],
        environment=os.environ, when_ready=when_ready)

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    try:
        await until(note.exists, "the supervisor to be ready")
        pids = [int(pid) for pid in note.read_text().split()]
        assert len(pids) == 2
    finally:
        process.kill()
        async with asyncio.timeout(DEADLINE_SECONDS):
            await process.wait()

    await until(lambda: all(is_zombie(pid) for pid in pids), "the end of the orphans")


async def test_children_that_start_while_grpc_works_run_none_of_its_handlers_for_forks(tmp_path: Path) -> None:
    script = f"""
import asyncio, os, socket
from pathlib import Path
from operate.local.processes import ProcessSpec, Supervisor
from operate.local.processes import GrpcReady, wait_until_ready

async def main():
    async def when_ready():
        pass
    silent = socket.create_server(("{HOST}", 0))
    address = "{HOST}:" + str(silent.getsockname()[1])
    waiting = asyncio.create_task(wait_until_ready(GrpcReady(address=address), name="it", within_seconds=60))
    asked = await asyncio.to_thread(silent.accept)
    for _ in range(10):
        child = ProcessSpec(name="child", argv=("/bin/sleep", "600"))
        supervisor = Supervisor(log_directory=Path({str(tmp_path)!r}))
        await supervisor.run([[child]], environment=os.environ, when_ready=when_ready)
    assert not waiting.done()
    waiting.cancel()

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script),
        env={name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()

    assert (process.returncode, output.decode()) == (0, "")  # it says so when it skips its handlers
