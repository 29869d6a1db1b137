"""The signal on real processes: `python -m bench.scaling.processes [--out FILE]`.

A picker that follows documents in a folder, simulated pods (`kvmesh sim`) that come and go as a KEDA client reads it
from the picker, and a load that steps up and down. A scripted client plays Envoy, and sends each request to the pod
that it is told. Nothing is virtual but the pods' engines: starting takes what a process takes, and some seconds more.
"""

import argparse
import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import uvloop
import yaml
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from bench.redis_server import start_redis, stop_redis
from bench.replicas import destination_of, request_messages, response_message
from bench.routing.result_file import write_result
from bench.routing.subject import Subject
from extproc.ext_proc.answers import PROCESSOR_SERVICE
from extproc.local.ports import pick_free_port
from extproc.local.processes import GrpcReady, ProcessSpec, Supervisor
from extproc.scaling import scaler_messages as messages

HOST, NAMESPACE, POOL = "127.0.0.1", "llm", "llama"
CLASS = "standard"
LOOK_SECONDS = 2.0  # between two of KEDA's
ORACLE_BUSY = 0.9  # of the pods, where somebody knows what will come


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Steps of seconds and busy pods; what a request is, and what it is promised."""

    steps: tuple[tuple[float, float], ...] = ((60.0, 0.7), (150.0, 3.0), (120.0, 0.7))
    warm_seconds: float = 40.0  # not counted: the picker has to see enough first
    prompt_tokens: int = 600
    answer_tokens: int = 8
    prefill_tokens_per_second: float = 2000.0
    ttft_seconds: float = 2.0
    start_seconds: float = 10.0  # beside what the process takes
    window_seconds: float = 45.0
    first_pods: int = 1
    most_pods: int = 8
    seed: int = 4

    def arrivals(self) -> list[float]:
        """Return when requests come: a Poisson process."""
        draw = random.Random(self.seed)
        found, began = [], 0.0
        for seconds, busy in self.steps:
            rate = busy * self.prefill_tokens_per_second / self.prompt_tokens
            at = began
            while (at := at + draw.expovariate(rate)) < began + seconds:
                found.append(at)
            began += seconds
        return found

    def oracle_pod_seconds(self) -> float:
        """Return what the pods of somebody cost who knows the steps: started in time, and gone with the load."""
        pods = [max(math.ceil(busy / ORACLE_BUSY), 1) for _, busy in self.steps]
        total, began = 0.0, 0.0
        for i, (seconds, _) in enumerate(self.steps):
            counted = max(began + seconds - max(began, self.warm_seconds), 0.0)
            total += pods[i] * counted
            if i and pods[i] > pods[i - 1]:
                total += (pods[i] - pods[i - 1]) * self.start_seconds
            began += seconds
        return total


@dataclass(slots=True, kw_only=True)
class Pod:
    """One simulated pod: its process, and its requests."""

    address: str
    asked_at: float
    process: asyncio.subprocess.Process | None = None
    serves: bool = False
    leaves: bool = False
    open: int = 0


@dataclass(slots=True, kw_only=True)
class Fleet:
    """The pods, and the documents that say which of them are there."""

    load: Load
    folder: Path
    port: int
    began_at: float
    pods: dict[str, Pod] = field(default_factory=dict)
    pod_seconds: float = 0.0
    most: int = 0
    _made: int = 0

    def write_pool(self) -> None:
        """Put the pool and its policy."""
        group = "inference.networking.k8s.io"
        metadata = {"namespace": NAMESPACE, "name": POOL}
        both = {
            "minReplicas": 1,
            "maxReplicas": self.load.most_pods,
            "startSeconds": self.load.start_seconds + 3.0,
            "stabilizationSeconds": self.load.window_seconds,
        }
        promised = {"name": CLASS, "ttftSeconds": self.load.ttft_seconds}
        self._write(
            "pool.yaml",
            {
                "apiVersion": f"{group}/v1",
                "kind": "InferencePool",
                "metadata": metadata,
                "spec": {"selector": {"matchLabels": {"app": POOL}}, "targetPorts": [{"number": self.port}]},
            },
            {
                "apiVersion": "kvmesh.io/v1alpha1",
                "kind": "InferencePolicy",
                "metadata": metadata,
                "spec": {
                    "targetRefs": [{"group": group, "kind": "InferencePool", "name": POOL}],
                    "autoscale": {"both": both},
                    "priorities": {"classes": [promised]},
                },
            },
        )

    async def add(self, *, at_once: bool = False) -> None:
        """Start a pod, which serves after its time."""
        self._made += 1
        pod = Pod(address=f"127.0.2.{self._made}:{self.port}", asked_at=time.monotonic())
        self.pods[pod.address] = pod
        self.most = max(self.most, len(self.pods))
        self.write_pods()
        host = pod.address.partition(":")[0]
        flags = {
            "host": host,
            "sim-port": self.port,
            "prefill-tokens-per-second": self.load.prefill_tokens_per_second,
            "max-num-batched-tokens": 256,
        }
        given = [f"--{name}={value}" for name, value in flags.items()]
        pod.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "extproc", "sim", *given), stdout=asyncio.subprocess.DEVNULL, stderr=None
        )
        if not at_once:
            await asyncio.sleep(self.load.start_seconds)
        async with aiohttp.ClientSession() as session:
            while not await _answers(session, pod.address):
                await asyncio.sleep(0.2)
        pod.serves = True
        self.write_pods()

    async def remove(self, pod: Pod) -> None:
        """Take a pod out, and end it when its last request has ended."""
        pod.leaves = True
        self.write_pods()
        while pod.open:
            await asyncio.sleep(0.1)
        await self.end(pod)

    async def end(self, pod: Pod) -> None:
        """End a pod's process, and count what it has cost."""
        self.pods.pop(pod.address, None)
        self.pod_seconds += max(time.monotonic() - max(pod.asked_at, self.began_at + self.load.warm_seconds), 0.0)
        if pod.process is not None and pod.process.returncode is None:
            with suppress(ProcessLookupError):
                pod.process.terminate()
            await pod.process.wait()

    def write_pods(self) -> None:
        """Put the pods as they are."""
        there = [pod for pod in self.pods.values() if not pod.leaves]
        self._write("pods.yaml", *(_pod_document(pod) for pod in there))

    def _write(self, name: str, *documents: dict[str, Any]) -> None:
        part = self.folder / f".{name}"
        part.write_text(yaml.safe_dump_all(documents) or "---\n", encoding="utf-8")
        part.replace(self.folder / name)


def _pod_document(pod: Pod) -> dict[str, Any]:
    ip = pod.address.partition(":")[0]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": NAMESPACE, "name": f"pod-{ip.replace('.', '-')}", "labels": {"app": POOL}},
        "spec": {},
        "status": {
            "podIP": ip,
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True" if pod.serves else "False"}],
        },
    }


async def _answers(session: aiohttp.ClientSession, address: str) -> bool:
    try:
        async with session.get(f"http://{address}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


class Keda:
    """Reads the wanted number as KEDA does, and has the fleet follow it."""

    def __init__(self, channel: grpc.aio.Channel, fleet: Fleet) -> None:
        self._call = channel.unary_unary(
            f"/{messages.SERVICE}/GetMetrics",
            request_serializer=messages.GetMetricsRequest.SerializeToString,
            response_deserializer=messages.GetMetricsResponse.FromString,
        )
        self._fleet = fleet
        self.told: list[tuple[float, int]] = []  # seconds since the start, and the number when it changed

    async def run(self) -> None:
        """Follow until cancelled."""
        fleet = self._fleet
        ref = messages.ScaledObjectRef(name=POOL, namespace=NAMESPACE, scalerMetadata={"pool": POOL})
        async with asyncio.TaskGroup() as changes:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                try:
                    answer = await self._call(messages.GetMetricsRequest(scaledObjectRef=ref), timeout=5.0)
                except grpc.aio.AioRpcError:
                    continue  # no signal yet: KEDA leaves the number alone
                wanted = round(answer.metricValues[0].metricValueFloat)
                if not self.told or self.told[-1][1] != wanted:
                    self.told.append((round(time.monotonic() - fleet.began_at, 1), wanted))
                there = [pod for pod in fleet.pods.values() if not pod.leaves]
                for _ in range(wanted - len(there)):
                    changes.create_task(fleet.add())
                last = sorted(there, key=lambda pod: (pod.serves, pod.open))[: max(len(there) - wanted, 0)]
                for pod in last:
                    if pod.serves:  # one that starts is let start: its process is on its way
                        changes.create_task(fleet.remove(pod))


class Client:
    """Envoy's part, and the first token's time."""

    def __init__(self, channel: grpc.aio.Channel, session: aiohttp.ClientSession, fleet: Fleet) -> None:
        self._call = channel.stream_stream(
            f"/{PROCESSOR_SERVICE}/Process",
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )
        self._session, self._fleet = session, fleet
        self.seconds: list[float | None] = []  # to the first token; None: refused, or failed

    async def ask(self, body: bytes, *, counts: bool) -> None:
        """Send one request through."""
        began = time.monotonic()
        first: float | None = None
        call = self._call(metadata=(("x-kvmesh-pool", f"{NAMESPACE}/{POOL}"),))
        try:
            first = await self._through(call, body)
        except (grpc.aio.AioRpcError, aiohttp.ClientError, TimeoutError):
            first = None
        finally:
            call.cancel()
        if counts:
            self.seconds.append(None if first is None else first - began)

    async def _through(self, call: Any, body: bytes) -> float | None:
        for message in request_messages(body):
            await call.write(message)
        endpoint = None
        for _ in range(2):
            endpoint = endpoint or destination_of(await call.read())
        pod = self._fleet.pods.get(endpoint or "")
        if endpoint is None or pod is None:
            return None
        first: float | None = None
        pod.open += 1
        try:
            url, headers = f"http://{endpoint}/v1/completions", {"content-type": "application/json"}
            async with self._session.post(url, data=body, headers=headers) as response:
                await call.write(response_message(endpoint))
                await call.read()
                async for _ in response.content.iter_any():
                    first = first or time.monotonic()
                if response.status != 200:
                    return None
        finally:
            pod.open -= 1
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
        return first


async def play(load: Load) -> dict[str, Any]:
    """Play the load, and return what came of it."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as directory:
        documents = Path(directory) / "documents"
        documents.mkdir()
        redis, redis_url = start_redis(directory)
        ports: list[int] = []
        while len(ports) < 3:
            ports.append(pick_free_port(host=HOST, avoid=ports))
        grpc_port, admin_port, pod_port = ports
        fleet = Fleet(load=load, folder=documents, port=pod_port, began_at=time.monotonic())
        fleet.write_pool()
        settings = {"host": HOST, "grpc-port": grpc_port, "admin-port": admin_port, "redis": redis_url}
        settings |= {"policies": documents, "drain-seconds": 0}
        given = [f"--{name}={value}" for name, value in settings.items()]
        picker = ProcessSpec(
            name="picker",
            argv=(sys.executable, "-m", "extproc", "extproc", *given),
            ready=(GrpcReady(address=f"{HOST}:{grpc_port}"),),
        )
        found: dict[str, Any] = {}

        async def when_ready() -> None:
            found.update(await _measure(load, fleet, f"{HOST}:{grpc_port}"))

        try:
            await asyncio.gather(*(fleet.add(at_once=True) for _ in range(load.first_pods)))
            await Supervisor(log_directory=Path(directory)).run(
                [[picker]], environment=os.environ, when_ready=when_ready
            )
        finally:
            for pod in list(fleet.pods.values()):
                await fleet.end(pod)
            stop_redis(redis)
        return found


async def _measure(load: Load, fleet: Fleet, address: str) -> dict[str, Any]:
    draw = random.Random(load.seed)
    async with grpc.aio.insecure_channel(address) as channel, aiohttp.ClientSession() as session:
        client, keda = Client(channel, session, fleet), Keda(channel, fleet)
        fleet.began_at = time.monotonic()
        following = asyncio.create_task(keda.run())
        late = 0.0
        async with asyncio.TaskGroup() as requests:
            for at in load.arrivals():
                await asyncio.sleep(max(fleet.began_at + at - time.monotonic(), 0.0))
                late = max(late, time.monotonic() - fleet.began_at - at)
                prompt = [draw.randrange(1000) for _ in range(load.prompt_tokens)]
                body = {"model": "tiny", "prompt": prompt, "max_tokens": load.answer_tokens, "stream": True}
                requests.create_task(client.ask(json.dumps(body).encode(), counts=at >= load.warm_seconds))
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
    most = fleet.most
    for pod in list(fleet.pods.values()):
        await fleet.end(pod)
    kept = [seconds is not None and seconds <= load.ttft_seconds for seconds in client.seconds]
    return {
        "requests": len(kept),
        "attainment": round(sum(kept) / len(kept), 4),
        "refused_or_failed": sum(seconds is None for seconds in client.seconds),
        "pod_seconds": round(fleet.pod_seconds, 1),
        "of_oracle": round(fleet.pod_seconds / load.oracle_pod_seconds(), 3),
        "most_pods": most,
        "told": keda.told,
        "latest_send_seconds": round(late, 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the flags, play, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file; default bench/results/<date>-scaling-processes.json")
    options = parser.parse_args(arguments)
    began, load_before = datetime.now(UTC), os.getloadavg()[0]
    load = Load()
    outcome = uvloop.run(play(load))
    result = {"load": asdict(load), "outcome": outcome}
    written = write_result(
        result, out=options.out, name="scaling-processes", began=began, load_before=load_before, subject=Subject()
    )
    print(json.dumps(outcome))
    print(written)


if __name__ == "__main__":
    main()
