"""Duration of the index's false claims, fault by fault.

    python -m bench.faults.run [--only NAME,…] [--json FILE]

Real publishers on real ZMQ sockets, two `kvmesh indexer` processes, a Redis, and a picker's reader that asks all the
time who holds what. Every fault goes on while the pods store and evict. A claim is false from the moment at which a pod
drops a block until no lookup counts it any more. Prints the longest such time of each fault, the longest time in which
a pod's blocks did not count although it held some, and the states that its stream went through.
"""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import redis
import uvloop
from aiohttp import web

from bench.faults.pod import MODEL, Pod, Replay, Way
from bench.faults.watch import Watch
from bench.redis_server import redis_program
from operate.local.ports import pick_free_port

PREFIX = b"{kv2}"
LIMIT_SECONDS = 2.0
SETTLE_SECONDS = 30.0
POLL_SECONDS = 0.02
BOTH = {"one", "two"}
INDEXER = (sys.executable, "-m", "operate", "indexer", "--model", MODEL)


class Redis:
    """A server that can be killed, and come back empty or as it was a while ago."""

    def __init__(self, folder: Path) -> None:
        port = pick_free_port(host="127.0.0.1", avoid=())
        self.url = f"redis://127.0.0.1:{port}/0"
        self.client: Any = redis.Redis.from_url(self.url)
        self._folder = folder
        options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        self._command = [str(redis_program()), *options]

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        while True:
            try:
                self.client.ping()
                return
            except (redis.ConnectionError, redis.exceptions.BusyLoadingError):
                time.sleep(0.01)

    def remember(self) -> None:
        """Save this state: a lagging replica's after a failover."""
        self.client.save()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        (self._folder / "dump.rdb").unlink(missing_ok=True)

    def stream(self, pod: Pod) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = self.client.hgetall(PREFIX + f"stream:{pod.endpoint}#0".encode())
        return found


class Mesh:
    """What the faults happen to: pods with and without a replay endpoint, and two indexers."""

    def __init__(self, folder: Path) -> None:
        def free() -> int:
            return pick_free_port(host="127.0.0.1", avoid=())

        self.server = Redis(folder)
        self.pod, self.other, self.mute = (
            Pod(name, ports=(free(), free(), free()), has_replay=name != "mute", seed=seed)
            for seed, name in enumerate(("pod", "other", "mute"))
        )
        self.pods = (self.pod, self.other, self.mute)
        self.indexers: dict[str, subprocess.Popen[bytes]] = {}
        self._log = folder / "indexers.log"

    def start_indexer(self, name: str) -> None:
        endpoints = ",".join(pod.endpoint for pod in self.pods)
        where = ["--redis", self.server.url, "--endpoints", endpoints, "--indexer-admin-port", "0"]
        with self._log.open("ab") as log:
            self.indexers[name] = subprocess.Popen([*INDEXER, *where, "--indexer-id", name], stdout=log, stderr=log)

    def end_indexer(self, name: str) -> None:
        process = self.indexers.pop(name)
        process.kill()
        process.wait()

    def end_indexers(self) -> None:
        for name in tuple(self.indexers):
            self.end_indexer(name)

    def owner(self, pod: Pod) -> str:
        return self.server.stream(pod).get(b"owner", b"").decode().rpartition("-")[0]

    def log(self) -> str:
        return self._log.read_text()[-4000:]

    async def becomes(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}\n{self.log()}")
            await asyncio.sleep(POLL_SECONDS)


async def nothing(mesh: Mesh) -> None:
    await mesh.pod.work(4)


async def lost_messages(mesh: Mesh) -> None:
    for step in range(200):
        mesh.pod.way = Way.LOST if step % 5 == 0 else Way.SENT
        await mesh.pod.work(0.03)
    mesh.pod.way = Way.SENT
    await mesh.pod.work(0.5)


async def lost_tail(mesh: Mesh) -> None:
    for _ in range(3):
        await lose_tail_of(mesh.pod)
        await asyncio.sleep(2.5)


async def lost_after_a_rest(mesh: Mesh) -> None:
    await mesh.pod.work(0.5)
    await mesh.pod.fill()
    await asyncio.sleep(6.4)
    await lose_tail_of(mesh.pod, work=0)
    await asyncio.sleep(3)


async def lose_tail_of(pod: Pod, *, work: float = 0.3) -> None:
    await pod.work(work)
    await pod.fill()
    pod.way = Way.LOST
    for prompt in range(3):
        await pod.evict(prompt, 40)
    pod.way = Way.SENT


async def replay_hangs(mesh: Mesh) -> None:
    mesh.pod.replay = Replay.HANGS
    await lose_tail_of(mesh.pod)
    await mesh.pod.work(12)


async def replay_refuses(mesh: Mesh) -> None:
    mesh.pod.refuse_replay()
    await lose_tail_of(mesh.pod)
    await mesh.pod.work(8)


async def replay_hangs_while_quiet(mesh: Mesh) -> None:
    mesh.pod.replay = Replay.HANGS
    await mesh.pod.fill()
    await asyncio.sleep(1.5)  # it is being asked by now
    await mesh.pod.work(6)


async def skipped_numbers(mesh: Mesh) -> None:
    for _ in range(6):
        mesh.pod.way = Way.SKIPPED
        await mesh.pod.step()
        mesh.pod.way = Way.SENT
        await mesh.pod.work(2)


async def skipped_all_the_time(mesh: Mesh) -> None:
    for step in range(400):
        mesh.pod.way = Way.SKIPPED if step % 2 else Way.SENT
        await mesh.pod.step()
        await asyncio.sleep(0.02)
    mesh.pod.way = Way.SENT
    await mesh.pod.work(4)


async def killed_indexer(mesh: Mesh) -> None:
    name = mesh.owner(mesh.pod)
    mesh.end_indexer(name)
    await mesh.pod.work(4)
    mesh.start_indexer(name)


async def frozen_indexer(mesh: Mesh) -> None:
    process = mesh.indexers[mesh.owner(mesh.pod)]
    process.send_signal(signal.SIGSTOP)
    await mesh.pod.work(4)
    process.send_signal(signal.SIGCONT)
    await mesh.pod.work(1)


async def all_indexers_killed(mesh: Mesh) -> None:
    mesh.end_indexers()
    await mesh.pod.work(5)
    for name in BOTH:
        mesh.start_indexer(name)
    await mesh.pod.work(5)


async def slow_consumer(mesh: Mesh) -> None:
    """The indexer stops for less than its pulse lasts: the publisher drops unsent batches."""
    mesh.pod.close()
    mesh.pod.send_limit = 20
    mesh.pod.restart()
    await mesh.pod.work(2)
    await mesh.pod.fill()
    process = mesh.indexers[mesh.owner(mesh.pod)]
    process.send_signal(signal.SIGSTOP)
    await mesh.pod.chatter(150, bytes_each=200_000)
    for prompt in range(3):
        await mesh.pod.evict(prompt, 40)
    process.send_signal(signal.SIGCONT)
    await asyncio.sleep(4)
    mesh.pod.send_limit = 0


async def backlog(mesh: Mesh) -> None:
    """More than the indexer can apply at once."""
    await mesh.pod.fill()
    for _ in range(3):
        await mesh.pod.chatter(4000, bytes_each=2000)
        await mesh.pod.work(1)


async def restarted_pod(mesh: Mesh) -> None:
    for _ in range(3):
        mesh.pod.restart()
        await mesh.pod.work(1.5)


async def redis_restarts_empty(mesh: Mesh) -> None:
    mesh.server.kill()
    mesh.server.forget()
    mesh.server.start()
    await mesh.pod.work(5)


async def redis_fails_over_to_a_replica_that_lags(mesh: Mesh) -> None:
    await mesh.pod.fill()
    await asyncio.sleep(0.2)
    mesh.server.remember()
    for prompt in range(3):
        await mesh.pod.evict(prompt, 40)
    await mesh.pod.work(1)
    mesh.server.kill()
    mesh.server.start()
    await mesh.pod.work(5)


async def lost_messages_without_replay(mesh: Mesh) -> None:
    for step in range(100):
        mesh.mute.way = Way.LOST if step % 20 == 0 else Way.SENT
        await mesh.mute.work(0.03)
    mesh.mute.way = Way.SENT
    await mesh.mute.work(0.5)


async def lost_tail_without_replay(mesh: Mesh) -> None:
    await lose_tail_of(mesh.mute)
    await asyncio.sleep(34)


FAULTS: dict[str, tuple[Callable[[Mesh], Awaitable[None]], bool]] = {  # -> whether the pod can be asked
    each.__name__.replace("_", "-"): (each, can_be_asked)
    for each, can_be_asked in (
        (nothing, True),
        (lost_messages, True),
        (lost_tail, True),
        (lost_after_a_rest, True),
        (replay_hangs, True),
        (replay_refuses, True),
        (replay_hangs_while_quiet, True),
        (skipped_numbers, True),
        (skipped_all_the_time, True),
        (killed_indexer, True),
        (frozen_indexer, True),
        (all_indexers_killed, True),
        (slow_consumer, True),
        (backlog, True),
        (restarted_pod, True),
        (redis_restarts_empty, True),
        (redis_fails_over_to_a_replica_that_lags, True),
        (lost_messages_without_replay, False),
        (lost_tail_without_replay, False),
    )
}


async def settle(mesh: Mesh, watch: Watch) -> None:
    """Begin the next fault with pods that all are believed, and two indexers."""
    for pod in mesh.pods:
        pod.restart()
    await mesh.becomes("not both indexers have streams", lambda: {mesh.owner(pod) for pod in mesh.pods} == BOTH)
    deadline = time.monotonic() + SETTLE_SECONDS
    while not all(map(watch.is_full, mesh.pods)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the index does not become exact\n{mesh.log()}")
        for pod in mesh.pods:  # events from before the first subscriber are published again
            if not watch.is_full(pod):
                await pod.clear()
                await pod.fill()
        await asyncio.sleep(0.3)


async def campaign(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    mesh = Mesh(folder)
    mesh.server.start()
    watch = Watch(mesh.server.url, mesh.pods)
    results: dict[str, dict[str, Any]] = {}
    async with AsyncExitStack() as stack:
        stack.callback(mesh.server.kill)
        stack.push_async_callback(watch.close)
        stack.callback(mesh.end_indexers)
        for pod in mesh.pods:
            runner = web.AppRunner(pod.application())
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", int(pod.endpoint.rpartition(":")[2])).start()
            pod.open()
        for name in BOTH:
            mesh.start_indexer(name)
        tasks = [asyncio.create_task(each) for each in (watch.run(), *(pod.serve_replay() for pod in mesh.pods))]
        stack.callback(lambda: [task.cancel() for task in tasks])
        for name in names:
            fault, can_be_asked = FAULTS[name]
            await settle(mesh, watch)
            watch.reset()
            began = time.monotonic()
            await fault(mesh)
            victim = mesh.pod if can_be_asked else mesh.mute
            results[name] = {
                "can_be_asked": can_be_asked,
                "false_seconds": round(watch.longest_false[victim.name], 2),
                "false_seconds_others": round(
                    max(seconds for pod, seconds in watch.longest_false.items() if pod != victim.name), 2
                ),
                "unused_seconds": round(watch.longest_unused[victim.name], 2),
                "states": watch.states[victim.name],
                "looks_a_second": round(watch.looks / (time.monotonic() - began)),
                "failed_looks": watch.failed_looks,
            }
            show(name, results[name])
    return results


def show(name: str, found: dict[str, Any]) -> None:
    states = found["states"]
    shown = " > ".join(states if len(states) < 7 else [*states[:3], f"… {len(states) - 5} more …", *states[-2:]])
    print(f"{name:40} {found['false_seconds']:6.2f} {found['unused_seconds']:8.2f}   {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(FAULTS), help="names, comma-separated")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    print(f"{'fault':40} false s unused s   states of the pod's stream")
    with tempfile.TemporaryDirectory() as folder:
        results = uvloop.run(campaign(Path(folder), options.only.split(",")))
    longest = max(found["false_seconds"] for found in results.values() if found["can_be_asked"])
    print(f"\n{time.monotonic() - began:.0f} s; the longest false claim of a pod that can be asked: {longest:.2f} s")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if longest > LIMIT_SECONDS:
        sys.exit(f"more than {LIMIT_SECONDS:g} s")


if __name__ == "__main__":
    main()
