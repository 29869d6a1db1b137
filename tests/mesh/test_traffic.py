"""What `kvmesh install` renders, on a real istiod and Envoys like istio-proxy's, before the real picker and index."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from operate.install.plan import BodyMode, FailureMode, Mode
from tests.e2e.stack import Stack, running_stack, simulated_pods
from tests.kube_api.certificates import Authority
from tests.mesh.install_checks import CHECKS, PODS_COUNT, SETTINGS, Way
from tests.mesh.installations import FILTER_MODES, Installation
from tests.mesh.istio_envoys import ENVOYS
from tests.mesh.real_way import MeshCase, RealWay, real_way

CASES = (
    *(
        MeshCase(installation=Installation(minor=31, mode=mode), envoy=envoy)
        for mode in FILTER_MODES
        for envoy in ENVOYS
    ),
    MeshCase(installation=Installation(minor=31, mode=Mode.GATEWAY, is_https=True)),
    MeshCase(installation=Installation(minor=31, mode=Mode.GATEWAY, body_mode=BodyMode.BUFFERED)),
    MeshCase(installation=Installation(minor=31, mode=Mode.GATEWAY, failure_mode=FailureMode.FAIL_OPEN)),
    # Istio was upgraded, the installation not yet
    *(MeshCase(installation=Installation(minor=minor, mode=Mode.GATEWAY)) for minor in (28, 30)),
)
BY_NAME = {str(each): each for each in CASES}
assert len(BY_NAME) == len(CASES)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def behind(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("mesh")
    async with (
        simulated_pods(PODS_COUNT, own_hosts=True) as pods,  # of one IP istiod knows one endpoint
        running_stack(folder, endpoints=list(pods), settings=SETTINGS) as stack,
    ):
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def through(
    request: pytest.FixtureRequest,
    behind: Stack,
    secrets: Path,
    authority: Authority,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[RealWay]:
    """One installation before the mesh."""
    case = BY_NAME[request.param]
    folder = tmp_path_factory.mktemp("proxy")
    async with real_way(case, behind, folder, secrets=secrets, authority=authority) as started:
        yield started


each_way = pytest.mark.parametrize("through", BY_NAME, indirect=True, scope="module")


@each_way
@pytest.mark.asyncio(loop_scope="session")
async def test_the_proxy_takes_all_that_istiod_makes_of_the_installation(through: RealWay) -> None:
    assert await through.proxy.refused() == {}
    assert await through.istiod.filter_errors() == {}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@each_way
@pytest.mark.asyncio(loop_scope="session")
async def test_an_installation_works(through: RealWay, check: Callable[[Way], Awaitable[None]]) -> None:
    await check(through.way)
