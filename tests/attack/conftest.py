"""One mesh for all attacks: each must leave it as it found it."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.attack.mesh import Mesh, attacked_mesh


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """A mesh with the settings that kvmesh ships with."""
    async with attacked_mesh(tmp_path_factory.mktemp("mesh")) as running:
        yield running
