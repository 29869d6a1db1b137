"""What one pod's HTTP answers can do to the others."""

import pytest

from tests.attack.mesh import Mesh

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("program", ["costly_pages", "answers_in_crumbs"])
async def test_a_pods_pages_hurt_no_other(mesh: Mesh, program: str) -> None:
    await mesh.survives(program)
