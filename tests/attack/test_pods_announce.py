"""What a pod gets that announces what is not its own."""

import asyncio

import pytest

from tests.attack.mesh import Mesh

pytestmark = pytest.mark.asyncio(loop_scope="session")

LOOK_SECONDS = 0.1


async def test_a_pod_that_announces_what_is_anothers_gets_nothing(mesh: Mesh) -> None:
    claims: set[str] = set()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(_watch_claims(mesh, claims))
        await mesh.survives("announces_others")
        watching.cancel()
    assert claims == set(mesh.target.pods)
    sources = (await _sources(mesh))["sources"]
    assert {source["state"] for source in sources if source["endpoint"] in mesh.target.pods} == {"live"}


async def _watch_claims(mesh: Mesh, claims: set[str]) -> None:
    """Collect the endpoints that hold blocks by the index."""
    while True:
        for source in (await _sources(mesh))["sources"]:
            if source["cached_blocks"]:
                claims.add(source["endpoint"])
        await asyncio.sleep(LOOK_SECONDS)


async def _sources(mesh: Mesh) -> dict[str, list[dict[str, str]]]:
    async with mesh.stack.http.get(f"{mesh.stack.ready['indexer_admin']}/sources") as answer:
        found: dict[str, list[dict[str, str]]] = await answer.json()
    return found
