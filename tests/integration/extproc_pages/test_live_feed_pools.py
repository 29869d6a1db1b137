"""The live feed of a picker that serves several pools: the whole service, followed documents, pools that go."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.integration.live_picker import DEADLINE_SECONDS, Stream
from tests.integration.pools_picker import Mesh, pool_document, running_mesh


@asynccontextmanager
async def watching(mesh: Mesh, query: str = "") -> AsyncIterator[Stream]:
    async with mesh.picker.http.get(f"{mesh.picker.admin}/v1/live{query}") as response:
        assert response.status == 200, await response.text()
        yield Stream(response=response)


async def two_pools(mesh: Mesh) -> None:
    """Have the pools llm/a and llm/b with a pod each."""
    mesh.desk.put(pool_document("a", port=mesh.port), pool_document("b", port=mesh.port))
    for name in ("a", "b"):
        pod = await mesh.pod(name)
        await mesh.serves(f"llm/{name}", pod.address)


async def test_without_a_name_only_the_pools_come(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        await two_pools(mesh)
        async with watching(mesh) as stream:
            snapshot = (await stream.next()).data
            first, second = await stream.next(), await stream.next()

    assert set(snapshot) == {"version", "now", "process_id", "kvmesh", "pool", "pools", "picker", "docs"}
    assert snapshot["pool"] is None
    assert [line["pool"] for line in snapshot["pools"]] == ["llm/a", "llm/b"]
    assert [first.name, second.name] == ["pools", "pools"]
    assert [line["ready"] for line in first.data["pools"]] == [1, 1]


async def test_of_a_named_pool_come_its_own_requests_and_pods_only(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        await two_pools(mesh)
        async with watching(mesh, "?pool=llm/b") as stream:
            snapshot = (await stream.next()).data
            await mesh.pick(pool="llm/a")
            endpoint = await mesh.pick(pool="llm/b")
            decision = await stream.next("decision")
            pods = await stream.next("pods")

    assert (snapshot["pool"], len(snapshot["pods"]["pods"])) == ("llm/b", 1)
    assert decision.data["endpoint"] == endpoint
    assert [pod["address"] for pod in pods.data["pods"]] == [endpoint]
    assert [event.name for event in stream.seen].count("decision") == 1


async def test_prefixes_of_several_pools_need_a_name(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        await two_pools(mesh)
        async with mesh.picker.http.get(f"{mesh.picker.admin}/v1/prefixes") as response:
            assert response.status == 400
            assert "?pool=" in (await response.json())["error"]
        assert (await mesh.picker.get("/v1/prefixes?pool=llm/a"))["pool"] == "llm/a"


async def test_a_pool_that_goes_ends_its_streams_with_a_word(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        await two_pools(mesh)
        async with watching(mesh, "?pool=llm/b") as stream, watching(mesh, "?pool=llm/a") as other:
            await stream.next("snapshot")
            await other.next("snapshot")

            mesh.desk.remove("InferencePool", "llm/b")

            last = (await stream.rest())[-1]
            assert (last.name, last.data["why"]) == ("bye", "pool-gone")
            await other.next("pods")


async def test_the_only_pool_needs_no_name(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        mesh.desk.put(pool_document("a", port=mesh.port))
        pod = await mesh.pod("a")
        await mesh.serves("llm/a", pod.address)
        async with watching(mesh) as stream:
            assert (await stream.next()).data["pool"] == "llm/a"


async def test_a_picker_that_is_told_to_stop_says_goodbye_and_ends_in_time(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        await two_pools(mesh)
        response = await mesh.picker.http.get(f"{mesh.picker.admin}/v1/live?pool=llm/a")
        stream = Stream(response=response)
        await stream.next("snapshot")
        reading = asyncio.create_task(stream.rest(), name="rest")
    # the end of the block above stops the picker
    rest = await asyncio.wait_for(reading, DEADLINE_SECONDS)

    assert (rest[-1].name, rest[-1].data["why"]) == ("bye", "shutdown")
