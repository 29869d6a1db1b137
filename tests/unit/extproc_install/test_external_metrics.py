"""The external-metrics API among what is installed: when it comes and goes, and whose it may be."""

from dataclasses import replace
from typing import Any

import pytest

from extproc.errors import ConfigError
from extproc.install.cluster import InstallError
from extproc.install.external_metrics import API_SERVICE_NAME, NAME
from extproc.install.installer import uninstall
from extproc.install.objects import INSTALLATION, MANAGED_BY, OWNER
from extproc.install.plan import (
    InstallPlan,
    IstioVersion,
    MeshMembership,
    Mode,
    PoolTarget,
    Scope,
    parse_gateway,
)
from extproc.install.render import render
from extproc.install.serving_certificate import with_certificate
from tests.unit.extproc_install.sample_plans import one, plan
from tests.unit.extproc_install.test_installer import FakeCluster, run

SERVED: dict[str, Any] = {"external_metrics": True}


def env_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    container = one(documents, "Deployment", "kvmesh-picker")["spec"]["template"]["spec"]["containers"][0]
    return {each["name"]: each.get("value") for each in container["env"]}


def test_nothing_of_it_is_there_unless_it_is_wanted() -> None:
    documents = render(plan())
    assert not [each for each in documents if "external-metrics" in each["metadata"]["name"]]
    assert not [name for name in env_of(documents) if "EXTERNAL_METRICS" in name]


def test_the_api_service_leads_to_the_pickers_port_with_its_certificate() -> None:
    documents = render(plan(external_metrics=True, external_metrics_ca="UEVN"))
    service = one(documents, "Service", NAME)
    assert service["metadata"]["labels"]["app.kubernetes.io/name"] == NAME  # else monitors and the doctor would ask it
    asked = one(documents, "APIService", API_SERVICE_NAME)["spec"]
    assert asked["service"] == {"namespace": "kvmesh-system", "name": NAME, "port": 443}
    assert (asked["caBundle"], "insecureSkipTLSVerify" in asked) == ("UEVN", False)
    pod = one(documents, "Deployment", "kvmesh-picker")["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    [container] = pod["spec"]["containers"]
    [port] = service["spec"]["ports"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    environment = env_of(documents)
    assert environment["KVMESH_EXTERNAL_METRICS_PORT"] == str(ports[port["targetPort"]])
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    [volume] = [each for each in pod["spec"]["volumes"] if each["name"] == "external-metrics"]
    assert volume["secret"]["secretName"] == NAME
    assert environment["KVMESH_EXTERNAL_METRICS_CERT"] == f"{mounts['external-metrics']}/tls.crt"


def test_the_picker_may_read_whom_to_let_in_and_nothing_more_is_asked_for() -> None:
    before, after = render(plan()), render(plan(**SERVED))
    rights = [each for each in after if "Role" in each["kind"] and each not in before]
    [binding] = rights
    assert binding["metadata"]["namespace"] == "kube-system"
    assert binding["roleRef"]["name"] == "extension-apiserver-authentication-reader"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "kvmesh-picker", "namespace": "kvmesh-system"}]


@pytest.mark.parametrize("membership", [MeshMembership.SIDECAR, MeshMembership.AMBIENT])
def test_the_mesh_lets_the_api_server_in_without_its_mtls(membership: MeshMembership) -> None:
    mode = Mode.AMBIENT_GATEWAY if membership is MeshMembership.AMBIENT else Mode.GATEWAY
    documents = render(plan(27, mode, external_metrics=True, membership=membership))
    mtls = one(documents, "PeerAuthentication", "kvmesh-picker")["spec"]
    assert (mtls["mtls"], mtls["portLevelMtls"]) == ({"mode": "STRICT"}, {"9443": {"mode": "PERMISSIVE"}})
    assert "portLevelMtls" not in one(documents, "PeerAuthentication", "kvmesh-indexer")["spec"]


def test_native_pools_name_the_port_among_those_of_their_sidecar() -> None:
    native = InstallPlan(
        istio=IstioVersion(minor=31),
        mode=Mode.INFERENCE_POOL,
        namespace="llm",
        pools=(PoolTarget(namespace="llm", name="llama"),),
        gateways=(parse_gateway("ingress/gateway"),),
    )
    for wanted in (True, False):
        documents = render(replace(native, external_metrics=wanted))
        listeners = one(documents, "Sidecar", "kvmesh-picker")["spec"]["ingress"]
        assert (9443 in [each["port"]["number"] for each in listeners]) is wanted


def test_it_comes_when_the_pickers_are_ready_and_goes_before_them() -> None:
    cluster = FakeCluster(ready_after=3)
    run(cluster, plan(**SERVED))
    assert cluster.log[-1] == ("apply", "APIService")
    cluster.log.clear()
    uninstall(cluster, installation="kvmesh-system", settle_seconds=0, sleep=lambda _: None)
    kinds = [kind for _, kind in cluster.log]
    assert kinds.index("APIService") < kinds.index("Deployment")
    assert not [key for key in cluster.objects if key[0] != "Namespace" and key[2] == NAME]


def test_it_goes_when_it_is_no_longer_wanted() -> None:
    cluster = FakeCluster()
    run(cluster, plan(**SERVED))
    run(cluster, plan())
    assert [key for key in cluster.objects if key[2] in {NAME, API_SERVICE_NAME}] == []


def test_another_server_of_the_api_is_left_alone_and_named() -> None:
    cluster = FakeCluster()
    cluster.put("APIService", API_SERVICE_NAME)
    service = {"namespace": "keda", "name": "keda-operator-metrics-apiserver"}
    cluster.objects["APIService", None, API_SERVICE_NAME]["spec"] = {"service": service}
    with pytest.raises(InstallError) as raised:
        run(cluster, plan(**SERVED))
    words = str(raised.value)
    assert "leads to Service keda/keda-operator-metrics-apiserver: a cluster has one server of this API" in words
    assert "Leave --external-metrics out" in words
    assert words.endswith("Nothing was changed")
    assert cluster.log == []


def test_another_installation_that_serves_it_is_named() -> None:
    cluster = FakeCluster()
    cluster.put("APIService", API_SERVICE_NAME, **{INSTALLATION: "kvmesh-one", MANAGED_BY: OWNER})
    cluster.put("RoleBinding", NAME, "kube-system", **{INSTALLATION: "kvmesh-one", MANAGED_BY: OWNER})
    with pytest.raises(InstallError, match="installation in namespace kvmesh-one: a cluster has one server of this"):
        run(cluster, plan(**SERVED))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"external_metrics_secret": "tls"}, "is for --external-metrics, which is missing"),
        ({**SERVED, "external_metrics_secret": "TLS"}, "'TLS' is no Kubernetes name"),
        (
            {**SERVED, "scope": Scope.NAMESPACED, "root_namespace": "kvmesh-system"},
            "--external-metrics: the API is the whole cluster's",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        render(plan(**changes))


def test_the_certificate_that_is_there_is_trusted() -> None:
    for name, wanted in ((NAME, SERVED), ("own", {**SERVED, "external_metrics_secret": "own"})):
        cluster = FakeCluster()
        cluster.put("Secret", name, "kvmesh-system")
        cluster.objects["Secret", "kvmesh-system", name]["data"] = {"ca.crt": "UEVN"}
        changed, secrets = with_certificate(cluster, plan(**wanted))
        assert (changed.external_metrics_ca, secrets) == ("UEVN", [])


def test_a_secret_that_does_not_do_is_said_before_anything_is_changed() -> None:
    cluster, wanted = FakeCluster(), plan(external_metrics=True, external_metrics_secret="own")
    with pytest.raises(InstallError, match="there is no Secret kvmesh-system/own; make it first"):
        with_certificate(cluster, wanted)
    cluster.put("Secret", "own", "kvmesh-system")
    with pytest.raises(InstallError, match=r"Secret kvmesh-system/own has no ca\.crt"):
        with_certificate(cluster, wanted)
