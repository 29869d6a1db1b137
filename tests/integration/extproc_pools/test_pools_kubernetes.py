"""A picker that follows a Kubernetes API: pods and policies in force, status written, and traffic without any API."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.hermetic_envoy import Refused
from tests.integration.pools_picker import DocumentDesk, Mesh, policy_document, pool_document, running_mesh
from tests.kube_api import KubeApi, kube_api

DEADLINE_SECONDS = 15.0
POLICIES = Path(__file__).parents[3] / "manifests" / "crds" / "kvmesh.io_inferencepolicies.yaml"


class ApiDesk(DocumentDesk):
    """Puts documents into an API server."""

    def __init__(self, api: KubeApi) -> None:
        super().__init__()
        self._api = api

    def put(self, *documents: dict[str, Any]) -> None:
        for document in documents:
            self._api.put(document)

    def remove(self, kind: str, name: str) -> None:
        self._api.remove(kind, name)


@asynccontextmanager
async def mesh_in_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Mesh, KubeApi]]:
    async with kube_api(tmp_path) as api:
        api.loose_crd(group="inference.networking.k8s.io", version="v1", kind="InferencePool", plural="inferencepools")
        api.install_crd(POLICIES)
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig()))
        monkeypatch.setenv("POD_NAMESPACE", "default")
        async with running_mesh(tmp_path, desk=ApiDesk(api), kubernetes=True, policies_folder=None) as mesh:
            yield mesh, api


async def test_pods_and_policies_of_a_cluster_are_in_force_and_the_status_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mesh_in_a_cluster(tmp_path, monkeypatch) as (mesh, api):
        mesh.desk.put(pool_document("a", port=mesh.port), policy_document("p", pool="a", hosts=["a.example.com"]))
        pod = await mesh.pod("a")
        await mesh.serves("llm/a", pod.address)
        assert await mesh.pick(host="a.example.com") == pod.address

        async with asyncio.timeout(DEADLINE_SECONDS):
            while (accepted := accepted_of(api)) != "True":
                await asyncio.sleep(0.02)
        assert accepted == "True"


async def test_without_an_api_server_traffic_goes_on_and_what_came_meanwhile_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mesh_in_a_cluster(tmp_path, monkeypatch) as (mesh, api):
        mesh.desk.put(pool_document("a", port=mesh.port))
        pod = await mesh.pod("a")
        await mesh.serves("llm/a", pod.address)

        await api.go_down()
        assert await mesh.pick(pool="llm/a") == pod.address
        assert isinstance(await mesh.asked(pool="llm/b"), Refused)
        await api.come_up()
        other = await mesh.pod("a")

        await mesh.serves("llm/a", pod.address, other.address)


def accepted_of(api: KubeApi) -> str | None:
    """Return the policy's condition Accepted."""
    document = api.get("InferencePolicy", "llm/p") or {}
    entries = (document.get("status") or {}).get("ancestors", ())
    conditions = [condition for entry in entries for condition in entry["conditions"]]
    return next((each["status"] for each in conditions if each["type"] == "Accepted"), None)
