"""A pool scaled to zero behind two pickers over one real Redis: each has its own waiting requests, all get the pod."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tests.integration.hermetic_envoy import Refused, Routed
from tests.integration.kv_redis import RedisServer
from tests.integration.pools_picker import Mesh, pod_document, policy_document, pool_document, running_mesh, send

AUTOSCALE = {"both": {"minReplicas": 0, "waitFromZeroSeconds": 60}}


@asynccontextmanager
async def two_replicas(folder: Path, server: RedisServer) -> AsyncIterator[tuple[Mesh, Mesh]]:
    settings: dict[str, Any] = {"redis_url": server.url, "shares_load": True, "index_timeout_seconds": 5.0}
    async with running_mesh(folder, **settings) as one:
        one.desk.put(pool_document("a", port=one.port), policy_document("p", pool="a", autoscale=AUTOSCALE))
        async with running_mesh(folder, *one.desk.documents, **settings) as other:
            for mesh in (one, other):
                await mesh.eventually("/state?pool=llm/a", lambda state: state["replicas"]["others"] == 1)
                await mesh.eventually("/state?pool=llm/a", lambda state: bool(state["scale"]))
            yield one, other


async def waiting(mesh: Mesh, count: int) -> None:
    """Wait until so many requests wait for the first pod at a picker."""
    await mesh.eventually(
        "/state?pool=llm/a", lambda state: sum(line["waiting_for_pod"] for line in state["classes"]) == count
    )


async def ask(mesh: Mesh, stack: AsyncExitStack) -> Routed | Refused:
    """Open a request that ends with the stack."""
    exchange = await stack.enter_async_context(mesh.exchange(pool="llm/a"))
    found: Routed | Refused = await send(exchange)
    return found


async def test_requests_of_both_pickers_get_the_first_pod_and_a_picker_that_stops_answers_its_own(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with two_replicas(tmp_path, redis_server) as (one, other), AsyncExitStack() as requests:
        sent = [asyncio.create_task(ask(mesh, requests)) for mesh in (one, one, other)]
        await waiting(one, 2)
        await waiting(other, 1)
        for mesh in (one, other):
            await mesh.eventually("/state?pool=llm/a", lambda state: state["scale"][0]["wanted"] == 1)
        pod = await one.pod("a")
        other.desk.put(pod_document(pod.address, pool="a"))
        found = await asyncio.gather(*sent)
        assert [each.endpoints[0] for each in found if isinstance(each, Routed)] == [pod.address] * 3
        for mesh in (one, other):
            await waiting(mesh, 0)


async def test_a_first_pod_gets_a_few_requests_until_it_has_reported(tmp_path: Path, redis_server: RedisServer) -> None:
    async with running_mesh(tmp_path, redis_url=redis_server.url) as mesh, AsyncExitStack() as requests:
        mesh.desk.put(pool_document("a", port=mesh.port), policy_document("p", pool="a", autoscale=AUTOSCALE))
        await mesh.eventually("/state?pool=llm/a", lambda state: bool(state.get("scale")))
        sent = [asyncio.create_task(ask(mesh, requests)) for _ in range(20)]
        await waiting(mesh, 20)
        pod = await mesh.pod("a", is_mute=True)
        await mesh.eventually(
            "/state?pool=llm/a", lambda state: sum(each["bookings"] for each in state["endpoints"]) > 0
        )
        await mesh.eventually("/state?pool=llm/a", lambda state: pod.scrapes > 0)
        state = await mesh.picker.get("/state?pool=llm/a")
        assert 1 <= sum(each["bookings"] for each in state["endpoints"]) <= 4
        pod.is_mute = False
        found = await asyncio.gather(*sent)
        assert {each.endpoints[0] for each in found if isinstance(each, Routed)} == {pod.address}
        assert all(isinstance(each, Routed) for each in found)


async def test_a_picker_that_stops_answers_those_that_wait_and_the_other_one_keeps_its_own(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    settings: dict[str, Any] = {"redis_url": redis_server.url, "shares_load": True, "drain_seconds": 0.0}
    async with running_mesh(tmp_path, **settings) as one, AsyncExitStack() as requests:
        one.desk.put(pool_document("a", port=one.port), policy_document("p", pool="a", autoscale=AUTOSCALE))
        await one.eventually("/state?pool=llm/a", lambda state: bool(state.get("scale")))
        kept = asyncio.create_task(ask(one, requests))
        await waiting(one, 1)
        async with running_mesh(tmp_path, *one.desk.documents, **settings) as other:
            await other.eventually("/state?pool=llm/a", lambda state: bool(state.get("scale")))
            sent = asyncio.create_task(ask(other, requests))
            await waiting(other, 1)
        stopped = await sent
        assert isinstance(stopped, Refused)
        assert (stopped.status, stopped.reason) == (503, "picker-stopping")
        assert stopped.retry_after in ("1", "2")  # at once, with some jitter
        assert not kept.done()
        pod = await one.pod("a")
        found = await kept
        assert isinstance(found, Routed)
        assert found.endpoints[0] == pod.address


async def test_a_pool_that_is_deleted_answers_those_that_wait_for_its_first_pod(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with running_mesh(tmp_path, redis_url=redis_server.url) as mesh, AsyncExitStack() as requests:
        mesh.desk.put(pool_document("a", port=mesh.port), policy_document("p", pool="a", autoscale=AUTOSCALE))
        await mesh.eventually("/state?pool=llm/a", lambda state: bool(state.get("scale")))
        sent = asyncio.create_task(ask(mesh, requests))
        await waiting(mesh, 1)
        mesh.desk.remove("InferencePool", "llm/a")
        found = await sent
        assert isinstance(found, Refused)
        assert (found.status, found.reason) == (503, "no-ready-endpoint")


async def test_a_pool_that_comes_back_without_pods_has_requests_wait_again(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with running_mesh(tmp_path, redis_url=redis_server.url) as mesh, AsyncExitStack() as requests:
        policy = policy_document("p", autoscale=AUTOSCALE)  # the namespace's: it stays
        mesh.desk.put(pool_document("a", port=mesh.port), pool_document("b", port=mesh.port), policy)
        await mesh.eventually("/state?pool=llm/a", lambda state: bool(state.get("scale")))
        pod = await mesh.pod("a")
        held = await ask(mesh, requests)  # the pool stays there for it
        assert isinstance(held, Routed)
        mesh.desk.remove("Pod", f"llm/pod-{pod.address.rpartition(':')[0].replace('.', '-')}")
        mesh.desk.remove("InferencePool", "llm/a")
        await mesh.eventually("/pools", lambda lines: [line["pool"] for line in lines] == ["llm/b"])
        mesh.desk.put(pool_document("a", port=mesh.port))
        await mesh.eventually("/state?pool=llm/a", lambda state: bool(state.get("scale")))
        sent = asyncio.create_task(ask(mesh, requests))
        await waiting(mesh, 1)
        mesh.desk.put(pod_document(pod.address, pool="a"))
        found = await sent
        assert isinstance(found, Routed)
        assert found.endpoints[0] == pod.address
