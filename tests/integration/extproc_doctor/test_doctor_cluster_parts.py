"""`kvmesh doctor --kubernetes` finds the installation by itself, and says how to reach what it cannot."""

from pathlib import Path
from typing import Any

from extproc.doctor.cluster_parts import locate_parts
from extproc.doctor.findings import Severity
from extproc.install.objects import OWNED, component_labels
from kvmesh.documents.documents import ClusterAccess
from tests.integration.kube_documents import pod
from tests.integration.starting_api import Starting
from tests.kube_api import kube_api

GATEWAY = {"gateway.networking.k8s.io/gateway-name": "public"}


def of_install(kind: str, name: str, namespace: str, *, api: str = "v1", **content: Any) -> dict[str, Any]:
    labels = OWNED | (component_labels(name) if kind == "Service" else {})
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


async def test_parts_that_cannot_be_reached_are_named_with_the_command_that_reaches_them(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        api.loose_crd(group="networking.istio.io", version="v1alpha3", kind="EnvoyFilter", plural="envoyfilters")
        for name, port in (("kvmesh-picker", 9090), ("kvmesh-indexer", 9091)):
            api.put(of_install("Service", name, "mesh", spec={"ports": [{"name": "http-admin", "port": port}]}))
        spec = {"workloadSelector": {"labels": GATEWAY}, "configPatches": []}
        api.put(of_install("EnvoyFilter", "kvmesh-public", "edge", api="networking.istio.io/v1alpha3", spec=spec))
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


async def test_a_cluster_that_lets_us_not_look_is_said_to_be_unchecked(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        weak = api.user("weak", [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}])
        located = await locate_parts(ClusterAccess(kubeconfig=api.kubeconfig(weak)), named=[])
    [finding] = located.findings
    assert finding.severity is Severity.UNCHECKED
    assert "403" in finding.seen
    assert "give us the right" in finding.fix


async def test_an_api_server_that_only_starts_is_not_told_as_missing_rights(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        api.state.faults = Starting(refusals=1000)
        located = await locate_parts(ClusterAccess(kubeconfig=api.kubeconfig()), named=[])
    [finding] = located.findings
    assert finding.severity is Severity.UNCHECKED
    assert "403" in finding.seen
    assert "starting" in finding.fix
