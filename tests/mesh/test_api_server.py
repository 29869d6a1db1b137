"""`kvmesh install` and `kvmesh uninstall` against a real Kubernetes control plane."""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.install.cluster import InstallError
from extproc.install.installer import uninstall
from extproc.install.lightkube_cluster import LightkubeCluster
from extproc.install.objects import INSTALLATION, KINDS, MANAGED_BY, OWNER, Kind
from kvmesh.documents.documents import ClusterAccess
from tests.mesh.kube import PROMETHEUS_OPERATOR, Kube
from tests.mesh.mesh_objects import gateway_by_hand, http_route, kubernetes_object, namespace, rule

NUMBERS = count(1)
IMAGE = "registry.example/kvmesh:0.1.0"
MISSING_IMAGE = "missing.example/kvmesh:0.1.0"
COMMAND_SECONDS = 150.0


@dataclass(frozen=True, kw_only=True)
class Site:
    """A pool, a gateway and an installation of a test's own."""

    kube: Kube
    number: int = field(default_factory=lambda: next(NUMBERS))

    @property
    def namespace(self) -> str:
        return f"kvmesh-{self.number}"

    @property
    def pool(self) -> str:
        return f"llm-{self.number}"

    @property
    def gateway(self) -> str:
        return f"ingress-{self.number}"

    def flags(self, image: str = IMAGE) -> list[str]:
        return [
            f"--namespace={self.namespace}",
            f"--pool={self.pool}/vllm",
            f"--pool-selector={self.pool}/vllm=app=vllm",
            f"--gateway={self.gateway}/gateway",
            f"--hostname=llm-{self.number}.example.com",
            f"--image={image}",
        ]

    def install(self, *more: str, kubeconfig: Path | None = None) -> "Done":
        return self.call("install", *self.flags(), *more, kubeconfig=kubeconfig)

    def uninstall(self, *more: str, kubeconfig: Path | None = None) -> "Done":
        arguments = ("--yes", "--settle-seconds=0", f"--namespace={self.namespace}", *more)
        return self.call("uninstall", *arguments, kubeconfig=kubeconfig)

    def call(self, *arguments: str, kubeconfig: Path | None = None) -> "Done":
        """Run `kvmesh` as people do."""
        command = [str(Path(sys.executable).with_name("kvmesh")), *arguments]
        if "--dry-run" not in arguments:
            command.append(f"--kubeconfig={kubeconfig or self.kube.kubeconfig}")
        ended = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
        return Done(code=ended.returncode, printed=ended.stdout, errors=ended.stderr)

    def left(self) -> list[str]:
        """Everything of the installation, but what is on its way out."""
        kinds = ",".join(_resource(kind) for kind in KINDS if "monitoring" not in kind.group)
        listed = self.kube.kubectl("get", kinds, "-A", "-l", f"{INSTALLATION}={self.namespace}", "-o=yaml")
        return [
            f"{each['kind']}/{each['metadata']['name']}"
            for each in yaml.safe_load(listed)["items"]
            if "deletionTimestamp" not in each["metadata"]
        ]


@dataclass(frozen=True, kw_only=True)
class Done:
    """A command that ended."""

    code: int
    printed: str
    errors: str

    @property
    def outcomes(self) -> dict[str, str]:
        """What became of each object that was applied, by kind and name."""
        found = re.findall(r"^(created|changed|unchanged) (\w+) (\S+)$", self.printed, re.MULTILINE)
        return {f"{kind} {name}": outcome for outcome, kind, name in found}


def _resource(kind: Kind) -> str:
    return f"{kind.plural}.{kind.version}.{kind.group}" if kind.group else kind.plural


@pytest.fixture
def site(kube: Kube) -> Iterator[Site]:
    """A pool, a gateway with a pod, and a route between them; at the end everything of ours goes."""
    made = Site(kube=kube)
    spec = {"selector": {"app": "vllm"}, "ports": [{"name": "http", "port": 8000}]}
    route = http_route(
        made.pool,
        "llm",
        gateway=(made.gateway, "gateway"),
        hosts=[f"llm-{made.number}.example.com"],
        rules=[rule("/", "vllm", 8000)],
    )
    kube.apply(namespace(made.pool), namespace(made.gateway))
    pool = kubernetes_object("v1", "Service", made.pool, "vllm", spec=spec)
    kube.apply(*gateway_by_hand(made.gateway, "gateway"), pool, route)
    yield made
    made.uninstall()
    kube.kubectl("delete", "namespace", "--wait=false", "--ignore-not-found", made.pool, made.gateway, made.namespace)


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


def test_kubectl_may_apply_what_is_printed_before_and_after(site: Site) -> None:
    rendered = site.call("install", *site.flags(), "--istio-version=1.31", "--dry-run").printed
    site.kube.kubectl("apply", "--server-side", "-f", "-", stdin=rendered)
    over = site.install()
    assert over.code == 0, over.errors
    changed = {name for name, outcome in over.outcomes.items() if outcome != "unchanged"}
    assert changed == {f"Secret {site.namespace}/kvmesh-admin-token", f"Role {site.namespace}/kvmesh-status-writer"}
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
    command.append(f"--kubeconfig={site.kube.kubeconfig}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
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


def test_an_uninstallation_that_is_cut_off_at_any_object_can_be_run_again(site: Site) -> None:
    class CutOff(LightkubeCluster):
        allowed = 0

        def delete(self, kind: Kind, name: str, namespace: str | None) -> None:
            if self.allowed == 0:
                raise InstallError("cut off")
            self.allowed -= 1
            super().delete(kind, name, namespace)

    assert site.install().code == 0
    total = len(site.left())
    cluster = CutOff(ClusterAccess(kubeconfig=site.kube.kubeconfig), say=print)
    for step in range(total + 1):  # one further each time: what is left is less by one
        cluster.allowed = 1
        try:
            uninstall(cluster, installation=site.namespace, settle_seconds=0, sleep=lambda _: None)
        except InstallError as error:
            assert str(error) == "cut off"
        assert len(site.left()) <= total - step - 1 or site.left() == []
    assert site.left() == []


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


ISTIO_AND_OURS = ("networking.istio.io", "security.istio.io", "kvmesh.io", "inference.networking.k8s.io")
READ_BY_PICKERS = ("inference.networking.x-k8s.io", "llm-d.ai", "gateway.networking.k8s.io")


def namespace_administrator(site: Site, spaces: Sequence[str]) -> Path:
    """Return the kubeconfig of somebody who may do everything in these namespaces, and nothing elsewhere."""
    name = f"owner-{site.number}"
    rules = [{"apiGroups": [group], "resources": ["*"], "verbs": ["*"]} for group in ISTIO_AND_OURS + READ_BY_PICKERS]
    for space in spaces:
        subject: Mapping[str, Any] = {"kind": "User", "name": name, "apiGroup": "rbac.authorization.k8s.io"}
        for role, kind in (("admin", "ClusterRole"), (f"{name}-more", "Role")):
            binding = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding"}
            reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role}
            meta = {"name": f"{name}-{role}", "namespace": space}
            site.kube.apply({**binding, "metadata": meta, "roleRef": reference, "subjects": [dict(subject)]})
        meta = {"name": f"{name}-more", "namespace": space}
        site.kube.apply(
            {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": meta, "rules": rules}
        )
    return site.kube.write_kubeconfig(name, cert=site.kube.authority.issue(name, subject=f"/CN={name}"))


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
