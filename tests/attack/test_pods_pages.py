"""What one pod's HTTP answers and its claims can do to the others."""

import asyncio

import pytest

from tests.attack.mesh import Mesh

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("program", ["costly_pages", "answers_in_crumbs"])
async def test_a_pods_pages_hurt_no_other(mesh: Mesh, program: str) -> None:
    await mesh.survives(program)


async def test_a_pod_that_announces_anothers_stream_gets_nothing_and_the_other_keeps_all(mesh: Mesh) -> None:
    most: dict[str, int] = {}

    async def watch() -> None:
        while True:
            for endpoint, held in (await blocks(mesh)).items():
                most[endpoint] = max(most.get(endpoint, 0), held)
            await asyncio.sleep(0.05)

    before = await blocks(mesh)
    watching = asyncio.create_task(watch())
    await mesh.survives("stolen_stream")
    watching.cancel()
    after = await blocks(mesh)
    assert before[mesh.target.pods[0]] > 0
    assert most.get(mesh.target.hostile_pod, 0) == before.get(mesh.target.hostile_pod, 0)
    for pod in mesh.target.pods:
        assert after[pod] >= before[pod]


async def blocks(mesh: Mesh) -> dict[str, int]:
    """Return the blocks that the index holds of each pod."""
    async with mesh.stack.http.get(f"{mesh.stack.ready['indexer_admin']}/sources") as answer:
        sources = (await answer.json())["sources"]
    found: dict[str, int] = {}
    for source in sources:
        found[source["endpoint"]] = found.get(source["endpoint"], 0) + source["cached_blocks"]
    return found
