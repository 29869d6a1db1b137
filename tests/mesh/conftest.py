"""What the tests of a real mesh share: control planes, certificates, and a clear word where they cannot be built."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.stack import Stack, running_stack, simulated_pods
from tests.kube_api.certificates import Authority, make_authority
from tests.mesh.go_programs import STAMPS, GoBuildError, go_program
from tests.mesh.install_checks import PODS_COUNT, SETTINGS
from tests.mesh.kube import Kube, kube_in_background
from tests.mesh.secrets_server import secrets_server
from tests.mesh.site import Site, made_site


@pytest.fixture(scope="session", autouse=True)
def _programs() -> None:
    """End with a clear line where a program cannot be built; `make test-mesh` has built them before."""
    try:
        for name in STAMPS:
            go_program(name)
    except GoBuildError as error:
        pytest.exit(str(error), returncode=1)


@pytest.fixture(scope="session")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """A Kubernetes control plane with the definitions of Istio and of gateways; it ends with the tests."""
    with kube_in_background(tmp_path_factory.mktemp("kube")) as running:
        running.define("istio", "gateway")
        yield running


@pytest.fixture
def site(kube: Kube) -> Iterator[Site]:
    """A pool, a gateway and an installation of the test's own."""
    with made_site(kube) as made:
        yield made


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Who signs the certificates of the mesh."""
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def secrets(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Path]:
    """The socket from which proxies get their certificates."""
    socket = tmp_path_factory.mktemp("secrets") / "sds.sock"
    async with secrets_server(authority, socket):
        yield socket


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Pods that stay for a module's tests; each case has a mesh of its own before them."""
    async with (
        simulated_pods(PODS_COUNT, own_hosts=True) as pods,
        running_stack(tmp_path_factory.mktemp("mesh"), endpoints=list(pods), settings=SETTINGS) as running,
    ):
        yield running
