"""What `kvmesh doctor --envoy-admin` says of a proxy that a real istiod has configured by our installation."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from extproc.pages.findings import Finding, Severity
from kvmesh.admin.admin_login import AdminLogin
from operate.doctor.checks import CHECKS, judge
from operate.doctor.facts import EnvoyFacts, Facts
from operate.doctor.gather_admin import gather_envoy
from operate.doctor.questions import open_client
from operate.install.objects import EXPORT_TO
from operate.install.plan import BodyMode, FailureMode, InstallPlan, Mode, RouteSettings
from tests.e2e.stack import Stack, running_stack, simulated_pods
from tests.kube_api.certificates import Authority
from tests.mesh.installations import FILTER_MODES, PICKER, Installation
from tests.mesh.mesh_objects import Object
from tests.mesh.real_way import MeshCase, RealWay, real_way
from tests.unit.operate_doctor.doctor_facts import facts, pod

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


INSTALLED = Installation(minor=31, mode=Mode.GATEWAY)
RIGHT = (
    *(
        MeshCase(installation=Installation(minor=31, mode=mode), route_settings=settings)
        for mode in FILTER_MODES
        for settings in RouteSettings
    ),
    MeshCase(installation=Installation(minor=31, mode=Mode.GATEWAY, is_https=True)),
    MeshCase(installation=Installation(minor=31, mode=Mode.GATEWAY, body_mode=BodyMode.BUFFERED)),
    MeshCase(installation=Installation(minor=31, mode=Mode.GATEWAY, failure_mode=FailureMode.FAIL_OPEN)),
    *(MeshCase(installation=Installation(minor=minor, mode=Mode.GATEWAY)) for minor in (28, 30)),
)


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: f"{case}-{case.route_settings}")
@pytest.mark.asyncio(loop_scope="session")
async def test_nothing_is_wrong_with_what_was_just_installed(
    case: MeshCase, stack: Stack, secrets: Path, authority: Authority, tmp_path: Path
) -> None:
    async with real_way(case, stack, tmp_path, secrets=secrets, authority=authority) as through:
        envoy = await seen(through)
    assert judged(envoy, stack.ready["endpoints"]) == []


class OtherHost(MeshCase):
    """A `--hostname` that no route of the gateway has."""

    def plan(self, port: int) -> InstallPlan:
        plan = super().plan(port)
        return replace(plan, routes=tuple(replace(each, host="elsewhere.example.com") for each in plan.routes))


class HiddenPicker(MeshCase):
    """A picker that the mesh keeps from the gateway, as another installer might leave it."""

    def objects(self, stack: Stack, *, port: int, authority: Authority) -> list[Object]:
        objects = super().objects(stack, port=port, authority=authority)
        for each in objects:
            if (each["kind"], each["metadata"]["name"]) == ("Service", PICKER.name):
                each["metadata"]["annotations"] = {EXPORT_TO: "."}
        return objects


@pytest.mark.parametrize(
    ("case", "check", "words"),
    [
        (OtherHost(installation=INSTALLED), "envoy-routes", "is off and no route switches it on"),
        (HiddenPicker(installation=INSTALLED), "envoy-picker", f"{PICKER.cluster!r} does not exist"),
    ],
    ids=["other-host", "hidden-picker"],
)
@pytest.mark.asyncio(loop_scope="session")
async def test_what_keeps_requests_from_the_picker_is_an_error(
    case: MeshCase, check: str, words: str, stack: Stack, secrets: Path, authority: Authority, tmp_path: Path
) -> None:
    async with real_way(case, stack, tmp_path, secrets=secrets, authority=authority) as through:
        envoy = await seen(through)
    [finding] = judged(envoy, stack.ready["endpoints"])
    assert (finding.check, finding.severity) == (check, Severity.ERROR)
    assert words in finding.seen
    assert check != "envoy-picker" or EXPORT_TO in finding.fix
