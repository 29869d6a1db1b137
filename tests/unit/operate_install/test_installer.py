"""Bringing a cluster to what was rendered, and taking it away again; the cluster is a dictionary."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from operate.install.cluster import InstallError
from operate.install.installer import install, is_last, policies, uninstall
from operate.install.objects import KINDS, POLICY, Document, Kind
from operate.install.parse_targets import parse_gateway
from operate.install.plan import InstallPlan, Mode, PoolTarget, RouteTarget
from operate.install.pod_parts import admin_secret
from operate.install.render import render
from operate.install.shipped_files import read_crds
from tests.unit.operate_install.sample_plans import MODES, plan

Key = tuple[str, str | None, str]


class FakeClock:
    def __init__(self) -> None:
        self.seconds = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.seconds += seconds


class FakeCluster:
    """Holds objects; a Deployment is available after `ready_after` looks at it, and some names are refused."""

    def __init__(self, *, without: Sequence[str] = (), ready_after: int = 1, refuses: Sequence[str] = ()) -> None:
        self.objects: dict[Key, dict[str, Any]] = {}
        self.missing = set(without)
        self.ready_after = ready_after
        self.looks = 0
        self.refuses = set(refuses)
        self.rehearsed: list[Key] = []
        self.log: list[tuple[str, str]] = []

    def serves(self, kind: Kind) -> bool:
        return kind.name not in self.missing

    def apply(self, document: Document, *, force: bool, rehearse: bool = False) -> Document:
        if document["metadata"]["name"] in self.refuses:
            raise InstallError(f"cannot apply {document['metadata']['name']}: spec is immutable")
        if rehearse:
            self.rehearsed.append(self.key(document))
            return document
        self.log.append(("apply", document["kind"]))
        self.objects[self.key(document)] = {**document}
        return document

    def get(self, kind: Kind, name: str, namespace: str | None) -> Document | None:
        found = self.objects.get((kind.name, namespace, name))
        if found is not None and kind.name == "StatefulSet":
            return {**found, "status": {"replicas": 1, "updatedReplicas": 1, "availableReplicas": 1}}
        if found is not None and kind.name == "Deployment":
            self.looks += 1
            ready = 1 if self.looks >= self.ready_after else 0
            status = {"observedGeneration": 3, "replicas": 1, "updatedReplicas": 1, "availableReplicas": ready}
            return {**found, "metadata": {**found["metadata"], "generation": 3}, "status": status}
        return found

    def labelled(self, kind: Kind, labels: Mapping[str, str], namespace: str | None = None) -> Sequence[Document]:
        return [
            each
            for (name, space, _), each in self.objects.items()
            if name == kind.name
            and namespace in {None, space}
            and labels.items() <= each["metadata"].get("labels", {}).items()
        ]

    def delete(self, kind: Kind, name: str, namespace: str | None) -> None:
        self.log.append(("delete", kind.name))
        self.objects.pop((kind.name, namespace, name), None)

    def put(self, kind: str, name: str, namespace: str | None = None, **labels: str) -> None:
        meta = {"name": name, "labels": labels} | ({"namespace": namespace} if namespace else {})
        self.objects[kind, namespace, name] = {"kind": kind, "metadata": meta}

    @staticmethod
    def key(document: Document) -> Key:
        meta = document["metadata"]
        return document["kind"], meta.get("namespace"), meta["name"]


def rendered(install_plan: InstallPlan) -> list[dict[str, Any]]:
    return render(install_plan, crds=read_crds())


def second_plan() -> InstallPlan:
    """Another installation in the same cluster, with a gateway and a pool of its own."""
    pool = PoolTarget(namespace="lab", name="qwen")
    gateway = parse_gateway("lab-ingress/lab")
    routes = (RouteTarget(host="lab.example.com", pool=pool),)
    return plan(namespace="kvmesh-two", pools=(pool,), gateways=(gateway,), routes=routes)


def run(cluster: FakeCluster, install_plan: InstallPlan, *, wait_seconds: float = 60) -> list[str]:
    said: list[str] = []
    clock = FakeClock()
    install(
        cluster,
        rendered(install_plan),
        installation=install_plan.namespace,
        wait_seconds=wait_seconds,
        say=said.append,
        now=clock.now,
        sleep=clock.sleep,
    )
    return said


def test_installing_puts_every_object_there() -> None:
    cluster = FakeCluster()
    run(cluster, plan())
    assert set(cluster.objects) == {FakeCluster.key(each) for each in rendered(plan())}


def test_what_is_made_once_follows_the_namespace_and_is_never_changed_again() -> None:
    cluster = FakeCluster()
    install_plan = plan()
    for token in ("the first token", "another token"):
        install(
            cluster,
            rendered(install_plan),
            installation=install_plan.namespace,
            wait_seconds=60,
            sleep=FakeClock().sleep,
            once=admin_secret(install_plan, token=token),
        )
    secret = cluster.objects["Secret", "kvmesh-system", "kvmesh-admin-token"]
    assert secret["data"] == {"token": b64encode(b"the first token").decode()}
    kinds = [kind for _, kind in cluster.log]
    assert kinds.index("Namespace") < kinds.index("Secret") < kinds.index("Deployment")
    run(cluster, install_plan)  # as a version would that knows nothing of it
    assert cluster.objects["Secret", "kvmesh-system", "kvmesh-admin-token"] == secret
    uninstall(cluster, installation=install_plan.namespace, sleep=FakeClock().sleep, settle_seconds=0)
    assert not [kind for kind, _, _ in cluster.objects if kind == "Secret"]


def test_gateways_are_told_to_ask_only_when_the_picker_is_there() -> None:
    cluster = FakeCluster(ready_after=6)
    run(cluster, plan())
    assert cluster.looks >= 6
    assert cluster.log[-1] == ("apply", "EnvoyFilter")


def test_a_picker_that_does_not_come_up_leaves_the_gateways_alone() -> None:
    cluster = FakeCluster(ready_after=1000)
    with pytest.raises(InstallError, match=r"not ready after 60 s: kvmesh-.*No gateway was told"):
        run(cluster, plan())
    assert ("apply", "EnvoyFilter") not in cluster.log


def test_what_the_cluster_would_refuse_is_found_before_anything_is_changed() -> None:
    cluster = FakeCluster(refuses=["kvmesh-redis"])
    cluster.put("Namespace", "kvmesh-system", team="platform")
    before = dict(cluster.objects)
    with pytest.raises(InstallError, match=r"kvmesh-redis: spec is immutable\. Nothing was changed"):
        run(cluster, plan())
    assert cluster.objects == before


def test_only_what_has_its_namespace_can_be_tried_first() -> None:
    cluster = FakeCluster()
    run(cluster, plan())
    rehearsed = {namespace for _, namespace, _ in cluster.rehearsed}
    assert rehearsed == {None, "llm", "istio-ingress"}


def test_a_cluster_without_istio_is_left_unchanged() -> None:
    cluster = FakeCluster(without=["EnvoyFilter", "DestinationRule"])
    with pytest.raises(InstallError, match=r"the cluster has no DestinationRule, EnvoyFilter.*Nothing was changed"):
        run(cluster, plan())
    assert cluster.objects == {}


def test_an_upgrade_removes_what_is_no_longer_rendered_and_nothing_else() -> None:
    cluster = FakeCluster()
    run(cluster, plan())
    cluster.put("EnvoyFilter", "theirs", "istio-ingress", app="theirs")
    run(cluster, plan(28, Mode.SIDECAR))
    assert set(cluster.objects) - {FakeCluster.key(each) for each in rendered(plan(28, Mode.SIDECAR))} == {
        ("EnvoyFilter", "istio-ingress", "theirs")
    }


def test_a_namespace_that_was_there_before_is_neither_changed_nor_removed() -> None:
    cluster = FakeCluster()
    cluster.put("Namespace", "kvmesh-system", team="platform")
    said = run(cluster, plan())
    uninstall(cluster, installation="kvmesh-system", sleep=FakeClock().sleep, settle_seconds=0)
    assert "left as it is: Namespace kvmesh-system (not made by kvmesh install)" in said
    assert list(cluster.objects) == [("Namespace", None, "kvmesh-system")]
    assert cluster.objects["Namespace", None, "kvmesh-system"]["metadata"]["labels"] == {"team": "platform"}


@pytest.mark.parametrize("mode", list(MODES))
def test_uninstalling_leaves_nothing(mode: Mode) -> None:
    cluster = FakeCluster()
    run(cluster, plan(28, mode, monitoring=True))
    count = len(cluster.objects)
    removed = uninstall(cluster, installation="kvmesh-system", sleep=FakeClock().sleep, settle_seconds=5)
    assert (removed, cluster.objects) == (count, {})


def test_filters_go_first_and_gateways_get_a_moment_to_hear_of_it() -> None:
    cluster, clock = FakeCluster(), FakeClock()
    run(cluster, plan())
    cluster.log.clear()
    uninstall(cluster, installation="kvmesh-system", sleep=clock.sleep, settle_seconds=5)
    assert cluster.log[0] == ("delete", "EnvoyFilter")
    assert clock.slept == [5]


def test_uninstalling_twice_is_no_error() -> None:
    cluster = FakeCluster(without=["EnvoyFilter", "ServiceMonitor", "InferencePolicy"])
    assert uninstall(cluster, installation="kvmesh-system", sleep=FakeClock().sleep, settle_seconds=5) == 0


def test_another_installation_keeps_its_objects_and_the_crds() -> None:
    cluster = FakeCluster()
    run(cluster, plan())
    run(cluster, second_plan())
    assert not is_last(cluster, "kvmesh-system")
    uninstall(cluster, installation="kvmesh-system", sleep=FakeClock().sleep, settle_seconds=0)
    assert is_last(cluster, "kvmesh-two")
    assert set(cluster.objects) == {FakeCluster.key(each) for each in rendered(second_plan())}


def test_an_installation_does_not_take_over_what_belongs_to_another_one() -> None:
    cluster = FakeCluster()
    run(cluster, plan())
    before = dict(cluster.objects)
    with pytest.raises(InstallError, match=r"belongs to the installation in namespace kvmesh-system.*Nothing was"):
        run(cluster, plan(namespace="kvmesh-two"))
    assert cluster.objects == before


def test_crds_stay_with_their_policies_where_that_is_wanted() -> None:
    cluster = FakeCluster()
    run(cluster, plan())
    cluster.put("InferencePolicy", "chat", "llm")
    assert policies(cluster) == ["llm/chat"]
    uninstall(cluster, installation="kvmesh-system", sleep=FakeClock().sleep, settle_seconds=0, keep_crds=True)
    assert {kind for kind, _, _ in cluster.objects} == {"CustomResourceDefinition", "InferencePolicy"}


def test_policies_are_not_asked_for_where_their_crd_is_gone() -> None:
    assert policies(FakeCluster(without=[POLICY.name])) == []


def test_every_kind_has_a_place_in_the_order() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)
