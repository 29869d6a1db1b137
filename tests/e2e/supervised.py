"""Processes of a test: started together, ended with the block."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from operate.local.envoy_config import SocketAddress
from operate.local.processes import HttpReady, ProcessSpec, Supervisor, find_envoy

HOST = "127.0.0.1"
START_SECONDS = 60.0
END_SECONDS = 30.0
SHOWN_UPSTREAM = {  # tells a test who served
    "header": {"key": "x-kvmesh-upstream", "value": "%UPSTREAM_REMOTE_ADDRESS%"},
    "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
}


def address(of: SocketAddress) -> dict[str, Any]:
    """Write an address as Envoy reads it."""
    return {"socket_address": {"address": of.host, "port_value": of.port}}


@asynccontextmanager
async def running_envoy(config: Mapping[str, Any], folder: Path, *, name: str, admin_port: int) -> AsyncIterator[None]:
    """Start Envoy with this file and wait until it is ready; its log is `folder/NAME.log`."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    spec = ProcessSpec(
        name=name,
        argv=(str(find_envoy()), "-c", str(path), "--disable-hot-restart", "--concurrency", "1"),
        ready=(HttpReady(url=f"http://{HOST}:{admin_port}/ready"),),
        ready_within_seconds=START_SECONDS,
    )
    async with supervised([spec], folder):
        yield


@asynccontextmanager
async def supervised(specs: Sequence[ProcessSpec], folder: Path) -> AsyncIterator[None]:
    """Run processes until the block ends, all started at once; their logs are in the folder."""
    ready = asyncio.Event()

    async def when_ready() -> None:
        ready.set()
        await asyncio.Event().wait()

    names = ", ".join(spec.name for spec in specs)
    run = asyncio.create_task(
        Supervisor(log_directory=folder).run([specs], environment=os.environ, when_ready=when_ready),
        name=f"supervisor of {names}",
    )
    began = asyncio.create_task(ready.wait(), name=f"{names}: ready")
    try:
        await asyncio.wait({run, began}, timeout=2 * START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if run.done():
            run.result()
        assert ready.is_set(), f"not ready: {names}"
        yield
    finally:
        began.cancel()
        run.cancel()
        with suppress(asyncio.CancelledError):
            async with asyncio.timeout(END_SECONDS):
                await run
