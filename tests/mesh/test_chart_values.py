"""The values that only the Helm chart has: images, placement and additions of pods, records of requests, monitors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.mesh.chart import CHART, RELEASE, Document, helm, objects, run_helm

NAMESPACE = "kvmesh-system"
DIGEST = "sha256:" + "a" * 64
BASE: dict[str, Any] = {
    "image": "registry.example.com/kvmesh:0.1.0",
    "istioVersion": "1.31",
    "pools": [{"namespace": "llm", "name": "vllm-llama", "selector": {"app": "vllm-llama"}}],
    "gateways": [{"namespace": "istio-ingress", "name": "inference"}],
    "routes": [{"host": "llm.example.com"}],
}
SPREAD = {"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
TOLERATION = {"key": "gpu", "operator": "Exists"}
AFFINITY: dict[str, Any] = {
    "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}
}
POD: dict[str, Any] = {
    "resources": {"requests": {"cpu": "3"}, "limits": {"memory": "5Gi"}},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [TOLERATION],
    "affinity": AFFINITY,
    "topologySpreadConstraints": [SPREAD],
    "priorityClassName": "high",
    "podAnnotations": {"example.com/note": "a: b"},
    "podLabels": {"team": "llm"},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "extraArgs": ["--an-option", "7"],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "serviceAccount": {"annotations": {"example.com/role": "reader"}},
}
WORKLOADS = {
    "picker": ("Deployment", "kvmesh-picker"),
    "indexer": ("Deployment", "kvmesh-indexer"),
    "bundledRedis": ("StatefulSet", "kvmesh-redis"),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a path in a pod's values": ({"picker": {"tolerations": [1]}}, "at '/picker/tolerations/0'"),
    "a field of no pod": ({"indexer": {"nodeselector": {}}}, "at '/indexer': additional properties 'nodeselector'"),
    "an image without a repository": ({"image": {"tag": "1"}}, "at '/image': missing property 'repository'"),
    "a label of the chart": (
        {"picker": {"podLabels": {"app.kubernetes.io/name": "x"}}},
        "picker.podLabels and podAnnotations: app.kubernetes.io/name is the chart's own; leave it out",
    ),
    "an audit of nothing": ({"audit": {"enabled": True}}, "set accessLog, for example to stdout"),
    "a share above one": ({"tracing": {"share": 2}}, "at '/tracing/share'"),
}


@pytest.mark.parametrize("section", WORKLOADS)
def test_a_pods_values_reach_its_workload_alone(section: str, tmp_path: Path) -> None:
    before, after = rendered({}, tmp_path), rendered({section: POD}, tmp_path)
    workload = WORKLOADS[section]
    template, plain = (pods[workload]["spec"]["template"] for pods in (after, before))
    spec, container = template["spec"], template["spec"]["containers"][0]
    assert {name: spec[name] for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName")} == {
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [TOLERATION],
        "affinity": AFFINITY,
        "priorityClassName": "high",
    }
    assert spec["topologySpreadConstraints"] == [SPREAD]
    assert template["metadata"]["labels"] == plain["metadata"]["labels"] | POD["podLabels"]
    assert template["metadata"]["annotations"] == plain["metadata"]["annotations"] | POD["podAnnotations"]
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}  # what is not named keeps its default
    assert (container["resources"]["requests"]["cpu"], container["resources"]["limits"]["memory"]) == ("3", "5Gi")
    assert container["env"][-1] == POD["extraEnv"][0]
    assert container["args"] == [*plain["spec"]["containers"][0]["args"], "--an-option", "7"]
    assert (spec["volumes"][-1], container["volumeMounts"][-1]) == (POD["extraVolumes"][0], POD["extraVolumeMounts"][0])
    account = ("ServiceAccount", workload[1])
    assert after.pop(account)["metadata"]["annotations"] == POD["serviceAccount"]["annotations"]
    changed = {key for key, document in after.items() if document != before[key]}
    assert changed == {workload}


def test_images_are_text_or_parts(tmp_path: Path) -> None:
    values = {
        "image": {"repository": "registry.example.com/kvmesh", "digest": DIGEST, "pullPolicy": "Always"},
        "redisImage": {"repository": "mirror/valkey", "tag": "8.2", "digest": DIGEST, "pullPolicy": "Never"},
        "fetchModels": ["org/model"],
        "redisStorageClassName": "fast",
    }
    found = rendered(values, tmp_path)
    picker = found["Deployment", "kvmesh-picker"]["spec"]["template"]["spec"]
    redis = found["StatefulSet", "kvmesh-redis"]["spec"]
    images = [
        (each["image"], each["imagePullPolicy"])
        for each in (*picker["initContainers"], *picker["containers"], *redis["template"]["spec"]["containers"])
    ]
    ours = (f"registry.example.com/kvmesh@{DIGEST}", "Always")
    assert images == [ours, ours, (f"mirror/valkey:8.2@{DIGEST}", "Never")]
    assert redis["volumeClaimTemplates"][0]["spec"]["storageClassName"] == "fast"


def test_an_image_without_a_tag_has_that_of_the_chart(tmp_path: Path) -> None:
    found = rendered({"image": {"repository": "registry.example.com/kvmesh"}}, tmp_path)
    container = found["Deployment", "kvmesh-indexer"]["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "registry.example.com/kvmesh:0.1.0"


def test_logs_traces_and_audit_are_settings_of_the_picker(tmp_path: Path) -> None:
    values = {
        "logLevel": "debug",
        "logFormat": "text",
        "tracing": {"endpoint": "http://collector:4318/v1/traces", "share": 0.5},
        "accessLog": "stdout,/var/log/kvmesh/access.log?max_mb=5",
        "accessLogVolume": {"persistentVolumeClaim": {"claimName": "logs"}},
        "audit": {"enabled": True, "keySecret": "audit-keys", "keySecretKey": "chain"},
    }
    before, after = rendered({}, tmp_path), rendered(values, tmp_path)
    added = {
        name: settings(after[WORKLOADS[name]]).items() - settings(before[WORKLOADS[name]]).items()
        for name in ("picker", "indexer")
    }
    of_both = {("KVMESH_LOG_LEVEL", "debug"), ("KVMESH_LOG_FORMAT", "text")}
    assert added["indexer"] == of_both
    assert added["picker"] == of_both | {
        ("KVMESH_OTLP_ENDPOINT", "http://collector:4318/v1/traces"),
        ("KVMESH_TRACE_SHARE", "0.5"),
        ("KVMESH_ACCESS_LOG", "stdout,/var/log/kvmesh/access.log?max_mb=5"),
        ("KVMESH_AUDIT", "true"),
        ("KVMESH_AUDIT_KEY_FILE", "/etc/kvmesh/audit/keys"),
    }
    ports = after["NetworkPolicy", "kvmesh-picker"]["spec"]["egress"][-1]["ports"]
    assert {"protocol": "TCP", "port": 4318} in ports
    pod = after["Deployment", "kvmesh-picker"]["spec"]["template"]["spec"]
    keys = {"secretName": "audit-keys", "items": [{"key": "chain", "path": "keys"}], "defaultMode": 0o440}
    assert pod["volumes"][-2:] == [
        {"name": "access-log", "persistentVolumeClaim": {"claimName": "logs"}},
        {"name": "audit-key", "secret": keys},
    ]
    assert pod["containers"][0]["volumeMounts"][-2:] == [
        {"name": "access-log", "mountPath": "/var/log/kvmesh", "subPathExpr": "$(POD_NAME)"},
        {"name": "audit-key", "mountPath": "/etc/kvmesh/audit", "readOnly": True},
    ]


def test_monitors_have_the_labels_that_an_operator_selects_by(tmp_path: Path) -> None:
    labels = {"release": "prometheus"}
    monitor = {"interval": "30s", "scrapeTimeout": "10s", "labels": labels}
    metrics = {"serviceMonitor": monitor, "prometheusRule": {"labels": labels}, "dashboards": {"enabled": False}}
    found = rendered({"monitoring": True, "metrics": metrics}, tmp_path)
    monitors = [found["ServiceMonitor", f"kvmesh-{name}"] for name in ("picker", "indexer")]
    for document in (*monitors, found["PrometheusRule", "kvmesh-rules"]):
        assert document["metadata"]["labels"].items() >= labels.items()
    ends = [each["spec"]["endpoints"][0] for each in monitors]
    assert [(end["interval"], end["scrapeTimeout"]) for end in ends] == [("30s", "10s")] * 2
    assert "ConfigMap" not in {kind for kind, _ in found}


def test_each_monitoring_object_can_be_left_out(tmp_path: Path) -> None:
    off = {"enabled": False}
    metrics = {"serviceMonitor": off, "prometheusRule": off}
    kinds = {kind for kind, _ in rendered({"monitoring": True, "metrics": metrics}, tmp_path)}
    assert {"ServiceMonitor", "PrometheusRule", "ConfigMap"} & kinds == {"ConfigMap"}


def test_objects_have_the_standard_labels(tmp_path: Path) -> None:
    found = rendered({}, tmp_path)
    expected = {
        "app.kubernetes.io/part-of": "kvmesh",
        "app.kubernetes.io/instance": RELEASE,
        "app.kubernetes.io/version": "0.1.0",
        "app.kubernetes.io/managed-by": "Helm",
        "helm.sh/chart": "kvmesh-0.1.0",
    }
    assert [key for key, each in found.items() if not each["metadata"]["labels"].items() >= expected.items()] == []


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_names_the_value(name: str, tmp_path: Path) -> None:
    values, words = REFUSED[name]
    assert words in refusal(BASE | values, tmp_path)


def test_one_sentence_names_what_bare_values_miss(tmp_path: Path) -> None:
    assert "missing values: image, istioVersion, pools, gateways, routes;" in refusal({}, tmp_path)
    assert "0 chart(s) failed" in helm("lint", str(CHART))


def rendered(values: Mapping[str, Any], folder: Path) -> dict[tuple[str, str], Document]:
    """Return the rendered objects by kind and name, except Secrets, whose content is random."""
    text = helm(*_template({**BASE, **values}, folder))
    return {(kind, name): each for (kind, _, name), each in objects(text).items() if kind != "Secret"}


def refusal(values: Mapping[str, Any], folder: Path) -> str:
    refused = run_helm(*_template(values, folder))
    assert refused.returncode != 0
    return refused.stderr


def settings(workload: Document) -> dict[str, str]:
    """Return the environment of a workload's container, without references to fields."""
    container = workload["spec"]["template"]["spec"]["containers"][0]
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def _template(values: Mapping[str, Any], folder: Path) -> tuple[str, ...]:
    path = folder / "values.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return ("template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--values", str(path))
