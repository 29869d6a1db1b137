"""What one client of the gateway, or one peer of the picker's own port, can do to the others."""

import pytest

from tests.attack.mesh import ATTACK_SECONDS, Mesh
from tests.attack.programs import uploads_held

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    ("program", "seconds"),
    [
        *((name, ATTACK_SECONDS) for name in ("small_frames", "many_streams_left", "uploads_given_up", "gzip_bombs")),
        ("uploads_held", uploads_held.SECONDS),
    ],
)
async def test_a_client_hurts_no_other(mesh: Mesh, program: str, seconds: float) -> None:
    await mesh.survives(program, seconds=seconds)


@pytest.mark.parametrize("program", ["packed_headers", "bytes_of_data", "body_before_headers"])
async def test_a_peer_of_the_picker_s_port_hurts_no_gateway(mesh: Mesh, program: str) -> None:
    await mesh.survives(program)
