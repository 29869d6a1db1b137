"""`kvmesh doctor --kubernetes` finds the installation by itself, and says how to reach what it cannot."""

from pathlib import Path
from typing import Any

from extproc.pages.findings import Severity
from kvmesh.documents.documents import ClusterAccess
from operate.doctor.cluster_parts import locate_parts
from operate.install.network_objects import network_objects
from operate.install.objects import MANAGED_BY, component_labels
from operate.install.plan import GatewayTarget, InstallPlan
from tests.integration.kube_documents import pod
from tests.integration.starting_api import Starting
from tests.kube_api import kube_api

GATEWAY = {"gateway.networking.k8s.io/gateway-name": "public"}


def of_install(kind: str, name: str, namespace: str, *, api: str = "v1", **content: Any) -> dict[str, Any]:
    labels = component_labels(name) | {MANAGED_BY: "Helm"}  # as Helm labels them
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def may_ask(namespace: str, *, gateway_namespace: str) -> dict[str, Any]:
    """Return who may ask the picker there, as it is installed."""
    gateway = GatewayTarget(namespace=gateway_namespace, name="public", selector=GATEWAY, service_account="public")
    return network_objects(InstallPlan(namespace=namespace, gateways=(gateway,)))[0]


async def test_parts_that_cannot_be_reached_are_named_with_the_command_that_reaches_them(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        for name, port in (("kvmesh-picker", 9090), ("kvmesh-indexer", 9091)):
            api.put(of_install("Service", name, "mesh", spec={"ports": [{"name": "http-admin", "port": port}]}))
        api.put(may_ask("mesh", gateway_namespace="edge"))
        proxy = pod("public-1", "127.0.0.1", namespace="edge")
        proxy["metadata"]["labels"] = GATEWAY
        api.put(proxy)
        api.put(pod("other", "127.0.0.1", namespace="edge"))
        located = await locate_parts(ClusterAccess(kubeconfig=api.kubeconfig()), named=["indexer"])
    assert located.urls == {}
    assert [(each.check, each.severity, each.subject) for each in located.findings] == [
        ("cluster-parts", Severity.UNCHECKED, "mesh/kvmesh-picker"),
        ("cluster-parts", Severity.UNCHECKED, "edge/public-1"),
    ]
    assert [each.fix for each in located.findings] == [
        "run `kubectl -n mesh port-forward svc/kvmesh-picker 9090` and give --picker http://127.0.0.1:9090",
        "run `kubectl -n edge port-forward pod/public-1 15000` and give --envoy-admin http://127.0.0.1:15000",
    ]


async def test_in_a_cluster_without_istio_and_installation_each_part_is_said_to_be_unchecked(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        located = await locate_parts(ClusterAccess(kubeconfig=api.kubeconfig()), named=[])
    assert [each.subject for each in located.findings] == ["picker", "indexer", "envoy-admin"]
    assert {each.severity for each in located.findings} == {Severity.UNCHECKED}


async def test_what_we_may_not_look_at_is_said_and_the_rest_is_found(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        api.put(of_install("Service", "kvmesh-indexer", "mesh", spec={"ports": [{"port": 9091}]}))
        services = api.user(
            "picker", [{"apiGroups": [""], "resources": ["pods", "services"], "verbs": ["get", "list"]}]
        )
        located = await locate_parts(ClusterAccess(kubeconfig=api.kubeconfig(services)), named=["picker"])
        nothing = await locate_parts(ClusterAccess(kubeconfig=api.kubeconfig(api.user("nobody", []))), named=[])
    proxies, indexer = located.findings
    assert (proxies.subject, indexer.subject) == ("envoy-admin", "mesh/kvmesh-indexer")
    assert "403" in proxies.seen
    assert "give us the right" in proxies.fix
    assert [each.subject for each in nothing.findings] == ["picker, indexer", "envoy-admin"]


async def test_who_may_read_some_namespaces_finds_what_is_there(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        for name in ("kvmesh-picker", "kvmesh-indexer"):
            api.put(of_install("Service", name, "mesh", spec={"ports": [{"port": 9090}]}))
        rules = [{"apiGroups": ["", "networking.k8s.io"], "resources": ["*"], "verbs": ["list"]}]
        token = api.user("owner", [])
        api.put(rbac("Role", "owner", rules=rules))
        subject = {"kind": "User", "name": "owner", "apiGroup": "rbac.authorization.k8s.io"}
        role = {"kind": "Role", "name": "owner", "apiGroup": "rbac.authorization.k8s.io"}
        api.put(rbac("RoleBinding", "owner", subjects=[subject], roleRef=role))
        access = ClusterAccess(kubeconfig=api.kubeconfig(token))
        located = await locate_parts(access, named=["envoy-admin"], namespaces=["mesh"])
    assert [each.subject for each in located.findings] == ["mesh/kvmesh-picker", "mesh/kvmesh-indexer"]


def rbac(kind: str, name: str, **content: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "mesh"}
    return {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": metadata, **content}


async def test_an_api_server_that_only_starts_is_not_told_as_missing_rights(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        api.state.faults = Starting(refusals=1000)
        located = await locate_parts(ClusterAccess(kubeconfig=api.kubeconfig()), named=[])
    [finding] = located.findings
    assert finding.severity is Severity.UNCHECKED
    assert "403" in finding.seen
    assert "starting" in finding.fix
