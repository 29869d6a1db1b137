"""What the tests of a real mesh share: certificates, and a clear word where the programs cannot be built."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.mesh.go_programs import GoBuildError, go_program
from tests.mesh.kube import Kube, kube_in_background
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


@pytest.fixture(scope="session")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """A Kubernetes control plane with Istio's definitions; it ends with the tests."""
    with kube_in_background(tmp_path_factory.mktemp("kube")) as running:
        running.define("istio")
        yield running
