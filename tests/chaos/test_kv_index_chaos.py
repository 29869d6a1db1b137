"""Kill whatever can be killed, at random and often; afterwards the index must be what the pods hold.

Two indexers, four pods and one Redis without persistence, each a process of its own, killed with SIGKILL and started
again while batches keep coming. `KVMESH_CHAOS_KILLS` and `KVMESH_CHAOS_SEED` change the run.
"""

import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from kvmesh.redis.keys import PREFIX
from tests.integration.kv_redis import RedisServer, free_port

KILLS = int(os.environ.pop("KVMESH_CHAOS_KILLS", "200"))
SEED = int(os.environ.pop("KVMESH_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
BATCHES = 100 * KILLS  # at least so many are published in all
PODS, INDEXERS = 4, 2
RATE = 80.0  # batches a second and pod
WEIGHTS = [10, *[12] * PODS, *[21] * INDEXERS]  # Redis, pods, indexers: how often each is the victim
PAUSES = [0.0, 0.1, 0.3, 0.6, 1.5]  # seconds between two kills: now and then enough to recover, mostly not
SETTLE_SECONDS = 90.0
TEST_SECONDS = 600 + KILLS  # three times to settle, the last verdict, and about half a second a kill
KVMESH = (sys.executable, "-m", "operate")


@dataclass(slots=True, kw_only=True, eq=False)
class Process:
    """One that is started again each time it was killed."""

    name: str
    command: Sequence[str]
    log: Path
    seeded: bool = False  # each life has a seed of its own
    lives: int = 0
    popen: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        self.lives += 1
        seed = ["--seed", str(SEED + self.lives)] if self.seeded else []
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen([*self.command, *seed], stdout=log, stderr=log)

    def kill(self) -> None:
        if self.popen is not None:
            self.popen.kill()
            self.popen.wait(10)
            self.popen = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Where a pod listens, in all its lives."""

    http: int
    events: int
    replay: int

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.http}"

    def ask(self, path: str) -> Any:
        """Raise OSError while the pod is not up."""
        with urllib.request.urlopen(f"http://{self.endpoint}{path}", timeout=10) as answer:
            return json.load(answer)

    def batches(self) -> int:
        """How many its present life has published."""
        try:
            return int(self.ask("/batches"))
        except OSError:
            return 0


def eventually(trouble: Callable[[], str]) -> None:
    """Wait until there is no trouble any more."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while found := trouble():
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


@contextmanager
def running(processes: Sequence[Process]) -> Iterator[None]:
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            process.kill()


def pod(ports: Ports, log: Path) -> Process:
    where = ("--http", str(ports.http), "--events", str(ports.events), "--replay", str(ports.replay))
    command = (sys.executable, "-m", "tests.chaos.publisher", "--rate", str(RATE), *where)
    return Process(name="pod", command=command, log=log, seeded=True)


def indexer(endpoints: Sequence[str], url: str, log: Path) -> Process:
    where = ("--redis", url, "--endpoints", ",".join(endpoints), "--indexer-admin-port", str(free_port()))
    return Process(name="indexer", command=(*KVMESH, "indexer", "--model", "chaos", *where), log=log)


def index_of(client: "redis.Redis", endpoint: str) -> tuple[str, Counter[str]]:
    """State, and engine hash -> references, counted from the raw keys."""
    stream: Any = client.hgetall(PREFIX + f"stream:{endpoint}#0".encode())
    held: Counter[str] = Counter()
    for name, slot in stream.items():
        if name.startswith((b"slot:", b"old:")):
            blocks: Any = client.hgetall(PREFIX + b"h" + slot)
            held.update({engine_hash.hex(): int(value[8:] or b"1") for engine_hash, value in blocks.items()})
    return stream.get(b"state", b"unknown").decode(), held


def differences(client: "redis.Redis", pods: Sequence[Ports]) -> str:
    """What the index says of the pods, which are at rest, and is not so."""
    wrong = []
    for ports in pods:
        try:
            truth = Counter(ports.ask("/held"))
            state, held = index_of(client, ports.endpoint)
        except (OSError, redis.RedisError) as error:
            return repr(error)
        if state != "live":
            wrong.append(f"{ports.endpoint} is {state}")
        elif held != truth:
            wrong.append(f"{ports.endpoint}: {len(held - truth)} too many, {len(truth - held)} missing")
    return "; ".join(wrong)


def at_rest(pods: Sequence[Ports]) -> str:
    """Ask each pod to publish no more."""
    try:
        for ports in pods:
            ports.ask("/pause")
    except OSError as error:
        return repr(error)
    return ""


@pytest.mark.timeout(TEST_SECONDS)
def test_the_index_is_what_the_pods_hold_after_random_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    randomness = random.Random(SEED)
    server = RedisServer(tmp_path)
    ports = [Ports(http=free_port(), events=free_port(), replay=free_port()) for _ in range(PODS)]
    pods = [pod(of_pod, tmp_path / f"pod{number}.log") for number, of_pod in enumerate(ports)]
    endpoints = [of_pod.endpoint for of_pod in ports]
    indexers = [indexer(endpoints, server.url, tmp_path / f"indexer{number}.log") for number in range(INDEXERS)]
    published = 0  # by lives that are over
    killed: Counter[str] = Counter()

    def too_few() -> str:
        so_far = published + sum(of_pod.batches() for of_pod in ports)
        return "" if so_far >= BATCHES else f"only {so_far} batches yet"

    server.start()
    try:
        with running([*pods, *indexers]):
            for _ in range(KILLS):
                (victim,) = randomness.choices([None, *pods, *indexers], weights=WEIGHTS)
                if victim is None:
                    server.kill()
                    server.start()
                else:
                    if victim in pods:
                        published += ports[pods.index(victim)].batches()
                    victim.kill()
                    victim.start()
                killed[victim.name if victim else "redis"] += 1
                time.sleep(randomness.choice(PAUSES))
            eventually(too_few)
            eventually(lambda: at_rest(ports))
            published += sum(of_pod.batches() for of_pod in ports)
            eventually(lambda: differences(server.client(), ports))
            verify = [*KVMESH, "index", "verify", "--redis", server.url]
            verdict = subprocess.run(verify, capture_output=True, text=True, timeout=120, check=False)
    finally:
        server.kill()

    assert verdict.returncode == 0, verdict.stdout + verdict.stderr
    assert sum(killed.values()) == KILLS
    with capsys.disabled():
        print(f"\nseed {SEED}: {dict(killed)}, {published} batches; {verdict.stdout.strip().splitlines()[-1]}")
