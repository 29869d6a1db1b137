"""Clusters that are not as they should be: what `kvmesh install` and `kvmesh uninstall` say and do."""

import json

from kvmesh.documents.documents import ClusterAccess
from operate.install.cluster import InstallError
from operate.install.installer import uninstall
from operate.install.lightkube_cluster import LightkubeCluster
from operate.install.objects import Kind
from tests.mesh.mesh_objects import gateway_labels, kubernetes_object, namespace
from tests.mesh.site import Site, namespace_administrator

ISTIOD = {"app": "istiod"}


def istiod(release: str) -> dict[str, object]:
    container = {"name": "discovery", "image": f"docker.io/istio/pilot:{release}"}
    name = f"istiod-{release.replace('.', '-')}"
    return kubernetes_object("v1", "Pod", "istio-system", name, labels=ISTIOD, spec={"containers": [container]})


def filter_version(site: Site) -> str:
    """Return the proxies for which the filter of the site's gateway is written."""
    found = json.loads(site.kube.kubectl("get", "envoyfilter", "-n", site.gateway, "kvmesh-picker-gateway", "-o=json"))
    versions = {each["match"]["proxy"]["proxyVersion"] for each in found["spec"]["configPatches"]}
    [version] = versions
    return str(version)


def test_of_two_istiods_the_older_one_is_installed_for_and_that_is_said(site: Site) -> None:
    site.kube.apply(namespace("istio-system"), istiod("1.30.2"), istiod("1.31.0"))
    try:
        done = site.install("--wait-seconds=0")
        newer = site.install("--wait-seconds=0", "--istio-version=1.31")
    finally:
        site.kube.kubectl("delete", "pod", "-n", "istio-system", "-l", "app=istiod", "--now")
    assert done.code == 0, done.errors
    half = "warning: Istio is half upgraded (1.30, 1.31): what is installed is made for the oldest"
    assert half in done.printed.splitlines()
    assert "found: Istio 1.30, as its oldest proxy or istiod says" in done.printed
    assert newer.code == 2
    assert "--istio-version 1.31: there is 1.30 here" in newer.errors
    upgraded = site.install("--wait-seconds=0")  # the upgrade has ended
    assert "half upgraded" not in upgraded.printed
    changed = {name for name, outcome in upgraded.outcomes.items() if outcome == "changed"}
    assert changed <= {f"EnvoyFilter {site.gateway}/kvmesh-picker-gateway"}, upgraded.printed


def test_a_gateway_without_pods_is_installed_for_and_said(site: Site) -> None:
    labels = ",".join(f"{name}={value}" for name, value in gateway_labels("gateway").items())
    site.kube.kubectl("delete", "pod", "-n", site.gateway, "-l", labels, "--now")
    unknown = site.install("--wait-seconds=0")
    assert unknown.code == 2
    assert "Istio's release was not found: name it by --istio-version" in unknown.errors
    assert site.left() == []
    done = site.install("--wait-seconds=0", "--istio-version=1.31")
    assert done.code == 0, done.errors
    assert f"warning: {site.gateway}/gateway has no pods now: nobody asks the picker until it has" in done.printed


def test_a_disk_of_another_size_is_refused_before_anything_is_changed(site: Site) -> None:
    assert site.install("--wait-seconds=0").code == 0
    done = site.install("--wait-seconds=0", "--redis-storage-gib=9", "--indexer-replicas=3")
    assert done.code == 1
    assert "Nothing was changed" in done.errors
    assert done.outcomes == {}


def test_what_others_have_made_under_our_names_outlives_an_uninstallation(site: Site) -> None:
    site.kube.kubectl("create", "namespace", site.namespace)
    assert site.install("--wait-seconds=0").code == 0
    service = ("service", "-n", site.namespace, "kvmesh-indexer")
    site.kube.kubectl("delete", *service)
    site.kube.kubectl("create", "service", "clusterip", "-n", site.namespace, "kvmesh-indexer", "--tcp=1")
    gone = site.uninstall()
    assert gone.code == 0, gone.errors
    assert f"Service {site.namespace}/kvmesh-indexer" not in gone.printed
    assert "kvmesh-indexer" in site.kube.kubectl("get", *service)
    assert site.left() == []


class CutOff(LightkubeCluster):
    """Deletes so many objects more, and then nothing."""

    allowed = 0

    def delete(self, kind: Kind, name: str, namespace: str | None) -> None:
        if self.allowed == 0:
            raise InstallError("cut off")
        self.allowed -= 1
        super().delete(kind, name, namespace)


def uninstall_step_by_step(cluster: CutOff, site: Site) -> None:
    """Uninstall, cut off after each object: each time it goes on where it ended."""
    for _ in range(len(site.left()) + 1):
        cluster.allowed = 1
        try:
            uninstall(cluster, installation=site.namespace, settle_seconds=0, sleep=lambda _: None)
        except InstallError as error:
            assert str(error) == "cut off"
        else:
            break
    else:
        raise AssertionError("it did not come to its end")
    assert site.left() == []


def test_an_uninstallation_that_is_cut_off_at_any_object_can_be_run_again(site: Site) -> None:
    assert site.install().code == 0
    uninstall_step_by_step(CutOff(ClusterAccess(kubeconfig=site.kube.kubeconfig), say=print), site)


def test_one_of_a_namespaces_administrator_can_be_run_again_too(site: Site) -> None:
    """Who may not list all namespaces finds ours by an object that is itself removed."""
    site.kube.kubectl("create", "namespace", site.namespace)
    owner = namespace_administrator(site, [site.namespace, site.pool, site.gateway])
    flags = ("--scope=namespaced", "--no-create-namespace", "--skip-crds", "--wait-seconds=0")
    done = site.install(*flags, kubeconfig=owner)
    assert done.code == 0, done.errors
    uninstall_step_by_step(CutOff(ClusterAccess(kubeconfig=owner), say=print), site)
