"""What the tests of a real mesh share: certificates, and a clear word where the programs cannot be built."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.mesh.go_programs import GoBuildError, go_program
from tests.mesh.secrets_server import Authority, secrets_server


@pytest.fixture(scope="session")
def istiod_program() -> Path:
    """The real istiod."""
    try:
        return go_program("istiod")
    except GoBuildError as error:
        pytest.exit(str(error), returncode=1)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Who signs the certificates of the mesh."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def secrets(
    istiod_program: Path, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Path]:
    """The socket from which proxies get their certificates."""
    socket = tmp_path_factory.mktemp("secrets") / "sds.sock"
    async with secrets_server(authority, socket):
        yield socket
