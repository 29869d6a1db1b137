"""What tests can do to the API server: forget history, cut, stand still, refuse, show a wrong time."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.kube_api import KubeApi, kube_api
from tests.kube_api.errors import Document
from tests.kube_api.rest import MERGE, Rest, rest

PODS = "/api/v1/namespaces/default/pods"
ACCOUNT = "system:serviceaccount:kvmesh-system:kvmesh"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[KubeApi]:
    async with kube_api(tmp_path) as running:
        yield running


@pytest.fixture
async def client(api: KubeApi) -> AsyncIterator[Rest]:
    async with rest(api.url) as made:
        yield made


def pod(name: str, **spec: object) -> Document:
    containers = [{"name": "vllm", "image": "vllm:1"}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": containers, **spec}}


async def opened(api: KubeApi, count: int = 1) -> None:
    async with asyncio.timeout(5):
        while api.watches("pods") != count:
            await asyncio.sleep(0.005)


async def test_a_watch_from_before_the_compaction_is_gone(api: KubeApi, client: Rest) -> None:
    listed = await client.ask("GET", PODS)
    api.put(pod("a"))
    api.compact()
    async with client.watch(f"{PODS}?resourceVersion={listed.version}") as stream:
        kind, status = await stream.next()
        with pytest.raises(EOFError):
            await stream.next()
    assert (kind, status["code"], status["reason"]) == ("ERROR", 410, "Expired")


async def test_a_page_of_before_the_compaction_is_gone(api: KubeApi, client: Rest) -> None:
    for name in ("a", "b"):
        api.put(pod(name))
    token = (await client.ask("GET", f"{PODS}?limit=1")).document["metadata"]["continue"]
    api.put(pod("c"))
    api.compact()
    gone = await client.ask("GET", f"{PODS}?limit=1&continue={token}")
    assert (gone.code, gone.document["reason"]) == (410, "Expired")


async def test_a_revision_that_the_server_does_not_have_yet_is_a_504_to_retry(client: Rest) -> None:
    early = await client.ask("GET", f"{PODS}?resourceVersion=999999")
    assert (early.code, early.document["details"]["causes"][0]["reason"]) == (504, "ResourceVersionTooLarge")


async def test_bookmarks_come_to_watches_that_allow_them(api: KubeApi, client: Rest) -> None:
    listed = await client.ask("GET", PODS)
    async with client.watch(f"{PODS}?resourceVersion={listed.version}&allowWatchBookmarks=true") as stream:
        await opened(api)
        made = api.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}})
        api.send_bookmarks()
        kind, seen = await stream.next()
    assert (kind, seen["kind"]) == ("BOOKMARK", "Pod")
    assert seen["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


async def test_a_streamed_list_ends_with_a_bookmark(api: KubeApi, client: Rest) -> None:
    api.put(pod("a"))
    query = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"
    async with client.watch(f"{PODS}?{query}") as stream:
        first, (kind, last) = await stream.next(), await stream.next()
    assert (first[0], kind) == ("ADDED", "BOOKMARK")
    assert last["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}


async def test_cut_connections_end_watches_without_a_word(api: KubeApi, client: Rest) -> None:
    async with client.watch(PODS) as stream:
        await opened(api)
        await api.drop_connections()
        with pytest.raises((aiohttp.ClientError, EOFError)):
            await stream.next()
    assert (await client.ask("GET", PODS)).code == 200
    await opened(api, 0)


async def test_a_server_that_is_down_refuses_and_comes_back_with_its_objects(api: KubeApi, client: Rest) -> None:
    made, port = api.put(pod("a")), api.port
    await api.go_down()
    with pytest.raises(aiohttp.ClientConnectorError):
        await client.ask("GET", PODS)
    await api.come_up()
    again = await client.ask("GET", f"{PODS}/a")
    assert (api.port, again.document["metadata"]["uid"]) == (port, made["metadata"]["uid"])


async def test_a_frozen_server_answers_when_it_thaws(api: KubeApi, client: Rest) -> None:
    api.freeze()
    asked = asyncio.create_task(client.ask("GET", PODS))
    done, _ = await asyncio.wait({asked}, timeout=0.1)
    assert not done
    api.thaw()
    assert (await asked).code == 200


async def test_a_frozen_server_sends_no_events(api: KubeApi, client: Rest) -> None:
    async with client.watch(PODS) as stream:
        await opened(api)
        api.freeze()
        api.put(pod("a"))
        event = asyncio.create_task(stream.next())
        done, _ = await asyncio.wait({event}, timeout=0.1)
        assert not done
        api.thaw()
        assert (await event)[1]["metadata"]["name"] == "a"


async def test_a_fault_answers_just_the_calls_that_it_names(api: KubeApi, client: Rest) -> None:
    api.faults.fail(429, times=1, verb="list", plural="pods", retry_after_seconds=1)
    codes = [(await client.ask("GET", path)).code for path in ("/api/v1/namespaces", PODS, PODS)]
    assert codes == [200, 429, 200]


async def test_the_servers_clock_is_what_a_test_says(api: KubeApi, client: Rest) -> None:
    api.clock_offset_seconds = -86_400 * 365
    old, new = api.put(pod("old")), api.put(pod("new"))
    api.clock_offset_seconds = 0
    now = (await client.ask("POST", PODS, pod("now"))).document
    times = [one["metadata"]["creationTimestamp"] for one in (old, new, now)]
    assert times[0] == times[1] < times[2]


async def test_a_definition_that_goes_ends_its_watches_and_takes_its_objects(api: KubeApi, client: Rest) -> None:
    api.loose_crd(group="x.example", version="v1", kind="Thing", plural="things")
    api.put({"apiVersion": "x.example/v1", "kind": "Thing", "metadata": {"name": "a"}, "spec": {"any": 1}})
    things = "/apis/x.example/v1/things"
    async with client.watch(things) as stream:
        assert (await stream.next())[0] == "ADDED"
        api.remove("CustomResourceDefinition", "things.x.example")
        with pytest.raises(EOFError):
            for _ in range(2):
                await stream.next()
    assert (await client.ask("GET", things)).code == 404
    api.loose_crd(group="x.example", version="v1", kind="Thing", plural="things")
    assert (await client.ask("GET", things)).document["items"] == []


async def test_a_users_rules_decide_and_name_what_is_missing(api: KubeApi) -> None:
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    async with rest(api.url, token=api.user("reader", rules, namespace="default")) as reader:
        codes = [(await reader.ask("GET", path)).code for path in (PODS, "/api/v1/pods", "/api/v1/namespaces")]
        refused = await reader.ask("POST", PODS, pod("a"))
    words = 'pods is forbidden: User "reader" cannot create resource "pods" in API group "" in the namespace "default"'
    assert (codes, refused.document["message"]) == ([200, 403, 403], words)


async def test_a_status_right_is_no_right_to_the_object(api: KubeApi) -> None:
    api.put(pod("a"))
    rules = [{"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]}]
    async with rest(api.url, token=api.user("kubelet", rules)) as kubelet:
        state = await kubelet.ask("PATCH", f"{PODS}/a/status", {"status": {"phase": "Running"}}, media=MERGE)
        label = await kubelet.ask("PATCH", f"{PODS}/a", {"metadata": {"labels": {"a": "b"}}}, media=MERGE)
    assert (state.code, label.code) == (200, 403)


async def test_a_service_account_comes_in_over_tls_with_the_token_of_the_day(tmp_path: Path) -> None:
    async with kube_api(tmp_path, tls=True) as api:
        folder = api.service_account_folder(ACCOUNT)
        rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
        api.user(ACCOUNT, rules)
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        old = (folder / "token").read_text()
        api.rotate_token(ACCOUNT)
        new = (folder / "token").read_text()
        async with aiohttp.ClientSession() as session:
            codes = []
            for token in (old, new):
                headers = {"Authorization": f"Bearer {token}"}
                async with session.get(api.url + PODS, ssl=context, headers=headers) as response:
                    codes.append(response.status)
    assert (codes, (folder / "namespace").read_text()) == ([401, 200], "kvmesh-system")


async def test_a_pod_on_a_node_stays_terminating_until_its_kubelet_confirms(api: KubeApi, client: Rest) -> None:
    api.put(pod("placed", nodeName="n1"))
    api.put(pod("pending"))
    begun = await client.ask("DELETE", f"{PODS}/placed")
    await client.ask("DELETE", f"{PODS}/pending")
    assert begun.document["metadata"]["deletionGracePeriodSeconds"] == 30
    assert [one["metadata"]["name"] for one in api.documents("Pod")] == ["placed"]
    await client.ask("DELETE", f"{PODS}/placed?gracePeriodSeconds=0")
    assert api.documents("Pod") == []


async def test_foreground_deletion_waits_for_dependents_that_are_held(api: KubeApi, client: Rest) -> None:
    owner = api.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}})
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    metadata = {"name": "a", "ownerReferences": [{**reference, "blockOwnerDeletion": True}], "finalizers": ["x/hold"]}
    api.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    configs = "/api/v1/namespaces/default/configmaps"
    waiting = await client.ask("DELETE", f"{configs}/owner?propagationPolicy=Foreground")
    assert waiting.document["metadata"]["finalizers"] == ["foregroundDeletion"]
    await client.ask("PATCH", f"{configs}/a", {"metadata": {"finalizers": None}}, media=MERGE)
    assert api.documents("ConfigMap") == []


async def test_a_namespace_goes_when_the_last_of_its_objects_goes(api: KubeApi, client: Rest) -> None:
    api.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "free", "namespace": "n"}})
    held = {"name": "held", "namespace": "n", "finalizers": ["x/hold"]}
    api.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": held})
    going = await client.ask("DELETE", "/api/v1/namespaces/n")
    refused = await client.ask("POST", "/api/v1/namespaces/n/pods", pod("a"))
    assert (going.document["status"]["phase"], refused.code) == ("Terminating", 403)
    path = "/api/v1/namespaces/n/configmaps/held"
    await client.ask("PATCH", path, {"metadata": {"finalizers": None}}, media=MERGE)
    assert (await client.ask("GET", "/api/v1/namespaces/n")).code == 404
