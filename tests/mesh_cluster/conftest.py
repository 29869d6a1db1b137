"""The cluster that the tests share; it ends with them."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.kube_api.certificates import make_authority
from tests.mesh.istio_proxy import IstioProxy
from tests.mesh.kube import Kube, kube_in_background
from tests.mesh.secrets_server import secrets_server
from tests.mesh_cluster.cluster import Cluster, running_cluster, take_network


@pytest.fixture(scope="session")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """A Kubernetes control plane with Istio's definitions, in a network of its own."""
    try:
        take_network()
    except OSError as error:
        pytest.skip(str(error))
    with kube_in_background(tmp_path_factory.mktemp("kube")) as running:
        running.define("istio")
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def secrets(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Path]:
    """The socket from which proxies get their certificates."""
    folder = tmp_path_factory.mktemp("secrets")
    async with secrets_server(make_authority(folder), folder / "sds.sock"):
        yield folder / "sds.sock"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def started(
    kube: Kube, secrets: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Cluster, IstioProxy]]:
    """The cluster with a gateway that knows no pool yet."""
    async with running_cluster(kube, tmp_path_factory.mktemp("cluster"), secrets=secrets) as cluster:
        yield cluster
