"""A whole mesh started with `kvmesh up` on free ports, for tests: real Envoy, real Redis, simulated or real pods."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from operate.local.ports import pick_free_port

START_SECONDS = 60.0
CONDITION_SECONDS = 15.0
ANSWER_SECONDS = 30.0
END_SECONDS = 30.0
FIXED_PORTS = 5  # of gateway, picker and indexer; the pods' come after them


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a client got."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def upstream(self) -> str:
        """The pod that served, as Envoy says."""
        return self.headers["x-kvmesh-upstream"]

    @property
    def cached_tokens(self) -> int:
        return int(self.json["usage"]["prompt_tokens_details"]["cached_tokens"])


class Stack:
    """The running mesh and a client for it."""

    def __init__(self, *, ready: dict[str, Any], process: subprocess.Popen[bytes], http: aiohttp.ClientSession) -> None:
        self.ready = ready
        self.process = process
        self.http = http

    @property
    def picker(self) -> int:
        """The process that picks now; the one of the ready file starts it again."""
        parent = self.ready["pids"]["extproc"]
        (child,) = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii").split()
        return int(child)

    async def send(self, method: str, path: str, *, headers: dict[str, str] | None = None, **body: Any) -> Answer:
        """Send one request through the gateway; `json=` or `data=` is the body."""
        async with self.http.request(method, f"{self.ready['gateway']}{path}", headers=headers, **body) as response:
            return Answer(
                status=response.status,
                headers={name.lower(): value for name, value in response.headers.items()},
                body=await response.read(),
            )

    async def complete(self, prompt: Any, *, max_tokens: int = 2, **fields: Any) -> Answer:
        """Send one completion."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens} | fields
        return await self.send("POST", "/v1/completions", json=body)

    async def state(self) -> Any:
        """Return the picker's /state."""
        async with self.http.get(f"{self.ready['admin']}/state") as response:
            return await response.json()

    async def explain(self, body: Any, *, path: str = "/v1/completions") -> Any:
        """Return the picker's explanation for a body, without sending it."""
        async with self.http.post(f"{self.ready['admin']}/v1/explain", json=body, params={"path": path}) as response:
            return await response.json()

    async def metric(self, name: str) -> float:
        """Return the sum over all series of one of the picker's metrics."""
        async with self.http.get(f"{self.ready['admin']}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[ {{]", line))

    async def upstream_connections(self, pod: str) -> int:
        """Return the connections to a pod that Envoy believes to be open."""
        async with self.http.get(f"{self.ready['envoy_admin']}/clusters") as response:
            return sum(map(int, re.findall(rf"::{re.escape(pod)}::cx_active::(\d+)", await response.text())))

    async def open_bookings(self) -> int:
        """Return the exchanges that the picker believes to be under way."""
        return sum(pod["bookings"] for pod in (await self.state())["endpoints"])

    async def indexed(self, prompt: Any, *, tokens: int = 1, model: str = "tiny") -> Any:
        """Wait until the index knows at least so many of the prompt's tokens somewhere; return the explanation."""
        body = {"model": model, "prompt": prompt}
        return await eventually(
            lambda: self.explain(body),
            lambda answer: any(candidate["indexed_tokens"] >= tokens for candidate in answer["candidates"]),
        )


async def eventually(
    look: Callable[[], Awaitable[Any]], holds: Callable[[Any], bool], *, seconds: float = CONDITION_SECONDS
) -> Any:
    """Look again and again until the condition holds; fail with what was seen last."""
    deadline = time.monotonic() + seconds
    while not holds(seen := await look()):
        assert time.monotonic() < deadline, f"never came true; last seen: {seen}"
        await asyncio.sleep(0.02)
    return seen


def free_ports(count: int) -> list[int]:
    """Return ports that nobody uses now, all different; at no address, since proxies listen at all of them."""
    ports: list[int] = []
    while len(ports) < count:
        ports.append(pick_free_port(host="0.0.0.0", avoid=ports))
    return ports


def free_mesh_ports(pods: int) -> int:
    """Return a free --port-base for `kvmesh up` with so many simulated pods."""
    return pick_free_port(host="0.0.0.0", avoid=(), count=FIXED_PORTS + pods)


@asynccontextmanager
async def running_stack(
    tmp_path: Path,
    *flags: str,
    pods: int = 3,
    settings: str = "",
    endpoints: Sequence[str] = (),
    answer_seconds: float = ANSWER_SECONDS,
) -> AsyncIterator[Stack]:
    """Start `kvmesh up`, wait for its ready file, and end it; its own output goes to a file that failures show."""
    ready_file, config, output = tmp_path / "ready.json", tmp_path / "kvmesh.yaml", tmp_path / "up.log"
    config.write_text(settings, encoding="utf-8")
    where = ["--port-base", str(free_mesh_ports(0 if endpoints else pods))]
    where += ["--endpoints", ",".join(endpoints)] if endpoints else ["--pods", str(pods)]
    command = [sys.executable, "-m", "operate", "up", "--no-live", "--ready-file", str(ready_file), *where]
    if settings:
        command += ["--config", str(config)]
    with output.open("wb") as log:
        process = subprocess.Popen([*command, *flags], stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not ready_file.exists():
            assert process.poll() is None, f"kvmesh up ended with {process.returncode}:\n{output.read_text()}"
            assert time.monotonic() < deadline, f"kvmesh up was never ready:\n{output.read_text()}"
            await asyncio.sleep(0.05)
        timeout = aiohttp.ClientTimeout(total=answer_seconds)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            yield Stack(ready=json.loads(ready_file.read_text()), process=process, http=http)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # the kernel kills its children with it
            process.wait(timeout=END_SECONDS)
            raise


@asynccontextmanager
async def simulated_pods(
    count: int, *flags: str, own_hosts: bool = False
) -> AsyncIterator[dict[str, subprocess.Popen[bytes]]]:
    """Start simulated pods that `kvmesh up` did not start, by address; with `own_hosts` each has an IP of its own.

    `flags` are for each.
    """
    hosts = [f"127.0.0.{number + 2 if own_hosts else 1}" for number in range(count)]
    places = list(zip(hosts, free_ports(count), strict=True))
    pods = {
        f"{host}:{port}": subprocess.Popen(
            [sys.executable, "-m", "podsim", "--host", host, "--sim-port", str(port), *flags]
        )
        for host, port in places
    }
    try:
        for host, port in places:
            await eventually(partial(listens, port, host), bool)
        yield pods
    finally:
        for process in pods.values():
            process.kill()
            process.wait(timeout=END_SECONDS)


async def listens(port: int, host: str = "127.0.0.1") -> bool:
    try:
        async with asyncio.timeout(CONDITION_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # a TimeoutError is one
        return False
    writer.close()
    return True


def is_running(pid: int) -> bool:
    """Tell whether a process exists (a zombie does not count)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def kill(pid: int) -> None:
    """End a process as a crash would."""
    os.kill(pid, signal.SIGKILL)
