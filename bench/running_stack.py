"""Starts `kvmesh up` for a measurement, as a user would, and ends it."""

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from operate.local.ports import pick_free_port

HOST = "127.0.0.1"
FIXED_PORTS = 5  # of gateway, picker and indexer; the pods' come after them
START_SECONDS = 60.0
END_SECONDS = 20.0
POLL_SECONDS = 0.1
PR_SET_PDEATHSIG = 1  # linux/prctl.h

_libc = ctypes.CDLL(None, use_errno=True)


@asynccontextmanager
async def running_stack(
    *, directory: Path, pods: int, simulator: Mapping[str, object]
) -> AsyncIterator[dict[str, Any]]:
    """The content of the ready file of a stack on free ports; `simulator` are settings of `kvmesh sim`."""
    ready_file, config_file = directory / "ready.json", directory / "kvmesh.yaml"
    config_file.write_text(json.dumps(dict(simulator)))  # JSON is YAML
    process = await start_module(
        *("operate", "up", "--no-live", "--log-level", "warning"),
        *("--config", str(config_file), "--ready-file", str(ready_file), "--pods", str(pods)),
        *port_flags(pods),
    )
    try:
        yield await facts_of(process, ready_file)
    finally:
        await end_process(process)


async def start_module(module: str, *flags: str) -> asyncio.subprocess.Process:
    """Start `python -m module`; it ends when this process does."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *flags),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal reaches the bench alone, which then ends it
        preexec_fn=partial(_end_with, os.getpid()),
    )


async def facts_of(process: asyncio.subprocess.Process, ready_file: Path) -> dict[str, Any]:
    """Wait until a stack is ready; return the content of its ready file."""
    await _until_ready(process, ready_file)
    facts: dict[str, Any] = json.loads(ready_file.read_text())
    parent = facts["pids"]["extproc"]  # only waits for the death of the one that picks
    facts["pids"]["extproc"] = int(Path(f"/proc/{parent}/task/{parent}/children").read_text())
    return facts


def port_flags(pods: int) -> tuple[str, ...]:
    """Free ports, so that a measurement does not collide with a demo; `pods` are simulated ones, if any."""
    return "--port-base", str(pick_free_port(host=HOST, avoid=(), count=FIXED_PORTS + pods))


async def end_process(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, and SIGKILL after `END_SECONDS`: the kernel then ends its children too."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _end_with(parent_pid: int) -> None:
    """Runs in the child before exec: it is told to end when the bench dies, however that comes about."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


async def _until_ready(process: asyncio.subprocess.Process, ready_file: Path) -> None:
    async with asyncio.timeout(START_SECONDS):
        while not ready_file.exists():
            if process.returncode is not None:
                raise SystemExit(f"kvmesh up ended with exit code {process.returncode} before it was ready")
            await asyncio.sleep(POLL_SECONDS)
