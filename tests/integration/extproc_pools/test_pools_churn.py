"""Everything changes while requests run: pods, readiness, policies, pools. Nobody is lost, nothing is left over."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.integration.hermetic_envoy import Refused, Routed
from tests.integration.pools_picker import Mesh, pod_document, policy_document, pool_document, running_mesh, send

CHANGES = 150
CLIENTS = 12
POOLS = ("a", "b", "c")
# what a client may be told while pools and pods come and go; anything else, or no answer, is a defect
REASONS = {"unknown-pool", "no-ready-endpoint", "queue-full", "queue-timeout", "displaced", "shed", "quota-exceeded"}


def some_policy(chance: random.Random) -> dict[str, Any]:
    """Return a policy's spec; every one is good."""
    return chance.choice(
        (
            {"load": {"overload": {"enabled": chance.random() < 0.5, "queueRequests": chance.randint(1, 50)}}},
            {"scoring": {"strategy": chance.choice(("kv-aware", "round-robin", "least-request"))}},
            {"priorities": {"defaultClass": chance.choice(("critical", "standard", "sheddable"))}},
            {"quotas": [{"tenant": "*", "concurrentRequests": chance.randint(1, 20)}]},
            {"failureMode": chance.choice(("FailOpen", "FailClose"))},
            {"prefixCache": {"copyHotPrefixes": chance.random() < 0.5}},
        )
    )


def change(mesh: Mesh, addresses: list[str], chance: random.Random) -> None:
    """Change one thing."""
    pool, address = chance.choice(POOLS), chance.choice(addresses)
    name = f"llm/pod-{address.rpartition(':')[0].replace('.', '-')}"
    kind = chance.randrange(6)
    if kind == 0:
        mesh.desk.put(pod_document(address, pool=pool, ready=chance.random() < 0.8))
    elif kind == 1:
        mesh.desk.put(pod_document(address, pool=pool, terminating=chance.random() < 0.5))
    elif kind == 2 and mesh.desk.has("Pod", name):
        mesh.desk.remove("Pod", name)
    elif kind == 3 and mesh.desk.has("InferencePool", f"llm/{pool}"):
        mesh.desk.remove("InferencePool", f"llm/{pool}")
    elif kind == 4:
        mesh.desk.put(pool_document(pool, port=mesh.port))
    else:
        mesh.desk.put(policy_document(f"p{chance.randrange(3)}", pool=pool, **some_policy(chance)))


async def client(mesh: Mesh, chance: random.Random, stop: asyncio.Event, told: list[Routed | Refused]) -> None:
    while not stop.is_set():
        async with mesh.exchange(pool=f"llm/{chance.choice(POOLS)}") as exchange:
            found = await send(exchange, prompt=f"{chance.random()} words " * chance.randint(1, 300))
            told.append(found)
            if isinstance(found, Routed):
                for _ in range(chance.randrange(20)):  # the response takes a few turns
                    await asyncio.sleep(0)
                await exchange.response(b"{}")


async def test_every_request_gets_an_answer_whatever_changes_meanwhile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(6)
    async with running_mesh(tmp_path, shares_load=True) as mesh:
        mesh.desk.put(*[pool_document(pool, port=mesh.port) for pool in POOLS])
        pods = [await mesh.pod(POOLS[i % 3]) for i in range(6)]
        addresses = [pod.address for pod in pods]
        for i, pool in enumerate(POOLS):
            await mesh.serves(f"llm/{pool}", addresses[i], addresses[i + 3])
        stop, told = asyncio.Event(), list[Routed | Refused]()
        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(client(mesh, random.Random(number), stop, told), name=f"client {number}")
            for _ in range(CHANGES):
                change(mesh, addresses, chance)
                seen = len(told)
                while len(told) < seen + 3:
                    await asyncio.sleep(0.001)
            stop.set()

        assert not [record.getMessage() for record in caplog.records if record.exc_info]
        assert {found.reason for found in told if isinstance(found, Refused)} <= REASONS
        assert any(isinstance(found, Routed) for found in told)
        for i, address in enumerate(addresses):
            mesh.desk.put(pod_document(address, pool=POOLS[i % 3]))
        mesh.desk.put(*[pool_document(pool, port=mesh.port) for pool in POOLS])
        for i in range(3):
            mesh.desk.put(policy_document(f"p{i}", pool=POOLS[i]))
        for i, pool in enumerate(POOLS):
            await mesh.serves(f"llm/{pool}", addresses[i], addresses[i + 3])
        pages = await mesh.eventually("/pools", lambda pools: not any(each["open_requests"] for each in pools))
        assert [(each["open_requests"], each["waiting"]) for each in pages] == [(0, 0)] * 3
        for i, pool in enumerate(POOLS):
            assert await mesh.pick(pool=f"llm/{pool}") in (addresses[i], addresses[i + 3])
