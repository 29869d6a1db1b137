"""Which pods serve a pool, at which addresses."""

from typing import Any

import pytest

from kvmesh.blocks.source import EventAddresses
from kvmesh.documents.documents import Document
from kvmesh.documents.pool_resolver import PoolResolver, resolve_pools
from kvmesh.documents.pools import EventTemplates, Pool, PoolEndpoint, pool_seed


def _pod(name: str, ip: str | None, namespace: str = "llm", labels: Any = None, **status: Any) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": "vllm"} if labels is None else labels},
        "spec": {"containers": [{"name": "vllm", "ports": [{"name": "http", "containerPort": 8000}]}]},
        "status": {"podIP": ip, **status},
    }


def _pool(name: str = "llama", **spec: Any) -> Document:
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": "llm", "labels": {"team": "a"}},
        "spec": {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}], **spec},
    }


def _service(name: str = "svc", labels: Any = None, **spec: Any) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": "llm",
            "labels": {"kvmesh.io/pool": "true"} if labels is None else labels,
        },
        "spec": {"selector": {"app": "vllm"}, "ports": [{"port": 80, "targetPort": 8000}], **spec},
    }


def _documents(*documents: Document) -> dict[str, tuple[Document, ...]]:
    kinds = dict.fromkeys(document["kind"] for document in documents)
    return {kind: tuple(each for each in documents if each["kind"] == kind) for kind in kinds}


def _addresses(*documents: Document, pool: str = "llm/llama") -> list[str]:
    return [each.address for each in resolve_pools(_documents(*documents)).pools[pool].endpoints]


def test_a_pool_has_one_endpoint_for_each_pod_that_its_labels_select_in_its_namespace() -> None:
    resolved = resolve_pools(
        _documents(
            _pool(),
            _pod("b", "10.0.0.2"),
            _pod("a", "10.0.0.1"),
            _pod("elsewhere", "10.0.0.3", namespace="other"),
            _pod("else", "10.0.0.4", labels={"app": "web"}),
            _pod("more", "10.0.0.5", labels={"app": "vllm", "x": "y"}),
        )
    )
    endpoints = tuple(
        PoolEndpoint(address=f"10.0.0.{number}:8000", pod=f"llm/{name}", labels={"app": "vllm", **more})
        for number, name, more in ((1, "a", {}), (2, "b", {}), (5, "more", {"x": "y"}))
    )
    expected = Pool(name="llm/llama", kind="InferencePool", endpoints=endpoints, labels={"team": "a"})
    assert (dict(resolved.pools), resolved.problems) == ({"llm/llama": expected}, ())


def test_all_labels_of_a_selector_must_match() -> None:
    pool = _pool(selector={"matchLabels": {"app": "vllm", "gpu": "h200"}})
    assert _addresses(pool, _pod("a", "10.0.0.1"), _pod("b", "10.0.0.2", labels={"app": "vllm", "gpu": "h200"})) == [
        "10.0.0.2:8000"
    ]


def test_several_target_ports_are_one_endpoint_for_each_data_parallel_rank() -> None:
    pools = resolve_pools(
        _documents(_pool(targetPorts=[{"number": 8000}, {"number": 8001}]), _pod("a", "10.0.0.1"))
    ).pools
    assert [(each.address, each.rank) for each in pools["llm/llama"].endpoints] == [
        ("10.0.0.1:8000", 0),
        ("10.0.0.1:8001", 1),
    ]


def test_ipv6_addresses_are_bracketed_and_canonical() -> None:
    assert _addresses(_pool(), _pod("a", "FD00:0::1")) == ["[fd00::1]:8000"]


@pytest.mark.parametrize(
    ("status", "ready"),
    [
        ({}, True),
        ({"conditions": []}, True),
        ({"conditions": [{"type": "Ready", "status": "True"}]}, True),
        ({"conditions": [{"type": "Ready", "status": "False"}]}, False),
        ({"conditions": [{"type": "Ready", "status": "Unknown"}]}, False),
        ({"conditions": [{"type": "PodScheduled", "status": "True"}]}, False),
    ],
)
def test_a_pod_is_ready_when_its_condition_says_so_or_when_nobody_judges(status: Any, ready: bool) -> None:
    pools = resolve_pools(_documents(_pool(), _pod("a", "10.0.0.1", **status))).pools
    assert [each.ready for each in pools["llm/llama"].endpoints] == [ready]


def test_a_pod_that_is_being_deleted_is_terminating() -> None:
    pod = dict(_pod("a", "10.0.0.1"))
    pod["metadata"] = {**pod["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
    assert resolve_pools(_documents(_pool(), pod)).pools["llm/llama"].endpoints[0].terminating


@pytest.mark.parametrize(
    "pod", [_pod("a", None), _pod("a", "10.0.0.1", phase="Failed"), _pod("a", "10.0.0.1", phase="Succeeded")]
)
def test_a_pod_without_address_or_that_has_ended_is_no_endpoint(pod: Document) -> None:
    resolved = resolve_pools(_documents(_pool(), pod))
    assert (resolved.pools["llm/llama"].endpoints, resolved.problems) == ((), ())


def test_of_two_pods_at_one_address_the_one_that_serves_counts() -> None:
    going = dict(_pod("a", "10.0.0.1"))
    going["metadata"] = {**going["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
    endpoints = resolve_pools(_documents(_pool(), going, _pod("b", "10.0.0.1"))).pools["llm/llama"].endpoints
    assert [(each.pod, each.terminating) for each in endpoints] == [("llm/b", False)]


def test_a_service_is_a_pool_when_its_label_says_so() -> None:
    named = [{"name": "metrics", "port": 9000}, {"name": "http-api", "port": 80, "targetPort": "http"}]
    documents = (
        _service(),
        _service("named", ports=named),
        _service("plain", ports=[{"port": 8123}]),
        _service("other", labels={}),
        _pod("a", "10.0.0.1"),
    )
    pools = resolve_pools(_documents(*documents)).pools
    assert {name: [each.address for each in pool.endpoints] for name, pool in pools.items()} == {
        "llm/named": ["10.0.0.1:8000"],
        "llm/plain": ["10.0.0.1:8123"],
        "llm/svc": ["10.0.0.1:8000"],
    }


def test_a_pod_without_the_port_that_a_service_names_is_left_out_and_said() -> None:
    service = _service(ports=[{"port": 80, "targetPort": "api"}])
    resolved = resolve_pools(_documents(service, _pod("a", "10.0.0.1")))
    assert resolved.pools["llm/svc"].endpoints == ()
    assert [(each.reason, each.where) for each in resolved.problems] == [("port-name-unknown", "Service llm/svc")]
    assert "llm/a" in resolved.problems[0].words


def test_an_inference_pool_wins_over_a_service_of_its_name() -> None:
    resolved = resolve_pools(_documents(_pool("same"), _service("same"), _pod("a", "10.0.0.1")))
    assert resolved.pools["llm/same"].kind == "InferencePool"
    assert [each.reason for each in resolved.problems] == ["pool-name-taken"]


def test_an_import_is_known_and_has_no_endpoints() -> None:
    document = {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha1",
        "kind": "InferencePoolImport",
        "metadata": {"name": "far", "namespace": "llm"},
    }
    resolved = resolve_pools(_documents(document))
    assert (dict(resolved.pools), resolved.imports) == ({}, ("llm/far",))


def test_annotations_say_which_model_and_where_events_are_published() -> None:
    pool = dict(_pool())
    notes = {"kvmesh.io/model": "llama-3", "kvmesh.io/events-port": "5557", "kvmesh.io/replay-port": "tcp://{ip}:6000"}
    pool["metadata"] = {**pool["metadata"], "annotations": notes}
    found = resolve_pools(_documents(pool)).pools["llm/llama"]
    assert found.model == "llama-3"
    assert found.event_sources == EventTemplates(events="tcp://{ip}:5557", replay="tcp://{ip}:6000")
    rank_1 = PoolEndpoint(address="[fd00::1]:8001", rank=1)
    assert found.event_sources.addresses(rank_1) == EventAddresses(
        events="tcp://[fd00::1]:5558", replay="tcp://[fd00::1]:6001"
    )


@pytest.mark.parametrize(
    ("document", "path"),
    [
        (_pool(selector={"matchLabels": {}}), "spec.selector.matchLabels"),
        (_pool(selector={"matchLabels": {"app": 1}}), "spec.selector.matchLabels.app"),
        (_pool(selector=[]), "spec.selector"),
        (_pool(targetPorts=[]), "spec.targetPorts"),
        (_pool(targetPorts=[{"number": 0}]), "spec.targetPorts[0].number"),
        (_pool(targetPorts=[{"number": "8000"}]), "spec.targetPorts[0].number"),
        (_pool(targetPorts=[{"number": 1}, {"number": 1}]), "spec.targetPorts[1].number"),
        (_pool(targetPorts=[8000]), "spec.targetPorts[0]"),
        (_pool(targetPorts={}), "spec.targetPorts"),
        (_service(selector=None), "spec.selector"),
        (_service(ports=[]), "spec.ports"),
        (_service(ports=[{"port": 80, "targetPort": True}]), "spec.ports[0].targetPort"),
        (_service(labels={"kvmesh.io/pool": True}), "metadata.labels.kvmesh.io/pool"),
        ({**_pool(), "metadata": {"name": "llama", "namespace": "llm", "annotations": {"kvmesh.io/events-port": "x"}}},
         'metadata.annotations["kvmesh.io/events-port"]'),
    ],
)  # fmt: skip
def test_a_pool_that_cannot_be_understood_is_left_out_and_the_field_is_named(document: Document, path: str) -> None:
    resolved = resolve_pools(_documents(document, _pod("a", "10.0.0.1")))
    assert dict(resolved.pools) == {}
    assert [(each.reason, each.words.partition(": ")[0]) for each in resolved.problems] == [("pool-invalid", path)]


def test_a_pod_that_cannot_be_understood_is_left_out_alone() -> None:
    resolved = resolve_pools(
        _documents(_pool(), _pod("a", "10.0.0.1"), _pod("b", "localhost"), _pod("c", "10.0.0.3", labels=[]))
    )
    assert [each.pod for each in resolved.pools["llm/llama"].endpoints] == ["llm/a"]
    assert [(each.reason, each.where) for each in resolved.problems] == [
        ("pod-unreadable", "Pod llm/b"),
        ("pod-unreadable", "Pod llm/c"),
    ]


def test_a_pool_gone_bad_keeps_its_last_good_document_until_it_is_deleted() -> None:
    resolver = PoolResolver()
    pod = _pod("a", "10.0.0.1")
    good = resolver.resolve(_documents(_pool(), pod)).pools["llm/llama"]
    broken = resolver.resolve(_documents(_pool(targetPorts=[]), pod, _pod("b", "10.0.0.2")))
    assert [each.address for each in broken.pools["llm/llama"].endpoints] == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert [each.reason for each in broken.problems] == ["pool-invalid"]
    assert good.endpoints == broken.pools["llm/llama"].endpoints[:1]
    assert dict(resolver.resolve(_documents(pod)).pools) == {}
    assert dict(resolver.resolve(_documents(_pool(targetPorts=[]), pod)).pools) == {}


def test_a_pod_gone_bad_keeps_its_endpoint_until_it_ends_or_is_deleted() -> None:
    resolver = PoolResolver()
    pool, good, bad = _pool(), _pod("a", "10.0.0.1"), _pod("a", "10.0.0.2", labels={"app": 7})

    def addresses(*pods: Document) -> list[str]:
        resolved = resolver.resolve(_documents(pool, *pods))
        assert [problem.where for problem in resolved.problems] == (["Pod llm/a"] if bad in pods else [])
        return [each.address for each in resolved.pools["llm/llama"].endpoints]

    assert addresses(bad) == []
    assert addresses(good) == addresses(bad) == addresses(bad) == ["10.0.0.1:8000"]
    assert addresses(_pod("a", "10.0.0.1", phase="Failed")) == addresses(bad) == []
    assert addresses(good) == ["10.0.0.1:8000"]
    assert addresses() == addresses(bad) == []


def test_a_pool_that_has_not_changed_is_the_same_object() -> None:
    resolver = PoolResolver()
    pods = tuple(_pod(f"p{number}", f"10.0.0.{number}", labels={"app": f"a{number % 2}"}) for number in range(10))
    pools = tuple(_pool(f"q{number}", selector={"matchLabels": {"app": f"a{number}"}}) for number in range(2))
    before = resolver.resolve({"Pod": pods, "InferencePool": pools}).pools
    moved = (*pods[:-1], _pod("p9", "10.0.0.99", labels={"app": "a1"}))
    after = resolver.resolve({"Pod": moved, "InferencePool": pools}).pools
    assert [after[name] is before[name] for name in ("llm/q0", "llm/q1")] == [True, False]


def test_each_pool_has_a_seed_of_its_own_and_the_static_pool_the_plain_one() -> None:
    assert [pool_seed("kvmesh", pool) for pool in ("", "a/b", "a/c")] == ["kvmesh", "kvmesh/a/b", "kvmesh/a/c"]


@pytest.mark.parametrize("where", ["labels", "annotations"])
def test_a_pod_is_cordoned_by_a_label_or_an_annotation(where: str) -> None:
    pods = [_pod("a", "10.0.0.1"), _pod("b", "10.0.0.2"), _pod("c", "10.0.0.3")]
    for pod, value in zip(pods, ("true", "false", "yes"), strict=True):
        pod["metadata"].setdefault(where, {})["kvmesh.io/cordon"] = value
    endpoints = resolve_pools(_documents(_pool(), *pods)).pools["llm/llama"].endpoints
    assert [endpoint.cordoned for endpoint in endpoints] == [True, False, False]
