"""The signal on real processes: `python -m bench.scaling.processes [--out FILE]`.

A picker that follows documents in a folder, simulated pods (`kvmesh sim`) that come and go as a KEDA client reads it
from the picker, and a load that steps up and down. A scripted client plays Envoy, and sends each request to the pod
that it is told. Nothing is virtual but the pods' engines. A new pod serves when its time is over and its process is up.
"""

import argparse
import asyncio
import json
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
from bench.scaling.arms import KVMESH
from bench.scaling.loads import Request
from bench.scaling.plan import Plan
from bench.scaling.shortened import BATCH_TOKENS, RATE, cheapest_oracle, coming, shortened, virtual
from extproc.ext_proc.answers import PROCESSOR_SERVICE
from extproc.scaling import external_scaler as messages
from operate.local.ports import pick_free_port
from operate.local.processes import GrpcReady, ProcessSpec, Supervisor

HOST, NAMESPACE, POOL = "127.0.0.1", "llm", "llama"
CLASS = "standard"
MOST_PODS = 12
FASTER = 6.0  # than the load of virtual time


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

    plan: Plan
    folder: Path
    port: int
    began_at: float
    pods: dict[str, Pod] = field(default_factory=dict)
    pod_seconds: float = 0.0
    most: int = 0
    latest_start: float = 0.0  # seconds
    _made: int = 0

    def write_pool(self) -> None:
        """Put the pool and its policy."""
        group = "inference.networking.k8s.io"
        metadata = {"namespace": NAMESPACE, "name": POOL}
        both = {
            "minReplicas": 1,
            "maxReplicas": MOST_PODS,
            "startSeconds": self.plan.start_seconds,
            "stabilizationSeconds": self.plan.window_seconds,
        }
        # what would come too late is refused, as in virtual time; else all that come after it are late, too
        promised = {"name": CLASS, "ttftSeconds": self.plan.ttft_seconds, "sheddable": True}
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
                    "load": {"prefillTokensPerSecond": RATE / 2},  # a policy that is off
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
            "prefill-tokens-per-second": RATE,
            "max-num-batched-tokens": BATCH_TOKENS,
        }
        given = [f"--{name}={value}" for name, value in flags.items()]
        pod.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "operate", "sim", *given), stdout=asyncio.subprocess.DEVNULL, stderr=None
        )
        async with aiohttp.ClientSession() as session:
            while not await _answers(session, pod.address):
                await asyncio.sleep(0.2)
        if not at_once:  # what its process took counts
            await asyncio.sleep(max(pod.asked_at + self.plan.start_seconds - time.monotonic(), 0.0))
        pod.serves = True
        self.latest_start = max(self.latest_start, time.monotonic() - pod.asked_at)
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
        self.pod_seconds += max(time.monotonic() - max(pod.asked_at, self.began_at + self.plan.warm_seconds), 0.0)
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
                await asyncio.sleep(fleet.plan.sync_seconds)
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
        self.kept: list[tuple[float, bool]] = []  # seconds since the start, and whether the promise was kept

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
            took = None if first is None else first - began
            self.seconds.append(took)
            is_kept = took is not None and took <= self._fleet.plan.ttft_seconds
            self.kept.append((began - self._fleet.began_at, is_kept))

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


async def play(plan: Plan, load: Sequence[Request]) -> dict[str, Any]:
    """Play the load, and return what came of it."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as directory:
        documents = Path(directory) / "documents"
        documents.mkdir()
        redis, redis_url = start_redis(directory)
        ports: list[int] = []
        while len(ports) < 3:
            ports.append(pick_free_port(host=HOST, avoid=ports))
        grpc_port, admin_port, pod_port = ports
        fleet = Fleet(plan=plan, folder=documents, port=pod_port, began_at=time.monotonic())
        fleet.write_pool()
        settings = {"host": HOST, "grpc-port": grpc_port, "admin-port": admin_port, "redis": redis_url}
        settings |= {"policies": documents, "drain-seconds": 0}
        given = [f"--{name}={value}" for name, value in settings.items()]
        picker = ProcessSpec(
            name="picker",
            argv=(sys.executable, "-m", "operate", "extproc", *given),
            ready=(GrpcReady(address=f"{HOST}:{grpc_port}"),),
        )
        found: dict[str, Any] = {}

        async def when_ready() -> None:
            found.update(await _measure(load, fleet, f"{HOST}:{grpc_port}"))

        try:
            await asyncio.gather(*(fleet.add(at_once=True) for _ in range(plan.first_pods)))
            fleet.latest_start = 0.0
            await Supervisor(log_directory=Path(directory)).run(
                [[picker]], environment=os.environ, when_ready=when_ready
            )
        finally:
            for pod in list(fleet.pods.values()):
                await fleet.end(pod)
            stop_redis(redis)
        return found


async def _measure(load: Sequence[Request], fleet: Fleet, address: str) -> dict[str, Any]:
    draw, plan = random.Random(1), fleet.plan
    async with grpc.aio.insecure_channel(address) as channel, aiohttp.ClientSession() as session:
        client, keda = Client(channel, session, fleet), Keda(channel, fleet)
        fleet.began_at = time.monotonic()
        following = asyncio.create_task(keda.run())
        late = 0.0
        async with asyncio.TaskGroup() as requests:
            for each in load:
                await asyncio.sleep(max(fleet.began_at + each.at - time.monotonic(), 0.0))
                late = max(late, time.monotonic() - fleet.began_at - each.at)
                prompt = [draw.randrange(1000) for _ in range(round(each.uncached_tokens))]
                body = {"model": "tiny", "prompt": prompt, "max_tokens": round(each.answer_tokens), "stream": True}
                counts = plan.warm_seconds <= each.at <= plan.seconds["step"] - plan.end_seconds
                requests.create_task(client.ask(json.dumps(body).encode(), counts=counts))
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
    most = fleet.most
    for pod in list(fleet.pods.values()):
        await fleet.end(pod)
    kept = [is_kept for _, is_kept in client.kept]
    return {
        "requests": len(kept),
        "attainment": round(sum(kept) / len(kept), 4),
        "attainment_by_minute": _by_minute(client.kept),
        "refused_or_failed": sum(seconds is None for seconds in client.seconds),
        "pod_seconds": round(fleet.pod_seconds, 1),
        "most_pods": most,
        "told": keda.told,
        "latest_send_seconds": round(late, 3),
        "latest_start_seconds": round(fleet.latest_start, 1),
    }


def _by_minute(kept: Sequence[tuple[float, bool]]) -> list[float | None]:
    """Return the share of promises kept of the requests that came in each minute; None: none came, or counts."""
    minutes = [[each for at, each in kept if int(at / 60.0) == i] for i in range(int(max(kept)[0] / 60.0) + 1)]
    return [round(sum(each) / len(each), 3) if each else None for each in minutes]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the flags, play, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--faster", type=float, default=FASTER, help="than the load of virtual time; default: %(default)g"
    )
    parser.add_argument("--seed", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="result file; default bench/results/<date>-scaling-processes.json")
    options = parser.parse_args(arguments)
    began, load_before = datetime.now(UTC), os.getloadavg()[0]
    plan = shortened(options.faster)
    load = coming(plan, seed=options.seed)
    utilisation, kept, pod_seconds = cheapest_oracle(plan, load)
    attained, virtual_seconds = virtual(plan, load, arm=KVMESH)
    outcome = uvloop.run(play(plan, load))
    result = {
        "faster": options.faster,
        "seed": options.seed,
        "plan": asdict(plan),
        "oracle": {"utilisation": utilisation, "attainment": round(kept, 4), "pod_seconds": round(pod_seconds, 1)},
        "virtual": {
            "attainment": round(attained, 4),
            "pod_seconds": round(virtual_seconds, 1),
            "of_oracle": round(virtual_seconds / pod_seconds, 3),
        },
        "outcome": outcome | {"of_oracle": round(outcome["pod_seconds"] / pod_seconds, 3)},
    }
    written = write_result(
        result, out=options.out, name="scaling-processes", began=began, load_before=load_before, subject=Subject()
    )
    print(json.dumps({name: result[name] for name in ("oracle", "virtual", "outcome")}))
    print(written)


if __name__ == "__main__":
    main()
