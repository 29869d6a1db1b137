"""Deployments that the picker scales on a real API server, with the rights that `kvmesh install` renders."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from extproc.install.render import render
from extproc.pools.scale_acts import act_in_cluster
from extproc.scaling.acting import ActOutcome, ActState, ScaleWish
from kvmesh.documents.documents import ClusterAccess
from tests.e2e.stack import eventually
from tests.mesh.kube import Kube
from tests.mesh.mesh_objects import kubernetes_object
from tools.kustomize_tree import SAMPLE

NAMESPACE = "scaled"
LABELS = {"app": "llama"}
ADMISSION = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": "few-pods"}}
PICKER = "/CN=system:serviceaccount:kvmesh-system:kvmesh-picker"


@dataclass
class Wishes:
    """In the place of `pools.Pools`."""

    wanted: ScaleWish
    outcomes: Sequence[ActOutcome] = ()

    def scale_wishes(self) -> Sequence[ScaleWish]:
        return (self.wanted,)

    def note_acts(self, outcomes: Sequence[ActOutcome]) -> None:
        self.outcomes = outcomes

    async def comes_to(self, state: ActState) -> ActOutcome:
        async def look() -> Sequence[ActOutcome]:
            return self.outcomes

        found = await eventually(look, lambda outcomes: bool(outcomes) and outcomes[0].state is state)
        return found[0]  # type: ignore[no-any-return]


def wish(replicas: int, name: str) -> ScaleWish:
    return ScaleWish(
        pool=f"{NAMESPACE}/llama",
        role="both",
        variant="",
        namespace=NAMESPACE,
        deployment=name,
        replicas=replicas,
        may_lower=True,
        window_seconds=0.0,
    )


def deployment(name: str, **spec: Any) -> dict[str, Any]:
    template = {"metadata": {"labels": LABELS}, "spec": {"containers": [{"name": "vllm", "image": "example/vllm"}]}}
    given = {"replicas": 1, "selector": {"matchLabels": LABELS}, "template": template} | spec
    return kubernetes_object("apps/v1", "Deployment", NAMESPACE, name, spec=given)


def replicas_of(kube: Kube, name: str) -> int:
    return int(kube.kubectl("get", "deployment", "-n", NAMESPACE, name, "-o", "jsonpath={.spec.replicas}"))


@pytest.fixture
def picker(kube: Kube) -> Iterator[Path]:
    """The kubeconfig of an installed picker's account, which has the right; the namespace goes with the test."""
    plan = replace(SAMPLE, scale_deployments=True)
    rights = [each for each in render(plan) if "kvmesh-picker-scale" in each["metadata"]["name"]]
    assert {each["kind"] for each in rights} == {"ClusterRole", "ClusterRoleBinding"}
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}, *rights)
    yield kube.write_kubeconfig("picker", cert=kube.authority.issue("picker", subject=PICKER))
    kube.kubectl("delete", "namespace", NAMESPACE, "--wait=true")
    for each in rights:
        kube.kubectl("delete", each["kind"], each["metadata"]["name"])


@asynccontextmanager
async def acting(wishes: Wishes, kubeconfig: Path) -> AsyncIterator[None]:
    access = ClusterAccess(kubeconfig=kubeconfig, program="kvmesh-picker")
    task = asyncio.create_task(act_in_cluster(wishes, access, leads=lambda: True))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.asyncio(loop_scope="session")
async def test_the_scale_follows_in_steps_with_the_rights_of_the_installed_picker(kube: Kube, picker: Path) -> None:
    kube.apply(deployment("llama"))
    wishes = Wishes(wish(4, "llama"))
    async with acting(wishes, picker):
        await wishes.comes_to(ActState.AS_WANTED)
        assert replicas_of(kube, "llama") == 4
        wishes.wanted = wish(3, "llama")
        outcome = await wishes.comes_to(ActState.WRITTEN)
        assert outcome.words == "4 -> 3"
        assert replicas_of(kube, "llama") == 3


@pytest.mark.asyncio(loop_scope="session")
async def test_an_autoscaler_of_the_same_deployment_is_left_alone(kube: Kube, picker: Path) -> None:
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llama"}
    metric = {
        "type": "Resource",
        "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 9}},
    }
    autoscaler = kubernetes_object(
        "autoscaling/v2",
        "HorizontalPodAutoscaler",
        NAMESPACE,
        "theirs",
        spec={"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 3, "metrics": [metric]},
    )
    kube.apply(deployment("llama"), autoscaler)
    wishes = Wishes(wish(4, "llama"))
    async with acting(wishes, picker):
        outcome = await wishes.comes_to(ActState.AUTOSCALER)
        assert "HorizontalPodAutoscaler theirs has it for its target" in outcome.words
        assert replicas_of(kube, "llama") == 1
        kube.kubectl("delete", "hpa", "-n", NAMESPACE, "theirs")
        await wishes.comes_to(ActState.AS_WANTED)
        assert replicas_of(kube, "llama") == 4


@pytest.mark.asyncio(loop_scope="session")
async def test_what_is_not_there_or_not_allowed_is_named(kube: Kube, picker: Path) -> None:
    wishes = Wishes(wish(4, "missing"))
    async with acting(wishes, picker):
        outcome = await wishes.comes_to(ActState.NOT_FOUND)
        assert outcome.words.startswith(f"there is no Deployment {NAMESPACE}/missing: 404")
    nobody = kube.write_kubeconfig("nobody", cert=kube.authority.issue("nobody", subject="/CN=nobody"))
    wishes = Wishes(wish(4, "llama"))
    kube.apply(deployment("llama"))
    async with acting(wishes, nobody):
        outcome = await wishes.comes_to(ActState.FORBIDDEN)
        assert "kvmesh install --scale-deployments gives it the right" in outcome.words
    assert replicas_of(kube, "llama") == 1


@pytest.mark.asyncio(loop_scope="session")
async def test_a_dry_run_that_the_server_refuses_is_a_named_state_and_nothing_is_written(
    kube: Kube, picker: Path
) -> None:
    rule = {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": ["deployments/scale"]}
    few = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [rule]},
        "validations": [{"expression": "object.spec.replicas <= 2", "message": "at most two pods here"}],
    }
    bound = {"policyName": "few-pods", "validationActions": ["Deny"]}
    kube.apply(
        {**ADMISSION, "kind": "ValidatingAdmissionPolicy", "spec": few},
        {**ADMISSION, "kind": "ValidatingAdmissionPolicyBinding", "spec": bound},
        deployment("llama"),
    )
    try:
        wishes = Wishes(wish(4, "llama"))

        async def is_refused() -> bool:
            scale = ("scale", "-n", NAMESPACE, "deployment/llama", "--replicas=3", "--dry-run=server")
            done = await asyncio.to_thread(kube.kubectl, *scale, check=False)
            return "at most two pods here" in done

        await eventually(is_refused, bool)  # the server takes a moment to have it in force
        async with acting(wishes, picker):
            outcome = await wishes.comes_to(ActState.REFUSED)
            assert "at most two pods here" in outcome.words
        assert replicas_of(kube, "llama") == 1
    finally:
        kube.kubectl("delete", "validatingadmissionpolicy,validatingadmissionpolicybinding", "few-pods")
