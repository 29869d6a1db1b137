"""Helm installs, upgrades and removes the chart on a real API server."""

import json
from base64 import b64decode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from operate.install.objects import KINDS, kind_of
from tests.mesh.chart import CHART, RELEASE, helm, objects, run_helm
from tests.mesh.kube import PROMETHEUS_OPERATOR, Kube

NAMESPACE = "kvmesh-by-helm"
VALUES: dict[str, Any] = {
    "image": "registry.example.com/kvmesh:0.1.0",
    "istioVersion": "1.31",
    "pools": [{"namespace": "llm", "name": "vllm-llama", "selector": {"app": "vllm-llama"}}],
    "gateways": [{"namespace": "istio-ingress", "name": "inference"}],
    "routes": [{"host": "llm.example.com"}],
}
UPGRADED = VALUES | {
    "indexerReplicas": 1,
    "monitoring": True,
    "redis": "redis://redis.redis.svc:6379/0",
    "runAsUser": False,
    "scope": "namespaced",
    "istioVersion": "1.30",
    "image": {"repository": "registry.example.com/kvmesh", "digest": "sha256:" + "a" * 64},
    "accessLog": "/var/log/kvmesh/access.log",
    "audit": {"enabled": True, "keySecret": "audit-keys"},
    "tracing": {"endpoint": "http://collector:4318/v1/traces"},
    "picker": {
        "podLabels": {"team": "llm"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    },
}


@pytest.fixture(scope="module", autouse=True)
def _namespaces(kube: Kube) -> Iterator[None]:
    names = ("llm", "istio-ingress")
    kube.apply(*({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in names))
    kube.apply(*PROMETHEUS_OPERATOR)
    kube.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    yield
    run_helm("uninstall", RELEASE, *_in(kube))


def test_helm_installs_upgrades_and_removes_the_chart(kube: Kube, tmp_path: Path) -> None:
    helm("install", RELEASE, str(CHART), *_in(kube), "--create-namespace", *_values(VALUES, tmp_path), *READY)
    first = _there(kube)
    assert_as_printed(kube, VALUES, tmp_path)
    token = first["Secret", NAMESPACE, "kvmesh-admin-token"]["data"]
    assert {each["metadata"]["labels"]["app.kubernetes.io/managed-by"] for each in first.values()} == {"Helm"}

    notes = helm("upgrade", RELEASE, str(CHART), *_in(kube), *_values(UPGRADED, tmp_path), *READY)
    assert "kubectl label service -n llm vllm-llama kvmesh.io/pool=true" in notes
    assert_as_printed(kube, UPGRADED, tmp_path)
    second = _there(kube)
    assert second["Secret", NAMESPACE, "kvmesh-admin-token"]["data"] == token
    gone = {(kind, name) for kind, _, name in first.keys() - second.keys()}
    assert {("StatefulSet", "kvmesh-redis"), ("ClusterRole", f"kvmesh-picker-{NAMESPACE}")} <= gone

    helm("upgrade", RELEASE, str(CHART), *_in(kube), *_values(VALUES, tmp_path), *READY)
    assert_as_printed(kube, VALUES, tmp_path)
    users = _there(kube)["Secret", NAMESPACE, "kvmesh-redis-users"]["data"]
    helm("upgrade", RELEASE, str(CHART), *_in(kube), *_values(VALUES | {"drainSeconds": 7}, tmp_path), *READY)
    assert _there(kube)["Secret", NAMESPACE, "kvmesh-redis-users"]["data"] == users
    assert b64decode(users["picker.sha256"]).decode() == sha256(b64decode(users["picker"])).hexdigest()
    helm("uninstall", RELEASE, *_in(kube), *READY)
    assert _there(kube).keys() == set()
    assert "inferencepolicies" in kube.kubectl("get", "crd", "--output=name")


def test_the_schema_is_asked_before_the_server(kube: Kube, tmp_path: Path) -> None:
    refused = run_helm("install", "other", str(CHART), *_in(kube), *_values(VALUES | {"image": None}, tmp_path))
    assert refused.returncode != 0
    assert "image" in refused.stderr


READY = ("--wait", "--timeout", "120s")


def assert_as_printed(kube: Kube, values: dict[str, Any], folder: Path) -> None:
    """Every object that `helm template` prints is there, with all that it says."""
    printed = objects(helm("template", RELEASE, str(CHART), "--namespace", NAMESPACE, *_values(values, folder)))
    there = _there(kube)
    assert printed.keys() <= there.keys()
    for key, document in printed.items():
        if document["kind"] != "Secret":
            assert _holds(there[key].get("spec"), document.get("spec", {})), key


def _holds(there: Any, said: Any) -> bool:
    """Whether the server has what was said; it adds defaults, drops what is empty and writes quantities anew."""
    if isinstance(said, dict):
        return all(_holds((there or {}).get(name), value) for name, value in said.items())
    if isinstance(said, list):
        return len(there or ()) == len(said) and all(map(_holds, there or (), said))
    return there == said or (isinstance(said, str) and said.endswith("Mi"))


def _there(kube: Kube) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return what the release has in the cluster."""
    kinds = [kind for kind in KINDS if kind.name not in ("CustomResourceDefinition", "Namespace")]
    names = ",".join(f"{kind.plural}.{kind.group}" if kind.group else kind.plural for kind in kinds)
    listed = json.loads(
        kube.kubectl(
            "get", names, "--all-namespaces", "--output=json", f"--selector=kvmesh.io/installation={NAMESPACE}"
        )
    )
    found = [each for each in listed["items"] if "deletionTimestamp" not in each["metadata"]]
    assert {each["kind"] for each in found} <= {kind.name for kind in kinds}
    owned = [each for each in found if each["kind"] != kind_of("PersistentVolumeClaim").name]
    return objects(yaml.safe_dump_all(owned))


def _in(kube: Kube) -> tuple[str, ...]:
    return ("--kubeconfig", str(kube.kubeconfig), "--namespace", NAMESPACE)


def _values(values: dict[str, Any], folder: Path) -> tuple[str, str]:
    path = folder / "values.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return ("--values", str(path))
