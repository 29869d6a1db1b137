"""Thousands of quiet pods in one process, one loopback address each, and how an indexer fares with them.

All addresses share one HTTP server, one PUB and one ROUTER socket. It prints start-up time, CPU when all is quiet and
memory of an indexer process; docs/guides/pools.md quotes it.

    python -m tests.integration.kv_fleet PODS POOLS [METRICS_PAGE] [QUIET_SECONDS]
"""

import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import zmq
import zmq.asyncio
from aiohttp import web

from kvmesh.documents.documents import Document, Snapshot
from tests.integration.kv_redis import free_port, redis_program

QUIET_SECONDS = 30.0
READY_SECONDS = 300.0
END = b"\xff" * 8


def addresses(count: int) -> list[str]:
    """Loopback addresses, all served by one socket that is bound to every address."""
    return [f"127.{1 + number // 62_500}.{number // 250 % 250}.{1 + number % 250}" for number in range(count)]


def fleet_documents(pods: int, pools: int, port: int) -> dict[str, tuple[Document, ...]]:
    """InferencePools, and pods that are spread evenly over them."""
    return {
        "InferencePool": tuple(
            {
                "apiVersion": "inference.networking.k8s.io/v1",
                "kind": "InferencePool",
                "metadata": {"namespace": "llm", "name": f"pool-{number:03}"},
                "spec": {
                    "selector": {"matchLabels": {"pool": f"pool-{number:03}"}},
                    "targetPorts": [{"number": port}],
                },
            }
            for number in range(pools)
        ),
        "Pod": tuple(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "namespace": "llm",
                    "name": f"pod-{number:04}",
                    "labels": {"pool": f"pool-{number % pools:03}"},
                },
                "spec": {"containers": []},
                "status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]},
            }
            for number, address in enumerate(addresses(pods))
        ),
    }


class FixedDocuments:
    """Documents that never change: implements `DocumentSource`."""

    def __init__(self, documents: dict[str, tuple[Document, ...]]) -> None:
        self._documents = documents

    async def run(self, on_change: Callable[[Snapshot], None]) -> None:
        on_change(Snapshot(documents=self._documents, synced=True))
        await asyncio.Event().wait()


@asynccontextmanager
async def running_fleet(metrics: str = "") -> AsyncIterator[int]:
    """Serve every loopback address; give the HTTP port."""
    context = zmq.asyncio.Context()
    context.max_sockets = 100
    live, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    ports = [socket.bind_to_random_port("tcp://0.0.0.0") for socket in (live, router)]
    source = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports[0]}",
        "replay_endpoint": f"tcp://*:{ports[1]}",
    }
    pages = {
        "/kv_event_sources": json.dumps({"0": source}),
        "/v1/models": json.dumps({"object": "list", "data": [{"id": "tiny"}]}),
        "/metrics": metrics or "process_start_time_seconds 1000.0\nvllm:num_requests_running 0.0\n",
    }

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=pages[request.path])

    async def replay() -> None:
        while True:
            client, *_ = await router.recv_multipart()
            await router.send_multipart([client, b"", b"", END, b""])

    app = web.Application()
    app.add_routes([web.get(path, answer) for path in pages])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0, backlog=4096).start()
    task = asyncio.create_task(replay(), name="fleet-replay")
    try:
        yield runner.addresses[0][1]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await runner.cleanup()
        context.destroy(linger=0)


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def resident_mib(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


async def measure(pods: int, pools: int) -> None:
    """Print how an indexer process fares."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    redis_port = free_port()
    redis_server = subprocess.Popen(
        [str(redis_program()), "--port", str(redis_port), "--save", "", "--appendonly", "no"], stdout=subprocess.DEVNULL
    )
    try:
        page = Path(sys.argv[3]).read_text() if len(sys.argv) > 3 and sys.argv[3] else ""
        async with running_fleet(page) as port:
            await _measure(pods, pools, port=port, redis_port=redis_port, redis_pid=redis_server.pid)
    finally:
        redis_server.terminate()
        redis_server.wait()


async def _measure(pods: int, pools: int, *, port: int, redis_port: int, redis_pid: int) -> None:
    admin = free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "indexer.log")
        arguments = [sys.executable, "-m", __spec__.name, "indexer", str(pods), str(pools), str(port)]
        began = time.monotonic()
        with log.open("wb") as output:
            child = subprocess.Popen([*arguments, str(redis_port), str(admin)], stdout=output, stderr=output)
        try:
            async with aiohttp.ClientSession() as http:
                await _until_ready(http, f"http://127.0.0.1:{admin}/readyz", child, log)
                took, cpu = time.monotonic() - began, cpu_seconds(child.pid)
                print(f"{pods} pods in {pools} pools: ready after {took:.1f} s, {cpu:.1f} s of CPU", flush=True)
                quiet_seconds = float(sys.argv[4]) if len(sys.argv) > 4 else QUIET_SECONDS
                await asyncio.sleep(quiet_seconds / 3)
                before, redis_before, at = cpu_seconds(child.pid), cpu_seconds(redis_pid), time.monotonic()
                await asyncio.sleep(quiet_seconds)
                passed = time.monotonic() - at
                print(
                    f"quiet: {(cpu_seconds(child.pid) - before) / passed:.1%} of a core, "
                    f"Redis {(cpu_seconds(redis_pid) - redis_before) / passed:.1%}, "
                    f"{resident_mib(child.pid):.0f} MiB, {len(list(Path(f'/proc/{child.pid}/fd').iterdir()))} files"
                )
                asked = time.monotonic()
                async with http.get(f"http://127.0.0.1:{admin}/metrics") as answer:
                    size = len(await answer.read())
                print(f"/metrics: {size / 1e6:.1f} MB in {time.monotonic() - asked:.2f} s")
                print("log:", len(log.read_text().splitlines()), "lines;", log.read_text()[-600:])
        finally:
            child.terminate()
            child.wait(30)


async def _until_ready(http: aiohttp.ClientSession, url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    async with asyncio.timeout(READY_SECONDS):
        while True:
            assert child.poll() is None, log.read_text()[-3000:]
            try:
                async with http.get(url, timeout=aiohttp.ClientTimeout(total=20)) as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.1)


async def serve_indexer(pods: int, pools: int, port: int, redis_port: int, admin_port: int) -> None:
    """Run the indexer under measurement."""
    from kv_indexer.config import IndexerSettings
    from kv_indexer.service import IndexerService

    options: dict[str, Any] = {"documents": FixedDocuments(fleet_documents(pods, pools, port))}
    settings = IndexerSettings(
        host="127.0.0.1",
        admin_port=admin_port,
        redis_url=f"redis://127.0.0.1:{redis_port}/0",
        endpoints=(),
        model="",
        hash_seed="kvmesh",
        **options,
    )
    await IndexerService(settings).run()


if __name__ == "__main__":
    if sys.argv[1] == "indexer":
        import logging

        import uvloop

        logging.basicConfig(level=logging.ERROR)
        uvloop.run(serve_indexer(*map(int, sys.argv[2:7])))
    else:
        asyncio.run(measure(int(sys.argv[1]), int(sys.argv[2])))
