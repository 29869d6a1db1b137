"""A picker that is gone and a pod that is gone, behind a real istiod: who is answered, and how."""

from pathlib import Path

import pytest

from operate.install.plan import BodyMode, FailureMode, Mode
from tests.e2e.stack import END_SECONDS, Stack, running_stack, simulated_pods
from tests.kube_api.certificates import Authority
from tests.mesh.install_checks import PODS_COUNT, SETTINGS, story
from tests.mesh.installations import DENIED_PATH, FILTER_MODES, Installation
from tests.mesh.real_way import MeshCase, real_way

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("body_mode", BodyMode)
@pytest.mark.parametrize("mode", FILTER_MODES)
async def test_without_a_picker_requests_are_refused(
    mode: Mode, body_mode: BodyMode, stack: Stack, secrets: Path, authority: Authority, tmp_path: Path
) -> None:
    case = MeshCase(installation=Installation(minor=31, mode=mode, body_mode=body_mode), has_picker=False)
    async with real_way(case, stack, tmp_path, secrets=secrets, authority=authority) as through:
        assert (await through.way.complete("hello")).status == 503
        assert (await through.way.send("GET", "/", host=case.installation.other_host)).status == 503  # nobody is there


async def test_without_a_picker_what_another_filter_refuses_may_end_as_503(
    stack: Stack, secrets: Path, authority: Authority, tmp_path: Path
) -> None:
    """A known defect (docs/limits.md): the pick's filter sees the refusal as the answer, and has nobody to tell."""
    case = MeshCase(installation=Installation(minor=31, mode=Mode.GATEWAY), has_picker=False)
    async with real_way(case, stack, tmp_path, secrets=secrets, authority=authority) as through:
        denied = await through.way.send("POST", DENIED_PATH, json={})
    assert denied.status == 503


async def test_without_a_picker_requests_go_anywhere_where_the_installation_fails_open(
    stack: Stack, secrets: Path, authority: Authority, tmp_path: Path
) -> None:
    installation = Installation(minor=31, mode=Mode.GATEWAY, failure_mode=FailureMode.FAIL_OPEN)
    case = MeshCase(installation=installation, has_picker=False)
    async with real_way(case, stack, tmp_path, secrets=secrets, authority=authority) as through:
        answer = await through.way.complete("hello")
    assert answer.status == 200, answer.body
    assert answer.upstream in stack.ready["endpoints"]


async def test_what_a_dead_pod_was_to_serve_another_serves(secrets: Path, authority: Authority, tmp_path: Path) -> None:
    case = MeshCase(installation=Installation(minor=31, mode=Mode.GATEWAY))
    (tmp_path / "stack").mkdir()
    async with (
        simulated_pods(PODS_COUNT, own_hosts=True) as pods,
        running_stack(tmp_path / "stack", endpoints=list(pods), settings=SETTINGS) as stack,
        real_way(case, stack, tmp_path, secrets=secrets, authority=authority) as through,
    ):
        prompt = story("a pod that dies")
        first = await through.way.complete(prompt)
        await stack.indexed(prompt)
        pods[first.upstream].kill()
        pods[first.upstream].wait(timeout=END_SECONDS)
        answers = [await through.way.complete(prompt) for _ in range(4)]
    assert {answer.status for answer in answers} == {200}
    assert first.upstream not in {answer.upstream for answer in answers}
