"""What a cluster cannot do with the volume of tokenizer folders is said before anything is applied."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from operate.install.cluster import ForbiddenError, InstallError
from operate.install.model_volume import EVERYWHERE, PROBE, judge_volume, read_volume
from operate.install.objects import Document, Kind
from operate.install.plan import InstallPlan
from tests.unit.operate_install.sample_plans import plan

IMAGE = plan(tokenizers_image="r.example/t:1")
CACHE = plan(model_cache_claim="cache", fetch_models=("org/a",))
FOLDERS = plan(tokenizers_claim="folders")
RWO, RWX, ROX, RWOP = "ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany", "ReadWriteOncePod"
TAINTED = {"taints": [{"key": "control-plane", "effect": "NoSchedule"}]}


class FakeCluster:
    """An API server that answers as it is told."""

    def __init__(
        self,
        *,
        claim: Sequence[str] | None = None,
        nodes: Sequence[Document] = ({}, {}),
        drops: bool = False,
        refuses: InstallError | None = None,
        namespaces: Sequence[str] = (),
        hides_namespaces: bool = False,
    ) -> None:
        self._claim, self._nodes, self._drops, self._refuses = claim, nodes, drops, refuses
        self._namespaces, self._hides_namespaces = namespaces, hides_namespaces
        self.asked: list[tuple[str, str]] = []

    def serves(self, kind: Kind) -> bool:
        raise AssertionError(kind)

    def delete(self, kind: Kind, name: str, namespace: str | None) -> None:
        raise AssertionError(kind)

    def apply(self, document: Document, *, force: bool, rehearse: bool = False) -> Document:
        assert (force, rehearse) == (False, True)
        self.asked.append((document["metadata"]["namespace"], document["metadata"]["name"]))
        if self._refuses is not None:
            raise self._refuses
        if self._drops:
            document["spec"]["template"]["spec"].pop("volumes")
        return document

    def get(self, kind: Kind, name: str, namespace: str | None) -> Document | None:
        if kind.name == "Namespace" and self._hides_namespaces:
            raise ForbiddenError("cannot get Namespace")
        if kind.name == "Namespace":
            return {"metadata": {"name": name}} if name in self._namespaces else None
        assert (kind.name, namespace) == ("PersistentVolumeClaim", "kvmesh-system")
        return None if self._claim is None else {"spec": {"accessModes": list(self._claim)}}

    def labelled(self, kind: Kind, labels: Mapping[str, str], namespace: str | None = None) -> Sequence[Document]:
        assert (kind.name, labels, namespace) == ("Node", {}, None)
        if self._refuses is not None:
            raise self._refuses
        return [{"spec": spec} for spec in self._nodes]


def judged(install: InstallPlan, cluster: FakeCluster) -> tuple[Sequence[str], Sequence[str]]:
    return judge_volume(install, read_volume(cluster, install))


def test_an_installation_without_such_a_volume_asks_nothing() -> None:
    assert judged(plan(), FakeCluster(refuses=InstallError("asked"))) == ([], [])


@pytest.mark.parametrize("namespaces", [(), ("kvmesh-system",)])
def test_a_cluster_that_keeps_the_volume_s_image_is_asked_where_a_namespace_is(namespaces: Sequence[str]) -> None:
    cluster = FakeCluster(namespaces=namespaces)
    assert judged(IMAGE, cluster) == ([], [])
    assert cluster.asked == [(namespaces[0] if namespaces else EVERYWHERE, PROBE)]


def test_the_administrator_of_a_namespace_asks_in_it() -> None:
    cluster = FakeCluster(hides_namespaces=True)
    assert judged(IMAGE, cluster) == ([], [])
    assert cluster.asked == [("kvmesh-system", PROBE)]


def test_a_cluster_that_leaves_the_image_out_is_refused_with_what_to_do() -> None:
    [refusal], warnings = judged(IMAGE, FakeCluster(drops=True))
    assert not warnings
    assert refusal.startswith("--tokenizers-image r.example/t:1: the API server leaves volumes of images out of pods")
    assert "ImageVolume" in refusal
    assert "--tokenizers-claim" in refusal


def test_a_cluster_that_may_not_be_asked_is_no_refusal() -> None:
    refusals, [warning] = judged(IMAGE, FakeCluster(refuses=ForbiddenError("cannot apply Deployment")))
    assert not refusals
    assert warning == "not looked at: whether pods may have volumes of images: cannot apply Deployment"


@pytest.mark.parametrize(
    ("install", "modes", "nodes", "refused", "warned"),
    [
        (CACHE, (RWX,), ({}, {}), "", ""),
        (CACHE, (RWO,), ({}, {}), "", "of 2 nodes one alone can have it"),
        (CACHE, (RWO,), ({},), "", ""),
        (CACHE, (RWO,), ({}, {"unschedulable": True}, TAINTED), "", ""),
        (plan(model_cache_claim="cache", picker_replicas=1, picker_replicas_max=1), (RWO,), ({}, {}), "", ""),
        (CACHE, (RWO, ROX), ({}, {}), "", "of 2 nodes one alone can have it"),
        (CACHE, (ROX,), ({}, {}), "--fetch-model writes into it", ""),
        (CACHE, (RWOP,), ({},), "one pod alone can have it", ""),
        (FOLDERS, (ROX,), ({}, {}), "", ""),
        (FOLDERS, (RWO,), ({}, {}), "", "give one with ReadOnlyMany or ReadWriteMany"),
        (FOLDERS, None, ({}, {}), "", "there is no such PersistentVolumeClaim in namespace kvmesh-system"),
    ],
)
def test_a_claim_must_be_one_that_all_pickers_can_have(
    install: InstallPlan, modes: Sequence[str] | None, nodes: Sequence[Any], refused: str, warned: str
) -> None:
    for told, expected in zip(judged(install, FakeCluster(claim=modes, nodes=nodes)), (refused, warned), strict=True):
        assert len(told) == bool(expected), told
        assert expected in "".join(told)


def test_nodes_are_not_counted_for_a_claim_that_all_can_have() -> None:
    assert judged(CACHE, FakeCluster(claim=(RWX,), refuses=ForbiddenError("cannot list nodes"))) == ([], [])


def test_nodes_that_may_not_be_counted_are_taken_for_several() -> None:
    _, warnings = judged(CACHE, FakeCluster(claim=(RWO,), refuses=ForbiddenError("cannot list nodes")))
    assert warnings[0] == "not looked at: how many nodes there are: cannot list nodes"
    assert "of the nodes one alone can have it" in warnings[1]
