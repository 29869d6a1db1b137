"""Recovery of a killed picker: time from its new process's start to the first right pick.

    python -m bench.first_pick [--starts 10] [--json FILE]

Redis, an indexer and four simulated pods run on; one pod holds a prompt of some 1,000 tokens. In each round a picker is
started, asked as Envoy asks it, and killed by SIGKILL. A pick is right if it names the pod that holds the prompt: the
new process has the tokenizer, the index and the pods' load. The steps before the open port are timed in processes
of their own, in the same round. Then a picker with --respawn is killed as often, and asked until its successor picks.
Wall time is the mesh's wait; CPU time is the same on a busy machine.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.cpu_time import process_cpu_ms
from bench.grpc_exchange import HEADERS
from bench.machine import machine, revision, versions
from bench.plan import SEED
from bench.prompts import chat_body, make_prompt_set, vocabulary_words
from bench.redis_server import start_redis, stop_redis
from bench.running_stack import HOST
from extproc.ext_proc.answers import DESTINATION_HEADER, PROCESSOR_SERVICE
from extproc.ext_proc.exchange import BodyMode
from operate.local.ports import pick_free_port
from operate.local.processes import HttpReady, ProcessSpec, Supervisor
from podsim.model_folder import TINY_MODEL

PODS, PROMPT_TOKENS, MODEL = 4, 1000, "tiny"
CHAT_PATH = "/v1/chat/completions"
LIMIT_SECONDS = 30.0
POLL_SECONDS = 0.001
KVMESH = (sys.executable, "-m", "operate")
# the steps of a start before its open port, in order; a time includes all earlier steps
STEPS: Mapping[str, str] = {
    "interpreter": "pass",
    "command line": "from operate.cli import build; build(['extproc'])",
    "picker's modules": "from operate.cli import build; build(['extproc']); import extproc.service",
}
FIRST_PICK = "first pick"
RESPAWNED = "first pick, respawned"  # since the kill


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When a step was done: milliseconds since the process was started, and of its CPU time."""

    wall_ms: float
    cpu_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a picker."""

    moments: Mapping[str, Moment]  # by step, in order; each of STEPS in a process of its own
    is_right: bool
    is_right_respawned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a picker is started against."""

    pods: Sequence[str]
    holder: str  # the pod that has computed the prompt
    request: Sequence[bytes]  # Envoy's messages
    redis: str

    def picker(self, port: int) -> list[str]:
        """Return the command; its admin port is any."""
        flags = ("--endpoints", ",".join(self.pods), "--redis", self.redis, "--model", MODEL)
        folder = ("--tokenizer", str(TINY_MODEL), "--log-level", "warning")
        return [*KVMESH, "extproc", *flags, *folder, "--host", HOST, "--grpc-port", str(port), "--admin-port", "0"]


def main() -> None:
    """Measure, print, and write where told."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args()
    began = datetime.now(UTC)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as in an image, whose modules are compiled
    starts = asyncio.run(measure(options.starts))
    print(table(starts))
    if options.json is not None:
        options.json.write_text(json.dumps(result(starts, date=began), indent=2) + "\n", encoding="utf-8")


async def measure(count: int) -> list[Start]:
    """Start Redis, an indexer and pods; measure `count` starts of a picker."""
    starts: list[Start] = []
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        server, redis = start_redis(folder)
        try:
            pods, stages = _beside(redis)
            supervisor = Supervisor(log_directory=Path(folder))

            async def when_ready() -> None:
                scene = await _scene(pods, redis)
                await asyncio.to_thread(_until_indexed, scene)
                for _ in range(count):
                    starts.append(await asyncio.to_thread(one_start, scene))

            await supervisor.run(stages, environment=os.environ, when_ready=when_ready)
        finally:
            stop_redis(server)
    return starts


def _beside(redis: str) -> tuple[list[str], list[list[ProcessSpec]]]:
    """Return the addresses of the pods, and what runs beside the picker."""
    first, admin = pick_free_port(host=HOST, avoid=(), count=PODS), pick_free_port(host=HOST, avoid=set())
    pods = [f"{HOST}:{first + number}" for number in range(PODS)]
    simulated = ("sim", "--host", HOST, "--sim-port", str(first), "--pods", str(PODS), "--model", MODEL)
    follows = ("--endpoints", ",".join(pods), "--model", MODEL, "--redis", redis, "--indexer-admin-port", str(admin))
    return pods, [
        [
            ProcessSpec(
                name="pods",
                argv=(*KVMESH, *simulated, "--tokenizer", str(TINY_MODEL)),
                ready=tuple(HttpReady(url=f"http://{pod}/health") for pod in pods),
            )
        ],
        [
            ProcessSpec(
                name="indexer",
                argv=(*KVMESH, "indexer", "--host", HOST, *follows),
                ready=(HttpReady(url=f"http://{HOST}:{admin}/readyz"),),
            )
        ],
    ]


async def _scene(pods: Sequence[str], redis: str) -> Scene:
    """Have one pod compute the prompt."""
    words = vocabulary_words(TINY_MODEL)
    prompts = make_prompt_set(PROMPT_TOKENS, model=MODEL, words=words, prefix_count=1, seed=SEED)
    body, holder = chat_body(MODEL, prompts.prefixes[0], "and now?"), pods[-1]
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{holder}{CHAT_PATH}", data=body, headers={"content-type": "application/json"}) as answer,
    ):
        answer.raise_for_status()
    return Scene(pods=pods, holder=holder, request=_messages(body), redis=redis)


def _messages(body: bytes) -> list[bytes]:
    headers, whole = ProcessingRequest(), ProcessingRequest()
    for key, value in {**HEADERS, ":path": CHAT_PATH}.items():
        headers.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    headers.protocol_config.request_body_mode = BodyMode.FULL_DUPLEX_STREAMED
    whole.request_body.body = body
    whole.request_body.end_of_stream = True
    return [headers.SerializeToString(), whole.SerializeToString()]


def _until_indexed(scene: Scene) -> None:
    """Start pickers until one finds the prompt; they fill the file system's cache, too."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not one_start(scene).is_right:
        if time.monotonic() > deadline:
            raise SystemExit(f"no picker names the pod that holds the prompt after {LIMIT_SECONDS:g} s")


def one_start(scene: Scene) -> Start:
    """Start a picker, wait for its first pick, and kill it."""
    moments = {name: _moment(code) for name, code in STEPS.items()}
    port = pick_free_port(host=HOST, avoid=set())
    began = time.perf_counter()
    process = subprocess.Popen(scene.picker(port))

    def reached(step: str) -> None:
        moments[step] = Moment(wall_ms=1e3 * (time.perf_counter() - began), cpu_ms=process_cpu_ms(process.pid))

    try:
        _until_listening(process, port)
        reached("listening")
        with grpc.insecure_channel(f"{HOST}:{port}") as channel:
            _until_serving(channel)
            reached("serving")
            picked = _pick(channel, scene.request)
            reached(FIRST_PICK)
    finally:
        process.kill()
        process.wait()
    moments[RESPAWNED], again = one_respawn(scene)
    return Start(
        moments=moments,
        is_right=picked.split(",")[0] == scene.holder,
        is_right_respawned=again.split(",")[0] == scene.holder,
    )


def one_respawn(scene: Scene) -> tuple[Moment, str]:
    """Kill a picker that is started again, and return when its successor picks, since the kill, and what."""
    port = pick_free_port(host=HOST, avoid=set())
    parent = subprocess.Popen([*scene.picker(port), "--respawn"])
    try:
        _first_pick(parent, port, scene)
        child = _child_of(parent)
        began = time.perf_counter()
        os.kill(child, signal.SIGKILL)
        while (successor := _child_of(parent)) in (child, 0):
            if parent.poll() is not None:
                raise SystemExit("the picker was not started again")
            time.sleep(POLL_SECONDS)
        picked = _first_pick(parent, port, scene)
        moment = Moment(wall_ms=1e3 * (time.perf_counter() - began), cpu_ms=process_cpu_ms(successor))
    finally:
        last = _child_of(parent)
        parent.kill()
        parent.wait()
        if last:
            os.kill(last, signal.SIGKILL)
    return moment, picked


def _child_of(parent: "subprocess.Popen[bytes]") -> int:
    """Return the process that serves; 0: there is none now."""
    return int(Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text(encoding="ascii").strip() or 0)


def _first_pick(process: "subprocess.Popen[bytes]", port: int, scene: Scene) -> str:
    _until_listening(process, port)
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        _until_serving(channel)
        return _pick(channel, scene.request)


def _moment(code: str) -> Moment:
    """Time code in a new interpreter with a picker's settings and without its exit work."""
    began = time.perf_counter()
    process = subprocess.Popen((sys.executable, "-c", f"import gc, os; gc.disable(); {code}; os._exit(0)"))
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"a step of the start fails: {code}")
    return Moment(wall_ms=1e3 * wall, cpu_ms=1e3 * (used.ru_utime + used.ru_stime))


def _until_listening(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        try:
            socket.create_connection((HOST, port)).close()
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the picker does not listen") from None
            time.sleep(POLL_SECONDS)
        else:
            return


def _until_serving(channel: grpc.Channel) -> None:
    """Wait as a probe would; a picker that listens answers at once whether it is ready."""
    health, deadline = health_pb2_grpc.HealthStub(channel), time.monotonic() + LIMIT_SECONDS
    while health.Check(health_pb2.HealthCheckRequest()).status != health_pb2.HealthCheckResponse.SERVING:
        if time.monotonic() > deadline:
            raise SystemExit("the picker is not ready")
        time.sleep(POLL_SECONDS)


def _pick(channel: grpc.Channel, request: Sequence[bytes]) -> str:
    """Return the endpoints that the first answer names."""
    for message in channel.stream_stream(f"/{PROCESSOR_SERVICE}/Process")(iter(request), timeout=LIMIT_SECONDS):
        answer = ProcessingResponse.FromString(message)
        for option in answer.request_headers.response.header_mutation.set_headers:
            if option.header.key == DESTINATION_HEADER:
                return str(option.header.raw_value, "ascii")
    return ""


def medians(starts: Sequence[Start]) -> dict[str, dict[str, float]]:
    """Return the medians by step, in their order."""
    return {
        step: {
            "wall_ms": round(statistics.median(each.moments[step].wall_ms for each in starts), 1),
            "cpu_ms": round(statistics.median(each.moments[step].cpu_ms for each in starts), 1),
        }
        for step in starts[0].moments
    }


def table(starts: Sequence[Start]) -> str:
    """One line for each step: milliseconds since the process was started, and since the step before."""
    lines, before = [f"{'done':24}{'ms':>8}{'':>8}{'CPU ms':>10}"], 0.0
    for step, at in medians(starts).items():
        since = "" if step == RESPAWNED else f"{at['wall_ms'] - before:+.0f}"
        lines.append(f"{step:24}{at['wall_ms']:8.0f}{since:>8}{at['cpu_ms']:10.0f}")
        before = at["wall_ms"]
    right = {
        FIRST_PICK: sum(each.is_right for each in starts),
        RESPAWNED: sum(each.is_right_respawned for each in starts),
    }
    for step, count in right.items():
        firsts = sorted(each.moments[step].wall_ms for each in starts)
        lines.append(f"{step} after {firsts[0]:.0f} to {firsts[-1]:.0f} ms, {count} of {len(starts)} right")
    return "\n".join(lines)


def result(starts: Sequence[Start], *, date: datetime) -> dict[str, Any]:
    """Return the record: medians, every start, the machine."""
    return {
        "date": date.isoformat(timespec="seconds"),
        "machine": machine(),
        "load_average": round(os.getloadavg()[0], 2),
        "versions": versions(),
        "kvmesh": revision(Path(__file__).parent),
        "medians": medians(starts),
        "first_picks_ms": [round(each.moments[FIRST_PICK].wall_ms, 1) for each in starts],
        "right": sum(each.is_right for each in starts),
        "respawned_first_picks_ms": [round(each.moments[RESPAWNED].wall_ms, 1) for each in starts],
        "respawned_right": sum(each.is_right_respawned for each in starts),
    }


if __name__ == "__main__":
    main()
