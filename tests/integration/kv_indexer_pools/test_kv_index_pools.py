"""An indexer that follows pools, over a real Redis and scripted pods: what belongs to one pool is found in it alone."""

import asyncio
import gc
import json
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
import pytest

from kv_indexer.service import IndexerService
from kv_indexer.watch.watch_index import WATCH_SECONDS
from kvmesh.metrics.exposition import Form
from tests.integration.kv_index import P
from tests.integration.kv_pools import MODEL, PoolMesh, eventually, eventually_async
from tests.integration.kv_redis import RedisServer
from tests.unit.kv_indexer_follow.kv_fakes import removed, stored


@pytest.fixture
async def mesh(redis_server: RedisServer) -> AsyncIterator[PoolMesh]:
    async with AsyncExitStack() as stack:
        mesh = PoolMesh(redis_server, stack)
        stack.push_async_callback(mesh.reader.close)
        yield mesh


async def page(service: IndexerService, path: str) -> str:
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://127.0.0.1:{service.admin_port}{path}") as answer,
    ):
        return await answer.text()


async def test_two_pools_with_the_same_model_never_see_each_others_blocks(mesh: PoolMesh) -> None:
    mesh.cluster.pool("red")
    mesh.cluster.pool("blue")
    red, blue = await mesh.pod(pool="red"), await mesh.pod(pool="blue")
    async with mesh.indexer():
        await red.publish(stored(1, 2, 3))
        await blue.publish(stored(1, 2))  # the same prompt, the same engine hashes
        await mesh.finds("red", {red: 3})
        await mesh.finds("blue", {blue: 2})
        await mesh.finds("", {})

        await blue.publish(stored(3, parent=2), removed(1))
        await mesh.finds("blue", {})
        assert await mesh.hits("red") == {red.endpoint: 3}


async def test_lost_parents_are_not_taken_from_another_pools_pods(mesh: PoolMesh) -> None:
    mesh.cluster.pool("red")
    mesh.cluster.pool("blue")
    red, blue = await mesh.pod(pool="red"), await mesh.pod(pool="blue")
    async with mesh.indexer() as service:
        await red.publish(stored(1, 2, 3))
        await mesh.finds("red", {red: 3})
        await blue.publish(stored(1))
        await blue.publish(stored(4, parent=3))  # whose parent blue never told of; red holds that hash
        await mesh.finds("blue", {blue: 1})
        await eventually_async(
            lambda: _has(service, 'kvmesh_indexer_batches_total{dp_rank="0"', blue.endpoint, "2"), True
        )
        assert await mesh.hits("blue") == {blue.endpoint: 1}


async def _has(service: IndexerService, name: str, endpoint: str, value: str) -> bool:
    lines = (await page(service, "/metrics")).splitlines()
    return any(line.startswith(name) and endpoint in line and float(line.split()[-1]) == float(value) for line in lines)


async def test_a_pod_that_moves_to_another_pool_takes_its_blocks_along_and_leaves_none_behind(mesh: PoolMesh) -> None:
    mesh.cluster.pool("red")
    mesh.cluster.pool("blue")
    pod = await mesh.pod(pool="red")
    async with mesh.indexer():
        await pod.publish(stored(1, 2))
        await mesh.finds("red", {pod: 2})

        mesh.cluster.pod(pod, pool="blue")
        await mesh.finds("blue", {pod: 2})
        assert await mesh.hits("red") == {}

        await pod.publish(stored(3, parent=2))
        await mesh.finds("blue", {pod: 3})


async def test_a_pod_that_moved_while_no_indexer_looked_leaves_nothing_behind_either(mesh: PoolMesh) -> None:
    mesh.cluster.pool("red")
    mesh.cluster.pool("blue")
    pod = await mesh.pod(pool="red")
    async with mesh.indexer():
        await pod.publish(stored(1, 2))
        await mesh.finds("red", {pod: 2})
    mesh.cluster.pod(pod, pool="blue")
    async with mesh.indexer():
        await mesh.finds("blue", {pod: 2})
        assert await mesh.hits("red") == {}


async def test_a_pool_takes_over_what_was_indexed_without_pools_and_the_other_way_round(mesh: PoolMesh) -> None:
    mesh.cluster.pool("red")
    pod = await mesh.pod(pool="red")
    async with mesh.indexer(endpoints=(pod.endpoint,), model=MODEL, documents=None):
        await pod.publish(stored(1, 2))
        await mesh.finds("", {pod: 2})
    async with mesh.indexer():
        await mesh.finds("red", {pod: 2})
        assert await mesh.hits("") == {}
    async with mesh.indexer(endpoints=(pod.endpoint,), model=MODEL, documents=None):
        await mesh.finds("", {pod: 2})
        assert await mesh.hits("red") == {}


async def test_pods_come_and_go_while_the_others_are_followed_on(mesh: PoolMesh) -> None:
    mesh.cluster.pool("red")
    old = await mesh.pod(pool="red")
    async with mesh.indexer() as service:
        await old.publish(stored(1))
        await mesh.finds("red", {old: 1})

        new = await mesh.pod(pool="red")
        await new.publish(stored(1))
        await new.publish(stored(2, parent=1))  # so that who asks for its last batch does not ask for the first
        await mesh.finds("red", {old: 1, new: 2})

        mesh.cluster.delete(old)
        await mesh.finds("red", {new: 2})
        await mesh.has_streams_of([new])
        await new.publish(stored(3, parent=2))
        await mesh.finds("red", {new: 3})
        assert old.endpoint not in await page(service, "/metrics")
        assert sum(1 for request in new.requests if request == 0) == 1  # its stream was never begun anew


async def test_a_pool_that_is_deleted_leaves_nothing_in_the_index(mesh: PoolMesh) -> None:
    mesh.cluster.pool("red")
    mesh.cluster.pool("blue")
    red, blue = await mesh.pod(pool="red"), await mesh.pod(pool="blue")
    async with mesh.indexer():
        await mesh.has_streams_of([red, blue])
        mesh.cluster.delete("red")
        await mesh.has_streams_of([blue])


async def test_a_pod_is_left_alone_until_it_is_ready_and_followed_on_when_it_no_longer_is(mesh: PoolMesh) -> None:
    mesh.cluster.pool("red")
    pod = await mesh.pod()
    mesh.cluster.pod(pod, pool="red", ready=False)
    async with mesh.indexer() as service:  # ready, although that pod is not
        assert await mesh.streams() == set()
        report = json.loads(await page(service, "/pools"))["pools"]
        assert [(each["address"], each["ready"], each["streams"]) for each in report[0]["endpoints"]] == [
            (pod.endpoint, False, [])
        ]

        mesh.cluster.pod(pod, pool="red", ready=True)
        await pod.publish(stored(1))
        await mesh.finds("red", {pod: 1})

        mesh.cluster.pod(pod, pool="red", ready=False)
        await pod.publish(stored(2, parent=1))
        await mesh.finds("red", {pod: 2})


async def test_an_indexer_that_knows_no_pools_yet_takes_nothing_from_the_index(mesh: PoolMesh) -> None:
    mesh.cluster.pool("red")
    pod = await mesh.pod(pool="red")
    async with mesh.indexer():
        await pod.publish(stored(1))
        await mesh.finds("red", {pod: 1})
    mesh.cluster.is_reachable = False
    client = mesh.redis.client()
    client.delete(f"{P}indexers")  # as after a long absence: nobody lists any endpoint
    async with mesh.indexer(ready=False, lease_seconds=1.0) as service:
        await eventually(lambda: dict(service.not_ready()), {"pools": "not known yet"})
        await eventually(lambda: client.exists(f"{P}heartbeat"), 0)  # two seconds without a tick
        assert (await mesh.hits("red"), client.exists(f"{P}stream:{pod.endpoint}#0")) == ({}, 1)

        mesh.cluster.come_back()
        await eventually(lambda: dict(service.not_ready()), {})
        assert pod.requests[-1] == 0  # from the last batch on: nothing was begun anew
        assert await mesh.hits("red") == {pod.endpoint: 1}


async def test_a_pools_model_is_what_it_declares_or_else_what_each_pod_says_first(mesh: PoolMesh) -> None:
    mesh.cluster.pool("declared", model="public-name")
    mesh.cluster.pool("learned")
    declared, learned = await mesh.pod(pool="declared", model="x"), await mesh.pod(pool="learned", model="y")
    learned.models = ["y", "alias"]
    async with mesh.indexer() as service:
        await declared.publish(stored(1))
        await learned.publish(stored(1))
        await mesh.finds("declared", {declared: 1}, model="public-name")
        await mesh.finds("learned", {learned: 1}, model="y")
        pools = json.loads(await page(service, "/pools"))["pools"]
        assert [(pool["name"], pool["model"], pool["models"]) for pool in pools] == [
            ("llm/declared", "public-name", ["public-name"]),
            ("llm/learned", None, ["y"]),
        ]

        mesh.cluster.pool("declared", model="other-name")
        await mesh.finds("declared", {declared: 1}, model="other-name")
        assert await mesh.hits("declared", model="public-name") == {}


async def test_pages_and_metrics_name_the_pool(mesh: PoolMesh, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    mesh.cluster.pool("red")
    pod = await mesh.pod(pool="red")
    async with mesh.indexer() as service:
        await pod.publish(stored(1, 2))
        await eventually_async(lambda: _blocks(service), {"GPU": 2})
        metrics = (await page(service, "/metrics")).splitlines()
        wanted = (
            f'kvmesh_indexer_pool_endpoint_info{{endpoint="{pod.endpoint}",pool="llm/red"}} 1.0',
            "kvmesh_indexer_pool_conflicts 0.0",
        )
        assert [line for line in wanted if line not in metrics] == []
    assert "Service llm/red: 1 endpoints, model as its pods say" in caplog.text


async def _blocks(service: IndexerService) -> dict[str, int]:
    blocks: dict[str, int] = json.loads(await page(service, "/pools"))["pools"][0]["endpoints"][0]["streams"][0][
        "blocks"
    ]
    return blocks


async def test_its_objects_are_set_aside_once_though_others_ask_meanwhile_whether_it_is_ready(
    mesh: PoolMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append("all"))
    mesh.cluster.pool("red")
    await mesh.pod(pool="red")
    async with mesh.indexer() as service:
        await eventually(lambda: not service.not_ready() and bool(frozen), True)
        await asyncio.sleep(2 * WATCH_SECONDS)
        assert frozen == ["all"]


async def test_metrics_of_thousands_of_pods_are_written_beside_the_streams(
    mesh: PoolMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh.cluster.pool("red")
    async with mesh.indexer() as service:
        under_way, go_on = threading.Event(), threading.Event()

        def render(_form: Form) -> bytes:
            under_way.set()
            return b"done" if go_on.wait(timeout=20.0) else b"the loop stood still"

        monkeypatch.setattr(service._telemetry, "render", render)
        asking = asyncio.create_task(page(service, "/metrics"))
        await eventually(under_way.is_set, True)
        go_on.set()
        assert await asking == "done"
