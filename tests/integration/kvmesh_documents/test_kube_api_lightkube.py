"""The API server as a public client library sees it: what it writes it reads, watches and applies again."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from lightkube import AsyncClient, KubeConfig
from lightkube.core.exceptions import ApiError
from lightkube.generic_resource import create_namespaced_resource
from lightkube.models.coordination_v1 import LeaseSpec
from lightkube.models.core_v1 import Container, PodSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Pod
from lightkube.types import PatchType, on_error_retry

from tests.kube_api import KubeApi, kube_api
from tests.kube_api.contract_crd import DEFINITION, widget

Widget = create_namespaced_resource("contract.kvmesh.io", "v1", "Widget", "widgets")


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[KubeApi]:
    async with kube_api(tmp_path, tls=True) as running:
        running.install_crd(DEFINITION)
        yield running


@pytest.fixture
async def client(api: KubeApi) -> AsyncIterator[AsyncClient]:
    made = AsyncClient(KubeConfig.from_file(str(api.kubeconfig())), field_manager="tests")
    yield made
    await made.close()


def pod(name: str) -> Pod:
    spec = PodSpec(containers=[Container(name="vllm", image="vllm:1")])
    return Pod(metadata=ObjectMeta(name=name, labels={"app": "vllm"}), spec=spec)


async def test_pods_are_created_listed_by_label_and_deleted(client: AsyncClient) -> None:
    for name in ("a", "b"):
        await client.create(pod(name))
    await client.delete(Pod, "a")
    seen = [one.metadata.name async for one in client.list(Pod, labels={"app": "vllm"}) if one.metadata]
    assert seen == ["b"]


async def test_a_list_longer_than_a_page_comes_whole(client: AsyncClient, api: KubeApi) -> None:
    for index in range(7):
        api.put(widget(f"w{index}"))
    seen = [one.metadata.name async for one in client.list(Widget, chunk_size=3) if one.metadata]
    assert seen == [f"w{index}" for index in range(7)]
    assert sum(plural == "widgets" for _, plural, _, _ in api.requests) == 3


async def test_a_watch_goes_on_after_the_connection_was_cut(client: AsyncClient, api: KubeApi) -> None:
    api.put(widget("a"))
    seen: list[tuple[str, str | None]] = []
    async with asyncio.timeout(20):
        async for kind, one in client.watch(Widget, namespace="default", on_error=on_error_retry):
            seen.append((kind, one.metadata.name if one.metadata else None))
            if len(seen) == 1:
                await api.drop_connections()
                api.put(widget("b"))
            if seen[-1] == ("ADDED", "b"):
                break
    assert set(seen) == {("ADDED", "a"), ("ADDED", "b")}


async def test_appliers_conflict(client: AsyncClient) -> None:
    await client.apply(Widget(**widget("a", size=2)), field_manager="one")
    with pytest.raises(ApiError, match="Apply failed with 1 conflict") as refused:
        await client.apply(Widget(**widget("a", size=3)), field_manager="two")
    assert refused.value.status.code == 409
    forced = await client.apply(Widget(**widget("a", size=3)), field_manager="two", force=True)
    assert forced["spec"]["size"] == 3


async def test_a_status_is_patched_alone(client: AsyncClient, api: KubeApi) -> None:
    api.put(widget("a"))
    await client.patch(Widget.Status, "a", {"status": {"phase": "Done"}}, patch_type=PatchType.MERGE)
    seen = api.get("Widget", "default/a")
    assert seen and seen["status"] == {"phase": "Done"}


async def test_two_candidates_cannot_both_take_a_lease(client: AsyncClient) -> None:
    await client.create(Lease(metadata=ObjectMeta(name="leader"), spec=LeaseSpec()))
    one, two = await client.get(Lease, "leader"), await client.get(Lease, "leader")
    one.spec, two.spec = LeaseSpec(holderIdentity="one"), LeaseSpec(holderIdentity="two")
    await client.replace(one)
    with pytest.raises(ApiError) as refused:
        await client.replace(two)
    assert refused.value.status.code == 409
