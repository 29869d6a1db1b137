"""What is kept of documents, and that what has not changed stays the same object."""

from typing import Any

from kvmesh.documents.document_kinds import MESH_KINDS, kind_of, trimmed
from kvmesh.documents.document_store import DocumentStore
from kvmesh.documents.documents import DocumentKey, document_key


def _pod(name: str, ip: str = "10.0.0.1") -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "llm"}, "status": {"podIP": ip}}


def _trim(document: dict[str, Any]) -> Any:
    kind = kind_of(document)
    assert kind is not None
    return trimmed(document, kind)


def test_of_a_pod_only_what_discovery_reads_is_kept() -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "a",
            "namespace": "llm",
            "resourceVersion": "7",
            "managedFields": [{}],
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "x": "y"},
        },
        "spec": {
            "nodeName": "n",
            "containers": [{"name": "c", "image": "i", "env": [], "ports": [{"containerPort": 1}]}],
        },
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "hostIP": "10.1.1.1",
            "conditions": [
                {"type": "Initialized", "status": "True"},
                {"type": "Ready", "status": "True", "message": "m"},
            ],
        },
    }
    assert _trim(pod) == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "a", "namespace": "llm", "annotations": {"x": "y"}},
        "spec": {"containers": [{"name": "c", "ports": [{"containerPort": 1}]}]},
        "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }


def test_a_pod_that_nobody_has_judged_yet_is_not_taken_for_one_without_judge() -> None:
    pod = _pod("a")
    pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
    assert _trim(pod)["status"]["conditions"] == [{"type": "Ready", "status": "Unknown"}]


def test_trimming_twice_changes_nothing_and_odd_shapes_pass_through() -> None:
    statuses: list[Any] = [None, [], "x", {"conditions": 3}, {"conditions": [1]}]
    specs: list[Any] = [None, [], {"containers": 3}, {"containers": [1, {}]}]
    for status in statuses:
        for spec in specs:
            once = _trim({**_pod("a"), "status": status, "spec": spec})
            assert _trim(once) == once


def test_status_is_kept_only_where_somebody_reads_it() -> None:
    kept = {}
    for kind in MESH_KINDS:
        document = {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {"name": "x"},
            "status": {"parents": [1]},
        }
        kept[kind.kind] = trimmed(document, kind).get("status")
    assert {kind for kind, status in kept.items() if status} == {"InferencePolicy", "HTTPRoute"}


def test_a_snapshot_holds_the_same_objects_for_what_has_not_changed() -> None:
    store = DocumentStore()
    store.replace([_pod("b"), _pod("a")], known=())
    before = store.snapshot(synced=True)
    assert [each["metadata"]["name"] for each in before.of("Pod")] == ["a", "b"]
    assert not store.put(_pod("a"))
    assert store.snapshot(synced=True).of("Pod") is before.of("Pod")
    assert store.put(_pod("b", "10.0.0.9"))
    after = store.snapshot(synced=True).of("Pod")
    assert (after[0] is before.of("Pod")[0], after[1] is before.of("Pod")[1]) == (True, False)


def test_a_new_list_removes_what_is_no_longer_there_in_its_own_scope_only() -> None:
    store = DocumentStore()
    store.replace([_pod("a"), _pod("b")], known=())
    store.put({**_pod("c"), "metadata": {"name": "c", "namespace": "other"}})
    known = store.keys(group="", kind="Pod", namespace="llm")
    assert store.replace([_pod("a")], known=known)
    assert [each["metadata"]["name"] for each in store.snapshot(synced=True).of("Pod")] == ["a", "c"]
    assert not store.remove(DocumentKey("", "Pod", "llm", "b"))


def test_a_key_tells_group_kind_namespace_and_name() -> None:
    document = {"apiVersion": "kvmesh.io/v1alpha1", "kind": "InferencePolicy", "metadata": {"name": "p"}}
    assert document_key(document) == ("kvmesh.io", "InferencePolicy", "default", "p")
    assert str(document_key(document)) == "InferencePolicy default/p"
    assert document_key({"metadata": None}) == ("", "", "default", "")
