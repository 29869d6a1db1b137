"""What `kvmesh install` renders, on a configuration like istiod's, before the real picker, index and simulated pods.

One mesh serves all installations that steer alike; each has an Envoy of its own in front of it. The gateway of the mesh
itself (`envoy/local.yaml`) is not used.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from extproc.policy.values import Steering
from tests.e2e.install_checks import CHECKS, PODS_COUNT, SETTINGS, Way
from tests.e2e.stack import Stack, free_ports, running_stack
from tests.istiod.bootstrap import running_proxy
from tests.istiod.installs import INSTALLATIONS, PICKER, PODS, SHOP, Installation

BY_NAME = {str(each): each for each in INSTALLATIONS}


@asynccontextmanager
async def way(installation: Installation, stack: Stack, folder: Path) -> AsyncIterator[Way]:
    """Start the installation's Envoy in front of the mesh; the service that is none of ours is not there."""
    endpoints = {PODS.cluster: stack.ready["endpoints"], PICKER.cluster: [stack.ready["extproc"]]}
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    proxied = running_proxy(installation.applied().proxy, folder, endpoints=endpoints | {SHOP.cluster: [nobody]})
    async with proxied as proxy:
        url = proxy.listeners[installation.entry]
        yield Way(name=str(installation), installation=installation, url=url, stack=stack)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(Steering))
async def steered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A mesh whose picker steers so."""
    folder = tmp_path_factory.mktemp("mesh")
    async with running_stack(
        folder, pods=PODS_COUNT, settings=f"{SETTINGS}steering: {Steering(request.param).value}\n"
    ) as stack:
        yield stack


ORIGINAL_DST = [name for name, each in BY_NAME.items() if each.steering is Steering.ORIGINAL_DST]
OVERRIDE_HOST = [name for name in BY_NAME if name not in ORIGINAL_DST]
WAYS = [(Steering.OVERRIDE_HOST, name) for name in OVERRIDE_HOST] + [
    (Steering.ORIGINAL_DST, name) for name in ORIGINAL_DST
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def through(
    request: pytest.FixtureRequest, steered: Stack, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Way]:
    """One installation before the mesh that steers as it does."""
    async with way(BY_NAME[request.param], steered, tmp_path_factory.mktemp("proxy")) as started:
        yield started


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(("steered", "through"), WAYS, indirect=True, scope="module", ids=[name for _, name in WAYS])
@pytest.mark.asyncio(loop_scope="module")
async def test_an_installation_works(through: Way, check: Callable[[Way], Awaitable[None]]) -> None:
    await check(through)
