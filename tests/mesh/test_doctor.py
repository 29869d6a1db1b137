"""What `kvmesh doctor --envoy-admin` says of a proxy that a real istiod has configured by our installation."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from extproc.doctor.checks import CHECKS, judge
from extproc.doctor.facts import EnvoyFacts, Facts
from extproc.doctor.findings import Finding, Severity
from extproc.doctor.gather_admin import gather_envoy
from extproc.doctor.questions import open_client
from extproc.install.plan import Mode, RouteSettings
from kvmesh.admin.admin_login import AdminLogin
from tests.e2e.stack import Stack, running_stack, simulated_pods
from tests.istiod.installs import Installation
from tests.kube_api.certificates import Authority
from tests.mesh.real_way import MeshCase, RealWay, real_way
from tests.unit.extproc_doctor.doctor_facts import facts, pod

OF_ENVOY = [name for name in CHECKS if name.startswith("envoy-")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with (
        simulated_pods(2, own_hosts=True) as pods,
        running_stack(tmp_path_factory.mktemp("mesh"), endpoints=list(pods)) as started,
    ):
        yield started


async def seen(through: RealWay) -> EnvoyFacts:
    async with open_client(timeout_seconds=20.0, login=AdminLogin()) as client:
        return await gather_envoy(client, through.proxy.admin)


def judged(envoy: EnvoyFacts, endpoints: Sequence[str]) -> list[Finding]:
    known: Facts = facts(*(pod(endpoint=each) for each in endpoints), envoy=envoy)
    return [finding for finding in judge(known, names=OF_ENVOY) if finding.severity is not Severity.OK]


@pytest.mark.parametrize("settings", list(RouteSettings))
@pytest.mark.parametrize("mode", [Mode.GATEWAY, Mode.SIDECAR])
@pytest.mark.asyncio(loop_scope="session")
async def test_nothing_is_wrong_with_what_was_just_installed(
    mode: Mode, settings: RouteSettings, stack: Stack, secrets: Path, authority: Authority, tmp_path: Path
) -> None:
    case = MeshCase(installation=Installation(minor=31, mode=mode), route_settings=settings)
    async with real_way(case, stack, tmp_path, secrets=secrets, authority=authority) as through:
        envoy = await seen(through)
    assert judged(envoy, stack.ready["endpoints"]) == []
