"""A real Envoy with one of the files of `envoy/`: started on free ports, ended with its test.

For the tests that have their own picker and pods; `tests.e2e.stack` has a whole mesh.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from operate.local.envoy_config import SocketAddress, fill_in, named, read_template
from operate.local.ports import pick_free_port
from operate.local.processes import HttpReady, ProcessSpec, Supervisor, find_envoy

HOST = "127.0.0.1"
START_SECONDS = 60.0
END_SECONDS = 30.0  # the supervisor kills after 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyProcess:
    """Where it answers."""

    gateway: str  # http://host:port
    admin: str


def free_addresses(count: int, *, avoid: Collection[int] = ()) -> list[SocketAddress]:
    """Return addresses that nobody uses now, all different."""
    ports: list[int] = []
    while len(ports) < count:
        ports.append(pick_free_port(host=HOST, avoid={*avoid, *ports}))
    return [SocketAddress(host=HOST, port=port) for port in ports]


@asynccontextmanager
async def running_envoy(
    tmp_path: Path,
    *,
    file: str,
    picker_port: int,
    pods: Sequence[SocketAddress],
    change: Callable[[dict[str, Any]], None] = lambda _: None,
) -> AsyncIterator[EnvoyProcess]:
    """Start Envoy with that file, changed, and wait until it is ready. Its log is `tmp_path/envoy.log`."""
    gateway, admin = free_addresses(2, avoid={picker_port, *(pod.port for pod in pods)})
    config = configuration(file, gateway=gateway, admin=admin, picker_port=picker_port, pods=pods)
    change(config)
    path = tmp_path / "envoy.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    envoy = ProcessSpec(
        name="envoy",
        argv=(str(find_envoy()), "-c", str(path), "--disable-hot-restart", "--concurrency", "1"),
        ready=(HttpReady(url=f"http://{admin}/ready"),),
        ready_within_seconds=START_SECONDS,
    )
    ready = asyncio.Event()

    async def when_ready() -> None:
        ready.set()
        await asyncio.Event().wait()

    supervisor = Supervisor(log_directory=tmp_path)
    run = asyncio.create_task(
        supervisor.run([[envoy]], environment=os.environ, when_ready=when_ready), name="supervisor of envoy"
    )
    began = asyncio.create_task(ready.wait(), name="envoy is ready")
    try:
        await asyncio.wait({run, began}, timeout=2 * START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if run.done():
            run.result()
        assert ready.is_set(), "Envoy is not ready"
        yield EnvoyProcess(gateway=f"http://{gateway}", admin=f"http://{admin}")
    finally:
        began.cancel()
        run.cancel()
        with suppress(asyncio.CancelledError):
            async with asyncio.timeout(END_SECONDS):
                await run


def configuration(
    file: str, *, gateway: SocketAddress, admin: SocketAddress, picker_port: int, pods: Sequence[SocketAddress]
) -> dict[str, Any]:
    """Return the file's content with these addresses."""
    template = read_template(file)
    has_no_list = file == "original-dst.yaml"  # of pods: one is lent to it, and taken away again
    if has_no_list:
        named(template["static_resources"]["clusters"], "pods")["load_assignment"] = {}
    config = fill_in(
        template, gateway=gateway, admin=admin, picker=SocketAddress(host=HOST, port=picker_port), pods=list(pods)
    )
    if has_no_list:
        del named(config["static_resources"]["clusters"], "pods")["load_assignment"]
    return config
