"""Native InferencePools: no filter of ours, a name for each pool, and a picker's sidecar that takes Istio's words."""

from dataclasses import replace
from typing import Any

import pytest

from extproc.errors import ConfigError
from extproc.policy.merged_policy import pick_policy
from extproc.settings.config import read_policy
from operate.install.native_pools import picker_service_name
from operate.install.objects import Document
from operate.install.plan import BodyMode, FailureMode, InstallPlan, MeshMembership, Mode, PoolTarget, RouteTarget
from operate.install.render import render
from tests.unit.operate_install.sample_plans import plan

CHAT, CODE = (PoolTarget(namespace="llm", name=name) for name in ("chat", "code"))


def native(**changes: Any) -> InstallPlan:
    own: dict[str, Any] = {"mode": Mode.INFERENCE_POOL, "namespace": "llm", "pools": (CHAT, CODE), "routes": ()}
    return replace(plan(31), **{**own, **changes})


def named(documents: list[Document], kind: str) -> dict[str, Any]:
    return {each["metadata"]["name"]: each["spec"] for each in documents if each["kind"] == kind}


def test_istio_asks_by_itself_and_each_pool_by_a_name_of_its_own() -> None:
    documents = render(native())
    assert named(documents, "EnvoyFilter") == {}
    services = named(documents, "Service")
    assert services["kvmesh-picker-chat"] == services["kvmesh-picker-code"]
    [port] = services["kvmesh-picker-chat"]["ports"]
    assert (port["port"], port["appProtocol"]) == (9002, "grpc")
    hosts = {rule["host"] for rule in named(documents, "DestinationRule").values()}
    assert {f"kvmesh-picker-{name}.llm.svc.cluster.local" for name in ("chat", "code")} < hosts


def test_sheddable_requests_are_refused_as_the_protocol_says() -> None:
    [container] = named(render(native()), "Deployment")["kvmesh-picker"]["template"]["spec"]["containers"]
    [policy] = [each["value"] for each in container["env"] if each["name"] == "KVMESH_POLICY"]
    assert pick_policy(read_policy(policy))[0].priorities.classes["sheddable"].refusal_status == 429


def test_the_namespace_is_other_people_s() -> None:
    assert "Namespace" not in {each["kind"] for each in render(native())}


def test_the_picker_s_sidecar_takes_what_istio_asks_as_bytes_and_names_no_path() -> None:
    documents = render(native())
    ingress = named(documents, "Sidecar")["kvmesh-picker"]["ingress"]
    assert [(each["port"]["number"], each["port"]["protocol"]) for each in ingress] == [(9002, "TCP"), (9090, "HTTP")]
    [picks, *_] = named(documents, "AuthorizationPolicy")["kvmesh-picker"]["rules"]
    assert picks["to"] == [{"operation": {"ports": ["9002"]}}]


@pytest.mark.parametrize("membership", [MeshMembership.AMBIENT, MeshMembership.NONE])
def test_without_a_sidecar_there_is_nothing_to_take(membership: MeshMembership) -> None:
    assert named(render(native(membership=membership)), "Sidecar") == {}


def test_a_name_is_a_service_s() -> None:
    long = replace(CHAT, name="x" * 60)
    assert len(picker_service_name(long)) <= 63
    assert picker_service_name(long) != picker_service_name(replace(CHAT, name="x" * 61))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gateways": ()}, "needs --gateway"),
        ({"routes": (RouteTarget(host="a.example.com", pool=CHAT),)}, "--hostname"),
        ({"namespace": "kvmesh-system"}, "say --namespace llm"),
        ({"failure_mode": FailureMode.FAIL_OPEN}, "endpointPickerRef.failureMode"),
        ({"body_mode": BodyMode.BUFFERED}, "--body-mode"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_say(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        render(native(**changes))
