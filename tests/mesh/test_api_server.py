"""`kvmesh install` and `kvmesh uninstall` against a real Kubernetes control plane."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from operate.install.objects import MANAGED_BY, OWNER
from tests.mesh.kube import PROMETHEUS_OPERATOR, Kube
from tests.mesh.site import COMMAND_SECONDS, Site, namespace_administrator

MISSING_IMAGE = "missing.example/kvmesh:0.1.0"


@pytest.fixture
def operator(kube: Kube) -> Iterator[None]:
    """The Prometheus operator's definitions."""
    kube.apply(*PROMETHEUS_OPERATOR)
    names = [each["metadata"]["name"] for each in PROMETHEUS_OPERATOR]
    kube.kubectl("wait", "--for=condition=Established", "crd", *names)
    yield
    kube.kubectl("delete", "crd", *names)


def test_what_it_installs_it_removes_where_nobody_knows_prometheus(site: Site) -> None:
    done = site.install()
    assert done.code == 0, done.errors
    assert done.printed.startswith(f"cluster: {site.kube.server} (context admin)\n")
    assert set(done.outcomes.values()) == {"created"}
    assert f"kubectl label service -n {site.pool} vllm kvmesh.io/pool=true" in done.printed
    gone = site.uninstall()
    assert gone.code == 0, gone.errors
    assert site.left() == []
    again = site.uninstall()
    assert (again.code, again.printed.splitlines()[-1]) == (0, "0 objects removed"), again.errors


@pytest.mark.usefixtures("operator")
def test_monitors_come_and_go_where_the_prometheus_operator_is(site: Site) -> None:
    monitored = site.install("--monitoring")
    assert monitored.outcomes[f"PrometheusRule {site.namespace}/kvmesh-rules"] == "created", monitored.errors
    plain = site.install()
    assert f"removed PrometheusRule {site.namespace}/kvmesh-rules" in plain.printed, plain.errors
    assert site.uninstall().code == 0
    assert site.left() == []


def test_monitoring_without_its_operator_is_refused_before_anything_is_changed(site: Site) -> None:
    done = site.install("--monitoring")
    assert done.code == 1
    assert "the cluster has no PrometheusRule, ServiceMonitor" in done.errors
    assert site.left() == []


def test_a_second_installation_changes_nothing_and_other_flags_change_what_they_say(site: Site) -> None:
    assert site.install().code == 0
    again = site.install()
    assert set(again.outcomes.values()) == {"unchanged"}, again.printed + again.errors
    other = site.install("--indexer-replicas=3")
    changed = [name for name, outcome in other.outcomes.items() if outcome != "unchanged"]
    assert changed == [f"Deployment {site.namespace}/kvmesh-indexer"], other.printed + other.errors


@pytest.mark.parametrize(
    ("flags", "source", "said"),
    [
        (("--tokenizers-image=r.example/t:1",), {"image"}, "of models with a folder in image r.example/t:1"),
        (("--fetch-model=org/a@v1", "--hub-token-secret=hub"), {"emptyDir"}, "of org/a@v1, fetched by each picker's"),
    ],
)
def test_tokenizer_folders_come_from_a_volume_that_the_cluster_knows(
    site: Site, flags: tuple[str, ...], source: set[str], said: str
) -> None:
    done = site.install(*flags)
    assert done.code == 0, done.errors
    assert said in done.printed
    assert "feature ImageVolume" not in done.printed
    picker = json.loads(site.kube.kubectl("get", "deployment", "-n", site.namespace, "kvmesh-picker", "-o", "json"))
    pod = picker["spec"]["template"]["spec"]
    [volume] = [each for each in pod["volumes"] if each["name"] == "models"]
    assert volume.keys() - {"name"} == source
    assert [each["name"] for each in pod.get("initContainers", ())] == ["fetch-models"] * ("image" not in source)
    assert set(site.install(*flags).outcomes.values()) == {"unchanged"}
    plain = site.install()
    assert [name for name, outcome in plain.outcomes.items() if outcome != "unchanged"] == [
        f"Deployment {site.namespace}/kvmesh-picker"
    ]


def test_the_pods_key_comes_from_the_secret_that_is_named_and_goes_with_the_flag(site: Site) -> None:
    flags = ("--pod-key-secret=vllm", "--pod-key-secret-key=VLLM_API_KEY")
    done = site.install(*flags)
    assert done.code == 0, done.errors
    for name in ("kvmesh-picker", "kvmesh-indexer"):
        stored = json.loads(site.kube.kubectl("get", "deployment", "-n", site.namespace, name, "-o", "json"))
        pod = stored["spec"]["template"]["spec"]
        [volume] = [each for each in pod["volumes"] if each["name"] == "pod-key"]
        items = [{"key": "VLLM_API_KEY", "path": "key"}]
        assert volume["secret"] == {"secretName": "vllm", "items": items, "defaultMode": 0o440}
    assert set(site.install(*flags).outcomes.values()) == {"unchanged"}
    plain = site.install()
    assert {name for name, outcome in plain.outcomes.items() if outcome != "unchanged"} == {
        f"Deployment {site.namespace}/kvmesh-{role}" for role in ("picker", "indexer")
    }


def test_kubectl_may_apply_what_is_printed_before_and_after(site: Site) -> None:
    rendered = site.call("install", *site.flags(), "--istio-version=1.31", "--dry-run").printed
    site.kube.kubectl("apply", "--server-side", "-f", "-", stdin=rendered)
    over = site.install()
    assert over.code == 0, over.errors
    changed = {name for name, outcome in over.outcomes.items() if outcome != "unchanged"}
    made = {f"Secret {site.namespace}/{name}" for name in ("kvmesh-admin-token", "kvmesh-redis-users")}
    assert changed == made | {f"Role {site.namespace}/kvmesh-status-writer"}
    site.kube.kubectl("apply", "--server-side", "-f", "-", stdin=rendered)
    assert set(site.install().outcomes.values()) == {"unchanged"}


def test_one_field_manager_lets_both_change_what_the_other_wrote(site: Site) -> None:
    assert site.install().code == 0
    rendered = site.call("install", *site.flags(), "--dry-run", "--indexer-replicas=3").printed
    site.kube.kubectl("apply", "--server-side", f"--field-manager={OWNER}", "-f", "-", stdin=rendered)
    back = site.install()
    assert back.outcomes[f"Deployment {site.namespace}/kvmesh-indexer"] == "changed", back.errors


def test_reinstalling_waits_for_the_namespace_to_go(site: Site) -> None:
    assert site.install().code == 0
    hold = {"metadata": {"finalizers": ["tests.kvmesh.io/hold"]}}
    held = ("configmap", "-n", site.namespace, "held")
    site.kube.kubectl("create", *held)
    site.kube.kubectl("patch", *held, "--type=merge", f"--patch={hold}".replace("'", '"'))
    assert site.uninstall().code == 0
    command = [str(Path(sys.executable).with_name("kvmesh")), "install", *site.flags()]
    environment = os.environ | {"KUBECONFIG": str(site.kube.kubeconfig)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(f"waiting for Namespace {site.namespace}, which is still being removed"):
                break
        else:
            pytest.fail("it did not wait")
        site.kube.kubectl("patch", *held, "--type=merge", '--patch={"metadata":{"finalizers":null}}')
        rest = process.stdout.read()
        assert process.wait(timeout=COMMAND_SECONDS) == 0, rest
    assert f"created Namespace {site.namespace}" in rest


def test_a_pools_namespace_that_goes_is_refused(site: Site) -> None:
    site.kube.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "held", "namespace": site.pool, "finalizers": ["tests.kvmesh.io/hold"]},
        }
    )
    site.kube.kubectl("delete", "namespace", site.pool, "--wait=false")
    done = site.install()
    site.kube.kubectl(
        *("patch", "configmap", "-n", site.pool, "held", "--type=merge"),
        '--patch={"metadata":{"finalizers":null}}',
    )
    assert (done.code, site.left()) == (1, [])
    assert f"namespace {site.pool} is being removed" in done.errors


def test_the_definition_of_an_older_kvmesh_is_upgraded(site: Site) -> None:
    older = next(
        each
        for each in yaml.safe_load_all(site.call("install", *site.flags(), "--dry-run").printed)
        if each["kind"] == "CustomResourceDefinition"
    )
    spec = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    del spec["failureMode"]
    older["spec"]["versions"][0]["additionalPrinterColumns"] = []
    site.kube.kubectl("apply", "--server-side", f"--field-manager={OWNER}", "-f", "-", stdin=yaml.safe_dump(older))
    done = site.install("--wait-seconds=0")
    name = older["metadata"]["name"]
    assert done.outcomes[f"CustomResourceDefinition {name}"] == "changed", done.errors


def test_objects_of_the_same_name_that_are_not_ours_are_left_alone(site: Site) -> None:
    site.kube.kubectl("create", "namespace", site.namespace)
    site.kube.kubectl("create", "service", "clusterip", "-n", site.namespace, "kvmesh-picker", "--tcp=1")
    done = site.install("--force-conflicts")
    assert done.code == 1
    assert f"Service {site.namespace}/kvmesh-picker is there and was not made by kvmesh install" in done.errors
    assert site.left() == []


def test_what_keeps_it_from_running_is_said_while_it_waits(site: Site) -> None:
    done = site.call("install", *site.flags(MISSING_IMAGE), "--redis-storage-gib=9000", "--wait-seconds=3")
    assert done.code == 1
    assert "No gateway was told to ask the picker" in done.errors
    redis = r"kvmesh-redis \(0 of 1 pods are ready, pending: 0/1 nodes are available: "
    picker = rf"kvmesh-picker \(0 of \d pods are ready, ImagePullBackOff: Back-off pulling image .{MISSING_IMAGE}"
    for words in (redis, picker):
        assert re.search(words, done.errors), done.errors
    assert "EnvoyFilter" not in done.printed


def test_a_container_that_ends_again_and_again_is_named(site: Site) -> None:
    done = site.call("install", *site.flags("crashing.example/kvmesh:1"), "--wait-seconds=3")
    assert "CrashLoopBackOff: back-off 10s restarting failed container" in done.errors, done.errors


def test_an_administrator_may_act_as_somebody_without_rights(site: Site) -> None:
    user = {"client-certificate": str(site.kube.admin.cert), "client-key": str(site.kube.admin.key), "as": "nobody"}
    kubeconfig = site.kube.write_kubeconfig(f"as-nobody-{site.number}", user=user)
    done = site.install("--istio-version=1.31", kubeconfig=kubeconfig)
    assert done.code == 1
    assert 'User "nobody" cannot' in done.errors, done.errors
    assert site.left() == []


def test_a_plugin_may_give_a_client_certificate(site: Site) -> None:
    admin = site.kube.admin
    status = {"clientCertificateData": admin.cert.read_text(), "clientKeyData": admin.key.read_text()}
    credential = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}
    program = site.kube.folder / f"plugin-{site.number}.py"
    program.write_text(f"import json\nprint(json.dumps({credential!r}))\n")
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": sys.executable,
        "args": [str(program)],
        "interactiveMode": "Never",
    }
    config = site.kube.write_kubeconfig(f"plugin-{site.number}", user={"exec": plugin})
    done = site.uninstall(kubeconfig=config)
    assert done.code == 0, done.errors


def test_the_servers_certificate_is_checked_for_the_name_that_the_kubeconfig_says(site: Site) -> None:
    for name, code in (("kubernetes.default.svc", 0), ("elsewhere.example", 1)):
        cluster = {"tls-server-name": name}
        config = site.kube.write_kubeconfig(f"name-{code}-{site.number}", cert=site.kube.admin, cluster=cluster)
        done = site.uninstall(kubeconfig=config)
        assert done.code == code, done.errors
    assert "does not answer" in done.errors


def test_a_namespaces_administrator_can_install_and_uninstall_there(site: Site) -> None:
    site.kube.kubectl("create", "namespace", site.namespace)
    owner = namespace_administrator(site, [site.namespace, site.pool, site.gateway])
    refused = site.install("--scope=namespaced", kubeconfig=owner)
    assert refused.code == 1
    assert "--scope namespaced --no-create-namespace --skip-crds" in refused.errors
    flags = ("--scope=namespaced", "--no-create-namespace", "--skip-crds")
    done = site.install(*flags, kubeconfig=owner)
    assert done.code == 0, done.errors
    again = site.install(*flags, kubeconfig=owner)
    assert set(again.outcomes.values()) == {"unchanged"}, again.errors
    gone = site.uninstall(kubeconfig=owner)
    assert gone.code == 0, gone.errors
    assert site.left() == []


def test_a_missing_image_is_refused_before_anything_is_asked(site: Site) -> None:
    flags = [each for each in site.flags() if not each.startswith("--image")]
    done = site.call("install", *flags)
    assert (done.code, done.printed) == (2, "")
    assert "--image is missing: no image of kvmesh is published yet" in done.errors


def test_labels_tell_whose_an_object_is(site: Site) -> None:
    assert site.install("--wait-seconds=0").code == 0
    service = ("service", "-n", site.namespace, "kvmesh-picker")
    site.kube.kubectl("label", *service, "--overwrite", f"{MANAGED_BY}=Helm")
    done = site.install("--wait-seconds=0")
    assert f"its label {MANAGED_BY} is 'Helm'" in done.errors
