"""A process that dies is started again by one that has loaded its modules: with real processes and signals."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from extproc.cli import MOST_DEATHS
from tests.e2e.stack import eventually, free_ports

WITHIN_SECONDS = 60.0
PROGRAM = """
import ctypes, os, signal, sys, time
from extproc.cli import fork_until_it_ends
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: it inherits what others leave behind, as a first process does
fork_until_it_ends()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(os.getpid(), flush=True)
{code}
"""
SERVE = "while True: signal.pause()"


@asynccontextmanager
async def parent_of(code: str) -> AsyncIterator[Process]:
    """Run the program; its children print their process ids."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM.format(code=code), stdout=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def next_child(process: Process) -> int:
    assert process.stdout is not None
    return int(await asyncio.wait_for(process.stdout.readline(), WITHIN_SECONDS))


async def ended(process: Process) -> int:
    return await asyncio.wait_for(process.wait(), WITHIN_SECONDS)


def is_there(pid: int) -> bool:
    """Tell whether the process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_what_is_killed_is_started_again_and_what_is_told_to_stop_is_not() -> None:
    async with parent_of(SERVE) as process:
        first = await next_child(process)
        os.kill(first, signal.SIGKILL)
        second = await next_child(process)
        assert second != first
        process.terminate()
        assert await ended(process) == 0
        assert not is_there(second)


async def test_wrong_usage_and_a_good_end_are_the_end() -> None:
    for code in (0, 2):
        async with parent_of(f"sys.exit({code})") as process:
            await next_child(process)
            assert await ended(process) == code
            assert process.stdout is not None
            assert await process.stdout.read() == b""


async def test_what_always_dies_is_left_to_whoever_supervises_the_container() -> None:
    async with parent_of("os.kill(os.getpid(), signal.SIGSEGV)") as process:
        assert await ended(process) == 128 + signal.SIGSEGV
        assert process.stdout is not None
        assert len((await process.stdout.read()).split()) == MOST_DEATHS + 1


async def test_the_child_ends_with_its_parent() -> None:
    async with parent_of(SERVE) as process:
        child = await next_child(process)
        process.kill()
        await ended(process)

        async def gone() -> bool:
            return not is_there(child)

        await eventually(gone, bool)


async def test_what_others_leave_behind_is_no_zombie() -> None:
    leave_behind = """
if os.fork() == 0:
    if (orphan := os.fork()) > 0:
        print(orphan, flush=True)
    os._exit(0)
os.wait()
"""
    async with parent_of(leave_behind + SERVE) as process:
        await next_child(process)
        orphan = await next_child(process)

        async def gone() -> bool:
            return not Path(f"/proc/{orphan}").exists()

        await eventually(gone, bool)


async def test_a_picker_that_is_killed_is_ready_again(tmp_path: Path) -> None:
    grpc, admin, pod, no_redis = free_ports(4)
    flags = ("--endpoints", f"127.0.0.1:{pod}", "--redis", f"redis://127.0.0.1:{no_redis}/0", "--respawn")
    ports = ("--grpc-port", str(grpc), "--admin-port", str(admin))
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "operate", "extproc", *flags, *ports)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{admin}") as http:

            async def ready() -> bool:
                try:
                    async with http.get("/readyz") as response:
                        return response.status == 200
                except aiohttp.ClientError:
                    return False

            await eventually(ready, bool)
            first = int(children.read_text(encoding="ascii"))
            os.kill(first, signal.SIGKILL)

            async def another() -> bool:
                return children.read_text(encoding="ascii").split() not in ([], [str(first)])

            await eventually(another, bool)
            await eventually(ready, bool)
        process.terminate()
        assert await ended(process) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
