"""Child processes of a run: started, waited for, killed and started again, and all ended in the end.

Unlike the supervisor of `kvmesh up` it does not mind a child's end: some are killed on purpose. Linux only.
"""

import asyncio
import ctypes
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from operate.local.errors import NotReadyError
from operate.local.processes import Condition, wait_until_ready

READY_SECONDS = 60.0
GRACE_SECONDS = 4.0
LAST_LINES = 15
PR_SET_PDEATHSIG = 1  # linux/prctl.h

_libc = ctypes.CDLL(None, use_errno=True)


class Children:
    """The processes of one stack, by name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: dict[str, Process] = {}
        self._retired: list[Process] = []

    @property
    def pids(self) -> dict[str, int]:
        """Of those that have not ended."""
        return {name: process.pid for name, process in self._processes.items() if process.returncode is None}

    async def start(
        self, name: str, argv: Sequence[str], *, environment: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        """Start a child; its output goes to a file that `until_ready` quotes."""
        if name in self._processes:
            self._retired.append(self._processes[name])
        with self._log(name).open("ab") as log:
            self._processes[name] = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(environment or {})},
                cwd=cwd,
                start_new_session=True,  # one group to end; Ctrl-C reaches the bench alone
                preexec_fn=partial(_die_with, os.getpid()),
            )

    async def until_ready(self, name: str, condition: Condition) -> None:
        """Return once the condition holds; SystemExit with the child's last words otherwise."""
        waiting = asyncio.ensure_future(wait_until_ready(condition, name=name, within_seconds=READY_SECONDS))
        ended = asyncio.ensure_future(self._processes[name].wait())
        try:
            done, _ = await asyncio.wait({waiting, ended}, return_when=asyncio.FIRST_COMPLETED)
            if waiting not in done:
                raise SystemExit(f"{name} ended with {ended.result()}:\n{self._last_words(name)}")
            await waiting
        except NotReadyError as error:
            raise SystemExit(f"{error.message}\n{self._last_words(name)}") from None
        finally:
            waiting.cancel()
            ended.cancel()

    async def kill(self, name: str) -> None:
        """End a child as a crash would."""
        with suppress(ProcessLookupError):
            os.killpg(self._processes[name].pid, signal.SIGKILL)
        await self._processes[name].wait()

    async def end_all(self) -> None:
        """TERM to every group, KILL to what is left after the grace time."""
        processes = [*self._processes.values(), *self._retired]
        for process in processes:
            _signal_group(process, signal.SIGTERM)
        exits = [asyncio.ensure_future(process.wait()) for process in processes]
        if exits:
            await asyncio.wait(exits, timeout=GRACE_SECONDS)
        for process in processes:
            _signal_group(process, signal.SIGKILL)
        await asyncio.gather(*exits)

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def _last_words(self, name: str) -> str:
        return "\n".join(self._log(name).read_text(errors="replace").splitlines()[-LAST_LINES:])


def _signal_group(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _die_with(parent_pid: int) -> None:
    """Runs in the child before exec: the kernel kills it when the bench dies."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
