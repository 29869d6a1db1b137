"""The API server as the real kubectl sees it; skipped where there is none."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from tests.kube_api import KubeApi, kube_api
from tests.kube_api.contract_crd import DEFINITION, widget
from tests.kube_api.errors import Document

KUBECTL = shutil.which("kubectl")
KUBECTL_SECONDS = 30.0
DEPLOYMENT: Document = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "web"},
    "spec": {
        "replicas": 2,
        "selector": {"matchLabels": {"app": "web"}},
        "template": {
            "metadata": {"labels": {"app": "web"}},
            "spec": {"containers": [{"name": "main", "image": "web:1"}, {"name": "beside", "image": "beside:1"}]},
        },
    },
}

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="no kubectl on this machine")


class Kubectl:
    """Runs kubectl against one server, with a cache of its own."""

    def __init__(self, api: KubeApi, home: Path) -> None:
        self._environment = {**os.environ, "HOME": str(home), "KUBECONFIG": str(api.kubeconfig())}

    async def run(self, *arguments: str, stdin: Document | None = None) -> tuple[int, str]:
        """The exit code, and what it printed on both streams."""
        process = await asyncio.create_subprocess_exec(
            str(KUBECTL),
            *arguments,
            env=self._environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(KUBECTL_SECONDS):
                printed, _ = await process.communicate(yaml.safe_dump(stdin).encode() if stdin else None)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return process.returncode or 0, printed.decode().strip()


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[KubeApi]:
    async with kube_api(tmp_path) as running:
        running.install_crd(DEFINITION)
        yield running


@pytest.fixture
def kubectl(api: KubeApi, tmp_path: Path) -> Kubectl:
    return Kubectl(api, tmp_path)


async def test_apply_creates_leaves_and_changes(api: KubeApi, kubectl: Kubectl) -> None:
    parts = [{"name": "x", "weight": 0.5}]  # in lists, kubectl itself cannot tell a default from a change
    said = [await kubectl.run("apply", "-f", "-", stdin=widget("a", size=size, parts=parts)) for size in (1, 1, 2)]
    named = "widget.contract.kvmesh.io/a"
    assert said == [(0, f"{named} created"), (0, f"{named} unchanged"), (0, f"{named} configured")]
    seen = api.get("Widget", "default/a")
    assert seen and (seen["spec"]["size"], seen["metadata"]["generation"]) == (2, 2)


async def test_apply_finds_unknown_fields_and_shows_every_wrong_one(kubectl: Kubectl) -> None:
    code, unknown = await kubectl.run("apply", "-f", "-", stdin=widget("a", colour="red"))
    assert (code, 'strict decoding error: unknown field "spec.colour"' in unknown) == (1, True), unknown
    code, wrong = await kubectl.run("apply", "-f", "-", stdin=widget("a", size=0, mode="Odd"))
    assert {*wrong.splitlines()[:3]} == {
        'The Widget "a" is invalid: ',
        "* spec.size: Invalid value: 0: spec.size in body should be greater than or equal to 1",
        '* spec.mode: Unsupported value: "Odd": supported values: "Fast", "Slow"',
    }


async def test_get_prints_the_definitions_columns_by_its_short_name(api: KubeApi, kubectl: Kubectl) -> None:
    api.put(widget("a", size=7))
    _, printed = await kubectl.run("get", "wdg")
    assert [line.split() for line in printed.splitlines()] == [["NAME", "SIZE", "FIRST", "PART"], ["a", "7", "x"]]


async def test_a_server_side_apply_conflict_names_the_field_and_gives_way_to_force(kubectl: Kubectl) -> None:
    await kubectl.run("apply", "--server-side", "-f", "-", stdin=DEPLOYMENT)
    _, patched = await kubectl.run("patch", "deployment", "web", "-p", '{"spec": {"replicas": 5}}')
    assert patched == "deployment.apps/web patched"
    code, refused = await kubectl.run("apply", "--server-side", "-f", "-", stdin=DEPLOYMENT)
    assert code == 1
    assert 'Apply failed with 1 conflict: conflict with "kubectl-patch" using apps/v1' in refused
    assert ".spec.replicas" in refused
    forced = await kubectl.run("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=DEPLOYMENT)
    assert forced == (0, "deployment.apps/web serverside-applied")


async def test_a_patch_changes_one_container_of_a_deployment(api: KubeApi, kubectl: Kubectl) -> None:
    await kubectl.run("apply", "-f", "-", stdin=DEPLOYMENT)
    container = '{"spec": {"template": {"spec": {"containers": [{"name": "beside", "image": "beside:2"}]}}}}'
    await kubectl.run("patch", "deployment", "web", "-p", container)
    seen = api.get("Deployment", "default/web")
    images = [one["image"] for one in seen["spec"]["template"]["spec"]["containers"]] if seen else []
    assert images == ["web:1", "beside:2"]


async def test_a_status_is_patched_by_itself(api: KubeApi, kubectl: Kubectl) -> None:
    api.put(widget("a"))
    done = ("patch", "widget", "a", "--subresource=status", "--type=merge", "-p", '{"status": {"phase": "Done"}}')
    assert await kubectl.run(*done) == (0, "widget.contract.kvmesh.io/a patched")
    seen = api.get("Widget", "default/a")
    assert seen and (seen["status"], seen["metadata"]["generation"]) == ({"phase": "Done"}, 1)


async def test_wait_and_explain_know_definitions(kubectl: Kubectl) -> None:
    waited = await kubectl.run("wait", "--for=condition=Established", "crd/widgets.contract.kvmesh.io", "--timeout=9s")
    assert waited == (0, "customresourcedefinition.apiextensions.k8s.io/widgets.contract.kvmesh.io condition met")
    code, explained = await kubectl.run("explain", "widget.spec.mode")
    assert (code, "FIELD: mode <string>" in explained) == (0, True), explained


async def test_delete_waits_until_the_object_is_gone(api: KubeApi, kubectl: Kubectl) -> None:
    api.put(widget("a"))
    deleted = await kubectl.run("delete", "widget", "a", "--timeout=9s")
    assert deleted == (0, 'widget.contract.kvmesh.io "a" deleted')
    assert api.documents("Widget") == []


async def test_a_namespace_goes_with_all_that_is_in_it(api: KubeApi, kubectl: Kubectl) -> None:
    assert await kubectl.run("create", "namespace", "n") == (0, "namespace/n created")
    api.put({**widget("a"), "metadata": {"name": "a", "namespace": "n"}})
    assert await kubectl.run("delete", "namespace", "n", "--timeout=9s") == (0, 'namespace "n" deleted')
    assert api.documents("Widget") == []


async def test_get_shows_changes_as_they_come(api: KubeApi, kubectl: Kubectl) -> None:
    api.put(widget("a", size=7))
    printing = asyncio.create_task(kubectl.run("get", "widgets", "--watch", "--request-timeout=3s"))
    async with asyncio.timeout(KUBECTL_SECONDS):
        while not api.watches("widgets"):
            await asyncio.sleep(0.01)
    api.put(widget("a", size=8))
    _, printed = await printing
    rows = [line.split() for line in printed.splitlines()]
    assert rows[:3] == [["NAME", "SIZE", "FIRST", "PART"], ["a", "7", "x"], ["a", "8", "x"]]


async def test_create_and_auth_speak_protobuf(api: KubeApi, kubectl: Kubectl) -> None:
    created = await kubectl.run("create", "configmap", "a", "--from-literal=x=1", "--from-literal=y=")
    seen = api.get("ConfigMap", "default/a")
    assert (created, seen and seen["data"]) == ((0, "configmap/a created"), {"x": "1", "y": ""})
    assert await kubectl.run("auth", "can-i", "list", "pods") == (0, "yes")
    assert await kubectl.run("auth", "can-i", "list", "pods", "--as=nobody") == (1, "no")
