"""Documents from an API server that misbehaves in every way that real ones do."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvmesh.documents import kubernetes_watch
from kvmesh.documents.document_kinds import MESH_KINDS, POOL_KINDS
from kvmesh.documents.documents import ClusterAccess, KubernetesConfigError
from kvmesh.documents.pool_resolver import resolve_pools
from kvmesh.documents.sources import kubernetes_source
from tests.integration.kube_documents import POLICY_CRD, POOL_CRD, eventually, following, names, pod, policy, pool
from tests.integration.starting_api import Starting
from tests.kube_api import KubeApi, kube_api


def _source(api: KubeApi, **options: Any) -> Any:
    options.setdefault("kinds", POOL_KINDS)
    return kubernetes_source(ClusterAccess(kubeconfig=api.kubeconfig(options.pop("token", "admin"))), **options)


def _reasons(snapshot: Any) -> set[str]:
    return {problem.reason for problem in snapshot.problems}


async def test_pods_of_a_pool_become_its_endpoints_and_follow_every_change(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        api.loose_crd(**POOL_CRD)
        api.put(pool(ports=(8000, 8001)))
        api.put(pod("a", "10.0.0.1"))
        api.put(pod("other", "10.0.0.9", app="else"))
        async with following(_source(api)) as told:
            await told.until_pods("a", "other")
            api.put(pod("b", "fd00::2", ready=False))
            await told.until_pods("a", "b", "other")
            endpoints = resolve_pools(told.last.documents).pools["llm/llama"].endpoints
            assert [(each.address, each.rank, each.ready) for each in endpoints] == [
                ("10.0.0.1:8000", 0, True),
                ("10.0.0.1:8001", 1, True),
                ("[fd00::2]:8000", 0, False),
                ("[fd00::2]:8001", 1, False),
            ]
            api.remove("Pod", "llm/a")
            await told.until_pods("b", "other")
            assert told.last.synced


async def test_a_pod_is_listed_page_by_page_and_what_did_not_change_stays_the_same_object(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        for number in range(1203):
            api.put(pod(f"p{number:04}", f"10.0.{number // 250}.{number % 250}"))
        async with following(_source(api)) as told:
            first = await told.until(lambda snapshot: len(snapshot.of("Pod")) == 1203)
            assert sum("limit=500" in path and plural == "pods" for _, plural, path, _ in api.requests) == 3
            api.put(pod("p0001", "10.9.9.9"))
            second = await told.until(lambda snapshot: snapshot.of("Pod")[1]["status"]["podIP"] == "10.9.9.9")
            same = [one is other for one, other in zip(first.of("Pod"), second.of("Pod"), strict=True)]
            assert same.count(False) == 1


async def test_a_change_of_what_nobody_reads_tells_nothing(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        api.put(pod("a", "10.0.0.1"))
        async with following(_source(api)) as told:
            await told.until_pods("a")
            before = told.last.of("Pod")
            noisy = pod("a", "10.0.0.1")
            noisy["status"]["conditions"][0]["lastProbeTime"] = "2026-01-01T00:00:00Z"
            noisy["metadata"]["finalizers"] = ["example.com/x"]
            api.put(noisy)
            api.put(pod("b", "10.0.0.2"))
            await told.until_pods("a", "b")
            assert told.last.of("Pod")[0] is before[0]


async def test_the_watch_resumes_where_it_was_cut_without_a_new_list(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        api.put(pod("a", "10.0.0.1"))
        async with following(_source(api)) as told:
            await told.until_pods("a")
            await eventually(lambda: api.watches("pods") == 1)
            lists = sum(verb == "list" and plural == "pods" for verb, plural, _, _ in api.requests)
            await api.drop_connections()
            api.put(pod("b", "10.0.0.2"))
            await told.until_pods("a", "b")
            assert sum(verb == "list" and plural == "pods" for verb, plural, _, _ in api.requests) == lists
            assert not any(snapshot.problems for snapshot in told.snapshots)


async def test_after_410_everything_is_listed_again_and_the_deleted_are_noticed(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        api.put(pod("a", "10.0.0.1"))
        api.put(pod("b", "10.0.0.2"))
        async with following(_source(api)) as told:
            await told.until_pods("a", "b")
            await eventually(lambda: api.watches("pods") == 1)
            await api.go_down()
            api.remove("Pod", "llm/a")
            api.put(pod("c", "10.0.0.3"))
            api.compact()
            await api.come_up()
            await told.until_pods("b", "c")


async def test_while_the_api_is_gone_everything_stays_and_it_is_said(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        api.put(pod("a", "10.0.0.1"))
        async with following(_source(api)) as told:
            before = (await told.until_pods("a")).of("Pod")
            await api.go_down()
            snapshot = await told.until(lambda snapshot: "api-unreachable" in _reasons(snapshot))
            assert snapshot.of("Pod") is before
            await api.come_up()
            api.put(pod("b", "10.0.0.2"))
            await told.until_pods("a", "b")
            await told.until(lambda snapshot: not snapshot.problems)


async def test_an_outage_is_one_line_and_its_end_another_however_many_kinds_and_errors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="kvmesh.documents")
    async with kube_api(tmp_path) as api:
        api.loose_crd(**POLICY_CRD)
        kinds = (*POOL_KINDS, next(each for each in MESH_KINDS if each.kind == "InferencePolicy"))
        async with following(_source(api, kinds=kinds)) as told:
            await told.until(lambda snapshot: not snapshot.problems)
            await api.go_down()
            sufferers = {kind.resource for kind in kinds if kind.kind != "InferencePool"}  # that one is not served

            def all_suffer(snapshot: Any) -> bool:
                return sufferers <= {name for each in snapshot.problems for name in each.where.split(", ")}

            await told.until(all_suffer)
            await api.come_up()
            await told.until(lambda snapshot: not snapshot.problems)
    lines = [record.getMessage() for record in caplog.records if record.levelname in ("INFO", "WARNING")]
    assert [line for line in lines if "does not answer" in line] == lines[:1]
    assert lines[1:] == ["the Kubernetes API: mended (api-unreachable)"]


async def test_a_server_that_hangs_is_noticed_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_watch, "SILENCE_SECONDS", 0.5)
    async with kube_api(tmp_path) as api:
        api.put(pod("a", "10.0.0.1"))
        async with following(_source(api)) as told:
            await told.until_pods("a")
            opened = sum(verb == "watch" and plural == "pods" for verb, plural, _, _ in api.requests)
            await eventually(
                lambda: sum(verb == "watch" and plural == "pods" for verb, plural, _, _ in api.requests) > opened
            )
            api.put(pod("b", "10.0.0.2"))
            await told.until_pods("a", "b")


async def test_bookmarks_are_asked_for_and_move_the_version_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_watch, "WATCH_SECONDS", 2)
    async with kube_api(tmp_path) as api:
        api.state.bookmark_seconds = 0.1
        api.put(pod("a", "10.0.0.1"))
        async with following(_source(api)) as told:
            await told.until_pods("a")
            await eventually(lambda: api.watches("pods") == 1)
            first = _watches(api)[-1]
            api.put(config_map())  # another kind: only a bookmark can tell of its version
            await eventually(lambda: _version(_watches(api)[-1]) > _version(first))
            assert all("allowWatchBookmarks=true" in path for path in _watches(api))


def config_map() -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "llm"}}


def _watches(api: KubeApi) -> list[str]:
    return [path for verb, plural, path, _ in api.requests if verb == "watch" and plural == "pods"]


def _version(path: str) -> int:
    return int(path.partition("resourceVersion=")[2].partition("&")[0])


async def test_a_kind_that_appears_later_is_found_and_one_that_goes_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_watch, "MISSING_SECONDS", 0.1)
    async with kube_api(tmp_path) as api:
        api.put(pod("a", "10.0.0.1"))
        async with following(_source(api, kinds=MESH_KINDS)) as told:
            snapshot = await told.until_pods("a")
            assert {"InferencePool", "InferencePolicy", "InferenceObjective"} <= snapshot.missing_kinds
            assert not snapshot.problems
            api.loose_crd(**POLICY_CRD)
            api.put(policy("p"))
            snapshot = await told.until(lambda snapshot: names(snapshot.of("InferencePolicy")) == ["p"])
            assert "InferencePolicy" not in snapshot.missing_kinds
            api.remove("CustomResourceDefinition", "inferencepolicies.kvmesh.io")
            await told.until(lambda snapshot: not snapshot.of("InferencePolicy"))
            await told.until(lambda snapshot: "InferencePolicy" in snapshot.missing_kinds)


async def test_a_server_that_starts_and_knows_no_kinds_yet_takes_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_watch, "MISSING_SECONDS", 0.1)
    async with kube_api(tmp_path) as api:
        api.loose_crd(**POOL_CRD)
        api.put(pool())
        api.put(pod("a", "10.0.0.1"))
        async with following(_source(api)) as told:
            await told.until(lambda snapshot: bool(snapshot.of("InferencePool")) and bool(snapshot.of("Pod")))
            await eventually(lambda: api.watches("inferencepools") == 1)
            api.faults.fail(503, times=2, plural="inferencepools")
            api.faults.fail(404, times=2, plural="inferencepools")
            await api.drop_connections()
            await told.until(lambda snapshot: "api-failing" in _reasons(snapshot))
            await told.until(lambda snapshot: not snapshot.problems)
            assert all(snapshot.of("InferencePool") for snapshot in told.snapshots)


async def test_a_kind_that_fails_from_its_first_appearance_does_not_hold_the_others_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_watch, "MISSING_SECONDS", 0.1)
    async with kube_api(tmp_path) as api:
        api.put(pod("a", "10.0.0.1"))
        async with following(_source(api)) as told:
            assert "InferencePool" in (await told.until_pods("a")).missing_kinds
            api.faults.fail(500, times=10_000, plural="inferencepools")
            api.loose_crd(**POOL_CRD)
            await told.until(lambda snapshot: "api-failing" in _reasons(snapshot))
            api.put(pod("b", "10.0.0.2"))
            await told.until_pods("a", "b")


async def test_a_kind_that_we_may_not_read_is_loud_and_the_others_go_on(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        api.loose_crd(**POOL_CRD)
        api.put(pool())
        token = api.user("reader", [{"apiGroups": [""], "resources": ["pods", "services"], "verbs": ["list", "watch"]}])
        api.put(pod("a", "10.0.0.1"))
        async with following(_source(api, token=token)) as told:
            snapshot = await told.until_pods("a")
            assert _reasons(snapshot) == {"kind-forbidden"}
            assert snapshot.problems[0].where == "inferencepools.inference.networking.k8s.io"
            assert "list" in snapshot.problems[0].words
            api.put(pod("b", "10.0.0.2"))
            await told.until_pods("a", "b")


async def test_an_api_server_that_only_starts_is_waited_for_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with kube_api(tmp_path) as api:
        api.put(pod("a", "10.0.0.1"))
        api.state.faults = Starting(refusals=6 * len(POOL_KINDS))  # each asks, and then whether it is ready
        async with following(_source(api)) as told:
            await told.until_pods("a")
            assert names(told.snapshots[0].of("Pod")) == ["a"]  # not known to have none before
            await told.until(lambda snapshot: not snapshot.problems)
    assert "refuses all (403) while it starts" in caplog.text
    assert "kind-forbidden" not in {getattr(each, "reason", "") for each in caplog.records}


async def test_a_refusal_counts_after_a_while_where_nobody_says_that_the_server_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_watch, "LAST_PAUSE_SECONDS", 0.01)
    async with kube_api(tmp_path) as api:
        api.state.faults = Starting(refusals=10_000)
        async with following(_source(api)) as told:
            await told.until(lambda snapshot: _reasons(snapshot) == {"kind-forbidden"})


async def test_a_kind_that_we_may_list_but_not_watch_is_loud_and_read_again_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_watch, "MISSING_SECONDS", 0.2)
    async with kube_api(tmp_path) as api:
        rules = [
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
            {"apiGroups": ["", POOL_CRD["group"]], "resources": ["services", "inferencepools"], "verbs": ["*"]},
        ]
        api.put(pod("a", "10.0.0.1"))
        async with following(_source(api, token=api.user("lister", rules))) as told:
            await told.until(lambda snapshot: _reasons(snapshot) == {"kind-forbidden"})
            api.put(pod("b", "10.0.0.2"))
            snapshot = await told.until_pods("a", "b")
            assert _reasons(snapshot) == {"kind-forbidden"}


async def test_a_frozen_server_changes_nothing_and_is_followed_again_when_it_wakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_watch, "SILENCE_SECONDS", 0.5)
    async with kube_api(tmp_path) as api:
        api.put(pod("a", "10.0.0.1"))
        async with following(_source(api)) as told:
            before = (await told.until_pods("a")).of("Pod")
            await eventually(lambda: api.watches("pods") == 1)
            api.freeze()
            api.put(pod("b", "10.0.0.2"))
            opened = len(_watches(api))
            await eventually(lambda: len(_watches(api)) > opened or api.watches("pods") == 0)
            assert told.last.of("Pod") is before
            api.thaw()
            await told.until_pods("a", "b")


async def test_only_the_given_namespaces_are_read_with_rights_in_them_alone(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        api.loose_crd(**POOL_CRD)
        rules = [
            {"apiGroups": ["", POOL_CRD["group"]], "resources": ["pods", "services", "inferencepools"], "verbs": ["*"]}
        ]
        api.put(pod("a", "10.0.0.1", namespace="one"))
        api.put(pod("b", "10.0.0.2", namespace="two"))
        api.put(pod("c", "10.0.0.3", namespace="three"))
        token = api.user("local", rules, namespace="one")
        api.user("local", rules, namespace="two")
        async with following(_source(api, token=token, namespaces=("one", "two"))) as told:
            await told.until_pods("a", "b")
            api.put(pod("d", "10.0.0.4", namespace="two"))
            await told.until_pods("a", "b", "d")
            assert not told.last.problems


async def test_only_services_with_the_label_are_read(tmp_path: Path) -> None:
    def service(name: str, **labels: str) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "namespace": "llm", "labels": labels},
            "spec": {"selector": {"app": "vllm"}, "ports": [{"port": 8000, "targetPort": "http"}]},
        }

    async with kube_api(tmp_path) as api:
        api.put(pod("a", "10.0.0.1"))
        api.put(service("pool", **{"kvmesh.io/pool": "true"}))
        api.put(service("other"))
        async with following(_source(api)) as told:
            snapshot = await told.until(lambda snapshot: bool(snapshot.of("Service")))
            assert names(snapshot.of("Service")) == ["pool"]
            pools = resolve_pools(snapshot.documents).pools
            assert [each.address for each in pools["llm/pool"].endpoints] == ["10.0.0.1:8000"]


async def test_a_rotated_token_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with kube_api(tmp_path, tls=True) as api:
        user = "system:serviceaccount:kvmesh-system:picker"
        api.user(user, [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}])
        folder = api.service_account_folder(user)
        monkeypatch.delenv("KUBECONFIG", raising=False)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        api.put(pod("a", "10.0.0.1"))
        async with following(kubernetes_source(ClusterAccess(service_account=folder), kinds=POOL_KINDS)) as told:
            await told.until_pods("a")
            api.rotate_token(user)
            await api.drop_connections()
            api.put(pod("b", "10.0.0.2"))
            await told.until_pods("a", "b")


async def test_errors_of_the_server_are_waited_out_as_long_as_it_asks(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        api.put(pod("a", "10.0.0.1"))
        api.faults.fail(429, times=1, verb="list", plural="pods", retry_after_seconds=1)
        api.faults.fail(500, times=2, verb="list", plural="services")
        async with following(_source(api)) as told:
            await told.until_pods("a")
            await told.until(lambda snapshot: not snapshot.problems)


async def test_a_wrong_clock_of_the_server_changes_nothing(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        api.put(pod("a", "10.0.0.1"))
        async with following(_source(api)) as told:
            await told.until_pods("a")
            api.clock_offset_seconds = -3600.0
            await api.drop_connections()
            api.put(pod("b", "10.0.0.2"))
            await told.until_pods("a", "b")


async def test_many_changes_are_few_snapshots(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api, following(_source(api)) as told:
        await told.until(lambda snapshot: snapshot.synced)
        await eventually(lambda: api.watches("pods") == 1)
        before = len(told.snapshots)
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        for number in range(100):
            api.put(pod(f"p{number:03}", f"10.0.0.{number}"))
            await asyncio.sleep(0.005)
        await told.until(lambda snapshot: len(snapshot.of("Pod")) == 100)
        assert len(told.snapshots) - before <= (loop.time() - began_at) / 0.25 + 1


async def test_without_any_configuration_it_says_so_at_once(tmp_path: Path) -> None:
    source = kubernetes_source(ClusterAccess(kubeconfig=tmp_path / "none"), kinds=POOL_KINDS)
    with pytest.raises(KubernetesConfigError, match="none"):
        await source.run(lambda _: None)
