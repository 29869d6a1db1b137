"""The external-metrics API behind a real API server, and a real HorizontalPodAutoscaler that acts on it.

The control plane is of these tests alone: an API that is served by nobody holds up the removal of namespaces. What
`kvmesh install` makes is as it is, but for the Service: without a network of pods it leads to this machine.
"""

import asyncio
import json
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from extproc.doctor.external_metrics_api import look_at_external_metrics
from extproc.doctor.findings import Severity
from extproc.external_metrics.settings import ExternalMetricsSettings
from extproc.install.external_metrics import API_SERVICE_NAME, NAME
from extproc.local.ports import pick_free_port
from kvmesh.documents.documents import ClusterAccess
from kvmesh.documents.kubernetes_client import Connection
from tests.e2e.stack import eventually
from tests.integration.overload_pods import HeldPod
from tests.integration.pools_picker import DocumentDesk, running_mesh
from tests.mesh.chart import CHART, RELEASE, helm
from tests.mesh.fake_node import NETWORK
from tests.mesh.kube import Kube, kube_in_background
from tests.mesh.mesh_objects import kubernetes_object, namespace
from tests.mesh.site import Site, made_site

HOST = "127.0.0.1"
VALUES = "/apis/external.metrics.k8s.io/v1beta1/namespaces/{}/kvmesh-wanted-replicas?labelSelector={}"
OF_LLAMA = "pool%3Dllama%2Crole%3Dboth"
LOOP = pytest.mark.asyncio(loop_scope="module")
SCALED = {"minReplicas": 1, "maxReplicas": 6, "stabilizationSeconds": 0, "scaleUp": {"queueRequests": 5}}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """A control plane of these tests' own."""
    with kube_in_background(tmp_path_factory.mktemp("kube")) as running:
        running.define("istio", "gateway")
        yield running


@pytest.fixture(scope="module")
def scaled_site(plane: Kube) -> Iterator[Site]:
    """An installation that serves the API."""
    with made_site(plane) as made:
        done = made.install("--external-metrics")
        assert done.code == 0, done.errors
        yield made


class Nobody(DocumentDesk):
    """Puts nothing anywhere: the documents are those of the cluster."""

    def put(self, *documents: dict[str, Any]) -> None: ...


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pods() -> AsyncIterator[HeldPod]:
    """What answers at the addresses of all vLLM pods."""
    pod = HeldPod()
    await pod.start(pick_free_port(host="0.0.0.0", avoid=()), host="0.0.0.0")
    yield pod
    await pod.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def picker(scaled_site: Site, pods: HeldPod, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[None]:
    """A picker with the certificate that was installed, to which the installed Service leads."""
    site, folder = scaled_site, tmp_path_factory.mktemp("picker")
    kube = site.kube
    secret = stored(kube, "secret", "-n", site.namespace, NAME)
    for name in ("tls.crt", "tls.key"):
        (folder / name).write_bytes(b64decode(secret["data"][name]))
    port = pick_free_port(host=HOST, avoid=())
    serving = ExternalMetricsSettings(port=port, cert=folder / "tls.crt", key=folder / "tls.key")
    kube.apply(*scaled_pool(site.pool, port=int(pods.address.rpartition(":")[2])))
    lead_to(kube, site.namespace, port)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(kube.kubeconfig))
        patch.setenv("POD_NAMESPACE", site.namespace)
        async with running_mesh(folder, desk=Nobody(), kubernetes=True, policies_folder=None, external_metrics=serving):
            yield


def stored(kube: Kube, *what: str) -> Any:
    return yaml.safe_load(kube.kubectl("get", *what, "-o", "yaml"))


def lead_to(kube: Kube, space: str, port: int) -> None:
    """Have the API server reach this machine where it would reach the pickers."""
    outside = {"type": "ExternalName", "externalName": "localhost", "clusterIP": None, "clusterIPs": None}
    service = ("service", "-n", space, NAME, "--type=merge", "-p", json.dumps({"spec": outside}))
    kube.kubectl("patch", *service)
    reached = {"spec": {"service": {"port": port}}}
    kube.kubectl("patch", "apiservice", API_SERVICE_NAME, "--type=merge", "-p", json.dumps(reached))


def scaled_pool(space: str, *, port: int) -> list[dict[str, Any]]:
    """Return a Deployment of vLLM pods, its Service, which is a pool, and a policy that scales it."""
    labels = {"app": "llama"}
    container = {"name": "vllm", "image": "registry.example/vllm:1", "ports": [{"containerPort": port}]}
    pod = {"metadata": {"labels": labels, "annotations": {NETWORK: "127.0.2"}}, "spec": {"containers": [container]}}
    return [
        kubernetes_object(
            *("apps/v1", "Deployment", space, "llama"),
            spec={"replicas": 1, "selector": {"matchLabels": labels}, "template": pod},
        ),
        kubernetes_object(
            *("v1", "Service", space, "llama"),
            labels={"kvmesh.io/pool": "true"},
            spec={"selector": labels, "ports": [{"name": "http", "port": port}]},
        ),
        kubernetes_object(
            *("kvmesh.io/v1alpha1", "InferencePolicy", space, "scaled"),
            spec={"autoscale": {"both": SCALED}},
        ),
    ]


def autoscaler(space: str, **selector: str) -> dict[str, Any]:
    metric = {"name": "kvmesh-wanted-replicas", "selector": {"matchLabels": selector}}
    target = {"type": "AverageValue", "averageValue": "1"}
    return kubernetes_object(
        *("autoscaling/v2", "HorizontalPodAutoscaler", space, "llama"),
        spec={
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llama"},
            "minReplicas": 1,
            "maxReplicas": 8,
            "metrics": [{"type": "External", "external": {"metric": metric, "target": target}}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    )


async def raw(kube: Kube, path: str, *more: str) -> Any:
    """Return what the API server answers: JSON, or kubectl's words where it refuses."""
    text = await asyncio.to_thread(kube.kubectl, "get", "--raw", path, *more, check=False)
    return json.loads(text) if text.startswith("{") else text


async def condition(kube: Kube, name: str, *what: str) -> tuple[str, str]:
    """Return a condition's status and message."""
    document = await asyncio.to_thread(stored, kube, *what)
    found = [each for each in (document.get("status") or {}).get("conditions") or () if each["type"] == name]
    return (found[0]["status"], found[0].get("message", "")) if found else ("", "")


async def available(kube: Kube) -> tuple[str, str]:
    return await condition(kube, "Available", "apiservice", API_SERVICE_NAME)


async def replicas(kube: Kube, space: str) -> int:
    found = await asyncio.to_thread(stored, kube, "deployment", "-n", space, "llama")
    return int(found["spec"]["replicas"])


@LOOP
@pytest.mark.usefixtures("picker")
async def test_the_api_server_finds_the_api_and_its_metrics(plane: Kube) -> None:
    await eventually(lambda: available(plane), lambda found: found[0] == "True", seconds=60)
    groups = await raw(plane, "/apis")
    assert "external.metrics.k8s.io" in [each["name"] for each in groups["groups"]]
    listed = await raw(plane, "/apis/external.metrics.k8s.io/v1beta1")
    assert "kvmesh-wanted-replicas" in [each["name"] for each in listed["resources"]]
    found = plane.kubectl("api-resources", "--api-group=external.metrics.k8s.io", "--no-headers")
    assert "kvmesh-wanted-replicas" in found


@LOOP
@pytest.mark.usefixtures("picker")
async def test_the_doctor_says_that_it_is_reached(plane: Kube) -> None:
    await eventually(lambda: available(plane), lambda found: found[0] == "True", seconds=60)
    connection = Connection(ClusterAccess(kubeconfig=plane.kubeconfig))
    try:
        [finding] = await look_at_external_metrics(connection)
    finally:
        await connection.close()
    assert (finding.severity, finding.subject) == (Severity.OK, f"APIService {API_SERVICE_NAME}")


@LOOP
@pytest.mark.usefixtures("picker")
async def test_mistakes_are_said_through_the_api_server(plane: Kube, scaled_site: Site) -> None:
    await eventually(lambda: available(plane), lambda found: found[0] == "True", seconds=60)
    space = scaled_site.pool

    async def words(selector: str) -> Any:
        return await raw(plane, VALUES.format(space, selector))

    # the first look is yet to come, or the pod's reports are
    await eventually(lambda: words("pool%3Dother"), lambda told: "pool=llama,role=both" in told, seconds=30)
    assert "(NotFound)" in await words("pool%3Dother")
    assert "there is no label 'pol'; there are pool, role" in await words("pol%3Da")
    told = await raw(plane, VALUES.format("nowhere", OF_LLAMA))
    assert "no pool of the namespace 'nowhere' is known here" in told


@LOOP
@pytest.mark.usefixtures("picker")
async def test_nobody_reads_it_past_the_api_server_or_without_a_right(plane: Kube, scaled_site: Site) -> None:
    await eventually(lambda: available(plane), lambda found: found[0] == "True", seconds=60)
    path = VALUES.format(scaled_site.pool, OF_LLAMA)
    someone = plane.authority.issue("someone", subject="/CN=someone")
    config = plane.write_kubeconfig("someone", cert=someone)
    assert 'User "someone" cannot list resource "kvmesh-wanted-replicas"' in await raw(
        plane, path, f"--kubeconfig={config}"
    )
    port = stored(plane, "apiservice", API_SERVICE_NAME)["spec"]["service"]["port"]
    trusted = plane.folder / "trusted.crt"
    trusted.write_bytes(b64decode(stored(plane, "apiservice", API_SERVICE_NAME)["spec"]["caBundle"]))
    name = f"{NAME}.{scaled_site.namespace}.svc"
    past = {"server": f"https://{HOST}:{port}", "certificate-authority": str(trusted), "tls-server-name": name}
    # an administrator's certificate is of the cluster's authority, not of that of the front proxy
    direct = plane.write_kubeconfig("direct", cert=plane.admin, cluster=past)
    told = await raw(plane, path, f"--kubeconfig={direct}")
    assert "Unable to connect to the server" in told, told
    without = plane.write_kubeconfig("without", user={"token": "any"}, cluster=past)
    told = await raw(plane, path, f"--kubeconfig={without}")
    assert "Unauthorized" in told or "logged in" in told, told


@LOOP
@pytest.mark.usefixtures("picker")
@pytest.mark.timeout(300)
async def test_a_real_autoscaler_sets_the_deployment_to_the_wanted_number(
    plane: Kube, scaled_site: Site, pods: HeldPod
) -> None:
    await eventually(lambda: available(plane), lambda found: found[0] == "True", seconds=60)
    space = scaled_site.pool
    hpa = ("hpa", "-n", space, "llama")
    plane.apply(autoscaler(space, pool="llama", role="both"))
    assert await replicas(plane, space) == 1
    pods.waiting = 10  # twice what a pod is to have
    await eventually(lambda: replicas(plane, space), lambda number: number == 6, seconds=90)
    status, message = await condition(plane, "ScalingActive", *hpa)
    assert status == "True", message
    pods.waiting = 0
    await eventually(lambda: replicas(plane, space), lambda number: number < 6, seconds=150)
    status, message = await condition(plane, "AbleToScale", *hpa)
    assert status == "True", message
    plane.kubectl("delete", *hpa)


@LOOP
@pytest.mark.usefixtures("picker")
@pytest.mark.timeout(300)
async def test_an_autoscaler_that_gets_no_number_leaves_the_deployment_alone(plane: Kube, scaled_site: Site) -> None:
    await eventually(lambda: available(plane), lambda found: found[0] == "True", seconds=60)
    space = scaled_site.pool
    before = await replicas(plane, space)
    plane.apply(autoscaler(space, pool="misspelt", role="both"))
    active = ("ScalingActive", "hpa", "-n", space, "llama")
    told = await eventually(lambda: condition(plane, *active), lambda found: found[0] == "False", seconds=60)
    assert "pool=llama,role=both" in told[1]
    assert await replicas(plane, space) == before
    plane.kubectl("delete", "hpa", "-n", space, "llama")


def test_installing_again_keeps_the_certificate_and_another_installation_is_refused(
    plane: Kube, scaled_site: Site
) -> None:
    secret = stored(plane, "secret", "-n", scaled_site.namespace, NAME)
    again = scaled_site.install("--external-metrics", "--force-conflicts")
    assert again.code == 0, again.errors
    assert stored(plane, "secret", "-n", scaled_site.namespace, NAME) == secret
    bundle = stored(plane, "apiservice", API_SERVICE_NAME)["spec"]["caBundle"]
    assert bundle == secret["data"]["ca.crt"]
    with made_site(plane) as second:
        refused = second.install("--external-metrics")
        assert refused.code == 1
        assert f"belongs to the installation in namespace {scaled_site.namespace}: a cluster has one server" in (
            refused.errors
        )
        assert second.left() == []


def test_it_goes_with_its_flag_and_with_the_installation(plane: Kube, scaled_site: Site) -> None:
    plain = scaled_site.install()
    assert f"removed APIService {API_SERVICE_NAME}" in plain.printed, plain.errors
    assert "RoleBinding" not in plane.kubectl("get", "rolebinding", "-n", "kube-system", NAME, "-o=name", check=False)
    assert scaled_site.install("--external-metrics").code == 0
    gone = scaled_site.uninstall()
    assert gone.code == 0, gone.errors
    assert gone.printed.index("removed APIService") < gone.printed.index("removed Deployment")
    assert scaled_site.left() == []


def test_another_server_of_the_api_is_left_alone(plane: Kube) -> None:
    others = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": API_SERVICE_NAME},
        "spec": {
            "group": "external.metrics.k8s.io",
            "version": "v1beta1",
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": {"namespace": "keda", "name": "keda-operator-metrics-apiserver", "port": 443},
        },
    }
    plane.apply(others)
    try:
        with made_site(plane) as site:
            refused = site.install("--external-metrics", "--force-conflicts")
            assert refused.code == 1
            assert "leads to Service keda/keda-operator-metrics-apiserver" in refused.errors
            assert site.left() == []
    finally:
        plane.kubectl("delete", "apiservice", API_SERVICE_NAME)


def test_helm_makes_the_certificate_once(plane: Kube, tmp_path: Path) -> None:
    plane.apply(namespace("by-helm"), namespace("llm"), namespace("ingress"))
    values = {
        "image": "registry.example/kvmesh:0.1.0",
        "istioVersion": "1.31",
        "externalMetrics": True,
        "pools": [{"namespace": "llm", "name": "vllm"}],
        "gateways": [{"namespace": "ingress", "name": "inference"}],
        "routes": [{"host": "llm.example.com"}],
    }
    path = tmp_path / "values.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    into = ("--kubeconfig", str(plane.kubeconfig), "--namespace", "by-helm")
    helm("install", RELEASE, str(CHART), *into, "--values", str(path), "--skip-crds")
    try:
        secret = stored(plane, "secret", "-n", "by-helm", NAME)["data"]
        assert stored(plane, "apiservice", API_SERVICE_NAME)["spec"]["caBundle"] == secret["ca.crt"]
        helm("upgrade", RELEASE, str(CHART), *into, "--values", str(path))
        assert stored(plane, "secret", "-n", "by-helm", NAME)["data"] == secret
        assert stored(plane, "apiservice", API_SERVICE_NAME)["spec"]["caBundle"] == secret["ca.crt"]
    finally:
        helm("uninstall", RELEASE, *into)
    assert API_SERVICE_NAME not in plane.kubectl("get", "apiservice", "-o=name")
