"""What one client of the gateway, or one peer of the picker's own port, can do to the others."""

import pytest

from tests.attack.mesh import Mesh

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    "program", ["small_frames", "many_streams_left", "uploads_given_up", "uploads_held", "gzip_bombs"]
)
async def test_a_client_hurts_no_other(mesh: Mesh, program: str) -> None:
    await mesh.survives(program)


@pytest.mark.parametrize("program", ["packed_headers", "bytes_of_data", "body_before_headers"])
async def test_a_peer_of_the_picker_s_port_hurts_no_gateway(mesh: Mesh, program: str) -> None:
    await mesh.survives(program)
