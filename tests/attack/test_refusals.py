"""Requests that the picker refuses leave nothing of their bodies, although their decisions are remembered."""

import asyncio
import gzip
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.attack.mesh import Mesh, attacked_mesh
from tests.attack.programs.gzip_bombs import PLAIN

REQUESTS = 60
MOST_MORE_BYTES = 100 << 20
POLICY = {"quotas": [{"tenant": "blocked", "concurrentRequests": 0}], "models": {"onlyListed": True}}
OVER_QUOTA = {"x-gateway-inference-fairness-id": "blocked"}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """A mesh that refuses a tenant, and all models but one."""
    async with attacked_mesh(tmp_path_factory.mktemp("refusing"), policy=POLICY) as running:
        yield running


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [(429, PLAIN, OVER_QUOTA), (404, PLAIN.replace(b"tiny", b"none"), {})],
    ids=["over quota", "unknown model"],
)
async def test_refused_bombs_leave_no_memory_taken(
    mesh: Mesh, status: int, body: bytes, headers: dict[str, str]
) -> None:
    sent = {"content-encoding": "gzip", "content-type": "application/json"} | headers
    packed = gzip.compress(body)

    async def refused(times: int) -> None:
        for _ in range(times):
            answer = await mesh.stack.send("POST", "/v1/chat/completions", headers=sent, data=packed)
            assert answer.status == status, answer.body

    await refused(2)  # what is made once is not counted
    before = mesh.memory()["extproc"]
    await refused(REQUESTS)
    most = before + MOST_MORE_BYTES
    async with asyncio.timeout(20):
        while (after := mesh.memory()["extproc"]) > most:
            await asyncio.sleep(0.1)
    print(f"{before >> 20} MiB before, {after >> 20} MiB after")
