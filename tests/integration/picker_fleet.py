"""What an idle picker with hundreds of pools costs: start-up time, CPU, memory. docs/guides/pools.md quotes it.

The fleet is that of `kv_fleet`: thousands of quiet pods on loopback addresses of one process. A Redis runs beside it.

    python -m tests.integration.picker_fleet PODS POOLS POLICIES [QUIET_SECONDS]
"""

import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from tests.integration.hermetic_picker import HOST, SETTINGS
from tests.integration.kv_fleet import FixedDocuments, cpu_seconds, fleet_documents, resident_mib, running_fleet
from tests.integration.kv_redis import free_port, redis_program
from tests.integration.pools_picker import policy_document

QUIET_SECONDS = 60.0
READY_SECONDS = 120.0
PAGE = "process_start_time_seconds 1000.0\nvllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"


async def serve_picker(pods: int, pools: int, policies: int, port: int, *ports: int) -> None:
    """Run the picker under measurement; `ports`: Redis, gRPC, admin."""
    from extproc.service import serve
    from extproc.settings.config import PickerSettings

    documents: dict[str, Any] = fleet_documents(pods, pools, port)
    documents["InferencePolicy"] = tuple(
        policy_document(f"policy-{number:04}", pool=f"pool-{number % pools:03}", load={"overload": {"kvUsage": 0.9}})
        for number in range(policies)
    )
    redis_port, grpc_port, admin_port = ports
    changes = {"grpc_port": grpc_port, "admin_port": admin_port, "redis_url": f"redis://{HOST}:{redis_port}/0"}
    mesh = {"endpoints": (), "policies_folder": Path("/nonexistent"), "shares_load": True}
    settings = PickerSettings(**SETTINGS | {"scrape_interval_seconds": 0.2} | changes | mesh)
    await serve(settings, stop=asyncio.Event(), source=FixedDocuments(documents))


async def measure(pods: int, pools: int, policies: int, quiet_seconds: float) -> None:
    """Print how a picker process fares."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    redis_port, grpc_port, admin_port = (free_port() for _ in range(3))
    command = [str(redis_program()), "--port", str(redis_port), "--save", "", "--appendonly", "no"]
    redis_server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        async with running_fleet(PAGE) as port:
            numbers = map(str, (pods, pools, policies, port, redis_port, grpc_port, admin_port))
            with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("wb") as log:
                began = time.monotonic()
                arguments = [sys.executable, "-m", __spec__.name, "picker", *numbers]
                child = subprocess.Popen(arguments, stdout=log, stderr=log)
                try:
                    await _until_ready(f"http://{HOST}:{admin_port}/readyz", child, Path(folder, "log"))
                    took = time.monotonic() - began
                    print(f"{pods} pods in {pools} pools, {policies} policies: ready after {took:.1f} s, ", end="")
                    print(f"{cpu_seconds(child.pid):.1f} s of CPU", flush=True)
                    await _watch_quiet(child.pid, redis_server.pid, quiet_seconds)
                finally:
                    child.terminate()
                    child.wait(30)
    finally:
        redis_server.terminate()
        redis_server.wait()


async def _watch_quiet(pid: int, redis_pid: int, quiet_seconds: float) -> None:
    await asyncio.sleep(quiet_seconds)  # until the pods are scraped at leisure
    before, redis_before, at = cpu_seconds(pid), cpu_seconds(redis_pid), time.monotonic()
    await asyncio.sleep(quiet_seconds)
    passed = time.monotonic() - at
    print(
        f"quiet: {(cpu_seconds(pid) - before) / passed:.2%} of a core, "
        f"Redis {(cpu_seconds(redis_pid) - redis_before) / passed:.2%}, {resident_mib(pid):.0f} MiB",
        flush=True,
    )


async def _until_ready(url: str, child: "subprocess.Popen[bytes]", log: Path) -> None:
    async with asyncio.timeout(READY_SECONDS), aiohttp.ClientSession() as http:
        while True:
            assert child.poll() is None, log.read_text()[-3000:]
            try:
                async with http.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    if sys.argv[1] == "picker":
        import logging

        import uvloop

        logging.basicConfig(level=logging.ERROR)
        uvloop.run(serve_picker(*map(int, sys.argv[2:9])))
    else:
        quiet = float(sys.argv[4]) if len(sys.argv) > 4 else QUIET_SECONDS
        asyncio.run(measure(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), quiet))
