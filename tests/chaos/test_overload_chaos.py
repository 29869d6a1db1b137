"""Parts fail while requests wait at the picker: each request is answered in time, and nothing of any is left behind.

A real Envoy, real pickers and a real Redis, which are killed; pods whose reports stop, and pods that go away.
"""

import asyncio
import json
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from operate.local.envoy_config import SocketAddress, fill_in, named, read_template
from operate.local.processes import find_envoy
from tests.e2e.overload_stack import OBJECTIVE, TENANT, OverloadStack, overload_stack
from tests.e2e.stack import START_SECONDS, eventually, free_ports, listens
from tests.integration.kv_redis import RedisServer
from tests.integration.overload_pods import HOST, MODEL, HeldPod, held_pods

QUEUE_SECONDS = 20.0  # the longest wait that the policy allows
SLACK_SECONDS = 10.0  # for everything else, on a busy machine
CLASSES = ("critical", "standard", "sheddable")
OPEN = "{kv2}picker:quota:open:*"
POLICY: dict[str, Any] = {
    "priorities": {
        "trustObjective": True,
        "classes": [{"name": name, "queueSeconds": QUEUE_SECONDS, "ttftSeconds": 1000} for name in CLASSES],
    },
    # a busy machine may be late with a scrape: a pod whose report is too old takes some of those who wait
    "load": {"staleAfterSeconds": 4},
    "quotas": [{"tenant": "acme", "concurrentRequests": 1000}],
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What became of one request."""

    status: int
    seconds: float


class Crowd:
    """Many clients at once."""

    def __init__(self, gateway: str, http: aiohttp.ClientSession) -> None:
        self._gateway, self._http = gateway, http
        self._tasks: list[asyncio.Task[Ended]] = []

    def send(self, count: int) -> None:
        """Send so many requests, of all classes in turn."""
        for number in range(count):
            self._tasks.append(asyncio.create_task(self._one(CLASSES[number % len(CLASSES)])))

    async def ended(self) -> Counter[int]:
        """Wait for every request; return how many got which status. None may take longer than it may wait."""
        ends = await asyncio.gather(*self._tasks)
        assert max(end.seconds for end in ends) < QUEUE_SECONDS + SLACK_SECONDS
        return Counter(end.status for end in ends)

    async def leave(self) -> None:
        """Go away, those that are not answered as well."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _one(self, objective: str) -> Ended:
        # its own prompt: a request under which a pod died is refused for a minute
        body = {"model": MODEL, "prompt": uuid.uuid4().hex, "max_tokens": 5}
        began = time.monotonic()
        headers = {OBJECTIVE: objective, TENANT: "acme"}
        async with self._http.post(f"{self._gateway}/v1/completions", json=body, headers=headers) as response:
            await response.read()
            return Ended(status=response.status, seconds=time.monotonic() - began)


@asynccontextmanager
async def crowd_at(gateway: str) -> AsyncIterator[Crowd]:
    """Yield clients, each with a connection of its own."""
    timeout = aiohttp.ClientTimeout(total=QUEUE_SECONDS + 3 * SLACK_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        crowd = Crowd(gateway, http)
        try:
            yield crowd
        finally:
            await crowd.leave()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def redis_of_all(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory, redis_of_all: RedisServer) -> AsyncIterator[OverloadStack]:
    folder, flags = tmp_path_factory.mktemp("stack"), ("--redis", redis_of_all.url)
    async with overload_stack(folder, *flags, policy=POLICY, pods=4) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def mesh(running: OverloadStack) -> AsyncIterator[OverloadStack]:
    """Four pods that are full, and answer at once what they get all the same."""
    for pod in running.pods:
        pod.release()
        pod.most_open = 0
    await running.fill()
    yield running
    running.free()
    await running.nothing_is_left()


@pytest_asyncio.fixture(loop_scope="module")
async def crowd(mesh: OverloadStack) -> AsyncIterator[Crowd]:
    async with crowd_at(mesh.stack.ready["gateway"]) as clients:
        yield clients


async def all_wait(mesh: OverloadStack, count: int) -> None:
    await eventually(mesh.queued, lambda queued: sum(queued.values()) == count)


async def test_when_half_the_pods_reports_freeze_the_rest_goes_through_them_a_few_at_a_time(
    mesh: OverloadStack, crowd: Crowd
) -> None:
    crowd.send(30)
    await all_wait(mesh, 30)
    for pod in mesh.pods[:2]:
        pod.is_mute = True
    assert await crowd.ended() == {200: 30}
    assert max(pod.most_open for pod in mesh.pods[:2]) <= 2
    assert max(pod.most_open for pod in mesh.pods[2:]) == 0  # they were full, and said so
    for pod in mesh.pods[:2]:
        pod.is_mute = False


async def test_when_all_reports_freeze_the_pool_goes_on(mesh: OverloadStack, crowd: Crowd) -> None:
    crowd.send(30)
    await all_wait(mesh, 30)
    for pod in mesh.pods:
        pod.is_mute = True
    crowd.send(30)  # and takes who comes
    assert await crowd.ended() == {200: 60}
    for pod in mesh.pods:
        pod.is_mute = False


async def test_when_half_the_pods_go_away_the_others_take_all_that_wait(mesh: OverloadStack, crowd: Crowd) -> None:
    for pod in mesh.pods:
        pod.free()
        pod.hold()
    crowd.send(12)
    await eventually(mesh.stack.open_bookings, lambda count: count == 12)
    await mesh.fill()
    crowd.send(30)
    await all_wait(mesh, 30)
    cut = 0
    for pod in mesh.pods[:2]:
        cut += pod.open_requests
        await pod.stop()
    mesh.free()
    ends = await crowd.ended()
    # what a pod has begun to work on is not done twice; everything else goes to one that lives
    assert ends[200] == 42 - cut
    assert sum(ends.values()) == 42
    for pod in mesh.pods[:2]:
        await pod.again()
    await eventually(mesh.stack.state, lambda state: all(pod["state"] == "ready" for pod in state["endpoints"]))


@pytest.mark.parametrize("trouble", ["gone", "frozen"])
async def test_when_redis_fails_those_who_wait_are_served_and_their_quota_comes_back(
    mesh: OverloadStack, crowd: Crowd, redis_of_all: RedisServer, trouble: str
) -> None:
    crowd.send(30)
    await all_wait(mesh, 30)
    fail, recover = {
        "gone": (redis_of_all.kill, redis_of_all.start),
        "frozen": (redis_of_all.freeze, redis_of_all.thaw),
    }[trouble]
    fail()
    crowd.send(12)
    await all_wait(mesh, 42)
    mesh.free()
    assert await crowd.ended() == {200: 42}
    recover()
    crowd.send(1)
    assert await crowd.ended() == {200: 43}
    await eventually(lambda: open_in(redis_of_all), lambda count: count == 0)


async def test_when_all_clients_leave_at_once_nothing_of_them_stays(
    mesh: OverloadStack, crowd: Crowd, redis_of_all: RedisServer
) -> None:
    for pod in mesh.pods:
        pod.free()
        pod.hold()
    crowd.send(20)
    await eventually(mesh.stack.open_bookings, lambda count: count == 20)
    await mesh.fill()
    crowd.send(100)
    await all_wait(mesh, 100)
    received = sum(len(pod.received) for pod in mesh.pods)
    await crowd.leave()
    await mesh.nothing_is_left()
    await eventually(lambda: open_in(redis_of_all), lambda count: count == 0)
    mesh.free()
    crowd.send(1)
    assert await crowd.ended() == {200: 1}
    assert sum(len(pod.received) for pod in mesh.pods) == received + 1


async def open_in(server: RedisServer) -> int:
    """Return how many requests Redis has as open: those whose lease is over do not count."""
    client: Any = server.client()
    seconds, microseconds = client.time()
    now_ms = seconds * 1000 + microseconds // 1000
    return sum(int(client.zcount(name, f"({now_ms}", "+inf")) for name in client.keys(OPEN))


# --- a replica --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One picker of several."""

    grpc: SocketAddress
    admin: str
    process: "subprocess.Popen[bytes]"
    http: aiohttp.ClientSession

    async def state(self) -> Any:
        async with self.http.get(f"{self.admin}/state") as response:
            return await response.json()

    async def queued(self) -> int:
        return sum(line["waiting"] for line in (await self.state())["classes"])

    async def bookings(self) -> int:
        return sum(pod["bookings"] for pod in (await self.state())["endpoints"])


@asynccontextmanager
async def replicas(
    tmp_path: Path, pods: Sequence[HeldPod], redis: RedisServer, http: aiohttp.ClientSession
) -> AsyncIterator[tuple[str, list[Replica]]]:
    """Two pickers behind one Envoy; yield the gateway and them."""
    gateway, envoy_admin, *ports = free_ports(6)
    addresses = [pod.address for pod in pods]
    config = tmp_path / "picker.json"
    load = {"staleAfterSeconds": 60}  # the pods share this process: 400 connections keep their reports back for seconds
    config.write_text(json.dumps({"policy": {**POLICY, "load": load}, "scrape_interval_ms": 50}))
    flags = ("--config", str(config), "--endpoints", ",".join(addresses), "--redis", redis.url)
    async with AsyncExitStack() as stack:
        started = []
        for number in range(2):
            grpc, admin = ports[2 * number : 2 * number + 2]
            command = (sys.executable, "-m", "operate", "extproc", *flags)
            process = subprocess.Popen([*command, "--grpc-port", str(grpc), "--admin-port", str(admin)])
            stack.callback(end, process)
            address = SocketAddress(host=HOST, port=grpc)
            started.append(Replica(grpc=address, admin=f"http://{HOST}:{admin}", process=process, http=http))
        envoy = fill_in(
            read_template("local.yaml"),
            gateway=SocketAddress(host=HOST, port=gateway),
            admin=SocketAddress(host=HOST, port=envoy_admin),
            picker=started[0].grpc,
            pods=[SocketAddress.parse(address) for address in addresses],
        )
        cluster = named(envoy["static_resources"]["clusters"], "picker")
        places = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        second = {"address": HOST, "port_value": started[1].grpc.port}
        places.append({"endpoint": {"address": {"socket_address": second}}})
        file = tmp_path / "envoy.json"
        file.write_text(json.dumps(envoy))
        quiet = ("--disable-hot-restart", "--concurrency", "1", "--log-level", "error")
        stack.callback(end, subprocess.Popen([str(find_envoy()), "-c", str(file), *quiet]))
        for port in (gateway, *ports):
            async with asyncio.timeout(START_SECONDS):
                while not await listens(port):
                    await asyncio.sleep(0.05)
        yield f"http://{HOST}:{gateway}", started


def end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


async def test_a_replica_that_is_killed_with_200_queued_takes_nobody_elses_requests_with_it(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    redis.start()
    try:
        async with (
            held_pods(2) as pods,
            aiohttp.ClientSession() as http,
            replicas(tmp_path, pods, redis, http) as (gateway, (victim, survivor)),
            crowd_at(gateway) as crowd,
        ):
            for pod in pods:
                pod.release()
                pod.fill()
            for replica in (victim, survivor):
                await eventually(replica.state, lambda state: all(pod["waiting"] == 100 for pod in state["endpoints"]))
            crowd.send(400)

            async def queued() -> tuple[int, int]:
                return await victim.queued(), await survivor.queued()

            # Envoy's turns; which of the two an odd one meets is not ours to say
            lost, kept = await eventually(queued, lambda counts: sum(counts) == 400)
            assert lost >= 199
            # Redis' answer may have been late for some: their leases follow
            await eventually(lambda: open_in(redis), lambda count: count == 400)
            victim.process.kill()
            # the dead one's open requests are nobody's quota any more; the survivor's still are
            await eventually(lambda: open_in(redis), lambda count: count == kept)
            assert await survivor.queued() == kept
            for pod in pods:
                pod.free()
            assert await crowd.ended() == {200: kept, 503: lost}
            await eventually(survivor.queued, lambda count: count == 0)
            await eventually(survivor.bookings, lambda count: count == 0)
            await eventually(lambda: open_in(redis), lambda count: count == 0)
    finally:
        redis.kill()
