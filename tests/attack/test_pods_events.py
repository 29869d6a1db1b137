"""What one pod's KV events can do to the others, and a tenant's salts."""

import asyncio

import pytest
import pytest_asyncio
import redis.asyncio

from tests.attack.mesh import ATTACK_SECONDS, Mesh, ended_attack, running_attack

pytestmark = pytest.mark.asyncio(loop_scope="session")
BUSY_MEMORY = 24 << 20  # of Redis, for some 150,000 blocks
BUSY_SECONDS = 20.0
LEFT_SHARE = 1.3  # of the indexer's memory, after its first long batches
SLOTS = 4096
MOST_CHANGES = 300  # of the registry, by two ranks in at most three rounds; each has the pickers read it anew


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def busy_mesh(mesh: Mesh) -> Mesh:
    """A mesh in which a pod has filled its cache once, and one has sent long batches, and both are gone.

    Processes do not give all of that back. The indexer keeps some 12 MiB after the first 15 long batches and 25 MiB
    after 200 of them: small objects that live on hold pages of the many that came with them.
    """
    most = mesh.memory()["redis"] + BUSY_MEMORY
    with running_attack("busy_pod", mesh.target) as pod:
        async with asyncio.timeout(BUSY_SECONDS):
            while mesh.memory()["redis"] < most:
                await asyncio.sleep(0.05)
        await asyncio.to_thread(ended_attack, pod)
    kept = LEFT_SHARE * mesh.memory()["indexer"]
    with running_attack("long_batches", mesh.target) as pod:
        await asyncio.sleep(ATTACK_SECONDS)
        await asyncio.to_thread(ended_attack, pod)
    async with asyncio.timeout(BUSY_SECONDS):
        while mesh.memory()["indexer"] > kept:
            await asyncio.sleep(0.05)
    return mesh


@pytest.mark.parametrize(
    "program", ["long_batches", "flood_of_events", "orphans_with_long_names", "long_salts", "hanging_replay"]
)
async def test_a_pods_events_hurt_no_other(busy_mesh: Mesh, program: str) -> None:
    await busy_mesh.survives(program)


async def test_a_pod_that_asks_for_slots_all_the_time_leaves_others_half_of_them(busy_mesh: Mesh) -> None:
    most = 0

    async def watch(index: redis.asyncio.Redis) -> None:
        nonlocal most
        while True:
            most = max(most, await index.hlen("{kv2}slots"))
            await asyncio.sleep(0.01)

    async with redis.asyncio.from_url(busy_mesh.stack.ready["redis"]) as index:
        watching = asyncio.create_task(watch(index))
        await busy_mesh.survives("slots_of_all_tiers")
        watching.cancel()
    print(f"slots taken: {most}")
    assert 32 < most <= SLOTS // 2 + 4


async def test_a_pod_that_skips_numbers_all_the_time_does_not_have_all_pickers_read_the_registry_anew(
    busy_mesh: Mesh,
) -> None:
    async with redis.asyncio.from_url(busy_mesh.stack.ready["redis"]) as index:
        before = int(await index.hget("{kv2}registry", "version") or 0)
        await busy_mesh.survives("skipped_numbers")
        changes = int(await index.hget("{kv2}registry", "version") or 0) - before
    print(f"changes of the registry: {changes}")
    assert 0 < changes < MOST_CHANGES
