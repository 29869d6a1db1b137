"""`kvmesh install` and `kvmesh uninstall` as they are called, against an API server that speaks the real protocol."""

import asyncio
from base64 import b64decode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightkube import Client
from lightkube.resources.core_v1 import Service
from typer.testing import CliRunner, Result

from operate.install import lightkube_cluster
from operate.install.commands import app
from operate.install.objects import PART_OF
from operate.install.parse_targets import parse_release
from operate.install.render import render
from operate.install.shipped_files import read_crds
from tests.integration.starting_api import Starting
from tests.kube_api import KubeApi, kube_api
from tools.kustomize_tree import SAMPLE

CRDS = Path(__file__).parents[2] / "data" / "crds" / "istio.yaml"
FLAGS = (
    "--pool=llm/vllm-llama",
    "--pool-selector=llm/vllm-llama=app=vllm-llama",
    "--gateway=istio-ingress/inference-gateway",
    "--hostname=llm.example.com",
    "--no-preflight",  # of the mesh there is nothing here but definitions
    "--image=kvmesh:0.1.0",
)


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeApi]:
    async with kube_api(tmp_path) as server:
        for name in ("llm", "istio-ingress"):
            server.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        for crd in yaml.safe_load_all(CRDS.read_text(encoding="utf-8")):
            server.install_crd(crd)
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig()))
        yield server


async def call(*arguments: str) -> Result:
    """Run a command in a thread: the server needs the loop."""
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments))


def edit_service(change: dict[str, Any]) -> None:
    """Change the picker's Service as `kubectl edit` would."""
    Client().patch(Service, "kvmesh-picker", change, namespace="kvmesh-system", field_manager="kubectl-edit")


def keys(documents: list[Any]) -> set[tuple[str, str, str]]:
    return {(each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]) for each in documents}


def ours(api: KubeApi) -> set[tuple[str, str, str]]:
    """Everything in the server that carries our label, CRDs included."""
    kinds = {each["kind"] for each in render(SAMPLE, crds=read_crds())}
    found = [
        {**each, "kind": kind}
        for kind in kinds
        if kind != "InferencePolicy"
        for each in api.documents(kind)
        if each["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by") == "kvmesh-install"
    ]
    return keys(found)


async def test_a_dry_run_prints_what_is_rendered_and_needs_no_cluster() -> None:
    done = await call("install", *FLAGS, "--istio-version=1.28", "--dry-run")
    assert done.exit_code == 0, done.output
    assert list(yaml.safe_load_all(done.stdout)) == render(SAMPLE, crds=read_crds())
    assert "kvmesh-admin-token" in done.stderr
    assert "kvmesh-redis-users" in done.stderr


async def test_native_pools_need_no_release_to_be_named() -> None:
    flags = ("--mode=inferencepool", "--namespace=llm", "--pool=llm/chat", "--gateway=istio-ingress/g", "--image=x")
    done = await call("install", *flags, "--dry-run")
    assert done.exit_code == 0, done.output
    services = [each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "Service"]
    assert "kvmesh-picker-chat" in {each["metadata"]["name"] for each in services}


async def test_images_are_pinned_by_digest_where_that_is_said() -> None:
    images = {
        name: f"registry.example/{name}@sha256:{digit * 64}" for name, digit in (("kvmesh", "a"), ("valkey", "b"))
    }
    flags = (*FLAGS[:-1], f"--image={images['kvmesh']}", f"--redis-image={images['valkey']}", "--dry-run")
    done = await call("install", *flags)
    assert done.exit_code == 0, done.output
    pods = [
        each["spec"]["template"]["spec"]
        for each in yaml.safe_load_all(done.stdout)
        if "template" in each.get("spec", {})
    ]
    found = [container["image"] for pod in pods for container in pod["containers"]]
    assert sorted(found) == [images["kvmesh"], images["kvmesh"], images["valkey"]]


async def test_installing_puts_everything_into_the_cluster_and_uninstalling_leaves_nothing(api: KubeApi) -> None:
    before = keys([{**each, "kind": "Namespace"} for each in api.documents("Namespace")])
    done = await call("install", *FLAGS, "--wait-seconds=0")
    assert done.exit_code == 0, done.output
    assert ours(api) == keys(render(SAMPLE, crds=read_crds()))
    gone = await call("uninstall", "--yes", "--settle-seconds=0")
    assert gone.exit_code == 0, gone.output
    assert ours(api) == set()
    assert keys([{**each, "kind": "Namespace"} for each in api.documents("Namespace")]) == before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "tokens: the pods are asked for each prompt (/render with --enable-scale-out, else /tokenize)"),
        (("--tokenizers-claim=folders",), "tokens: of models with a folder in claim folders, from there; of others"),
    ],
)
async def test_it_is_said_where_tokens_will_come_from(api: KubeApi, flags: tuple[str, ...], words: str) -> None:
    done = await call("install", *FLAGS, *flags, "--wait-seconds=0")
    assert done.exit_code == 0, done.output
    assert words in done.output


async def test_secrets_are_made_once_never_shown_and_go_with_the_installation(api: KubeApi) -> None:
    first = await call("install", *FLAGS, "--wait-seconds=0")
    secrets = {each["metadata"]["name"]: each for each in api.documents("Secret")}
    assert secrets["kvmesh-redis-users"]["data"].keys() >= {"picker", "indexer", "dashboards", "picker.sha256"}
    words = [
        secrets[name]["data"][key] for name, key in (("kvmesh-admin-token", "token"), ("kvmesh-redis-users", "picker"))
    ]
    assert all(len(b64decode(word)) >= 40 for word in words)
    again = await call("install", *FLAGS, "--wait-seconds=0", "--istio-version=1.30", "--force-conflicts")
    assert (again.exit_code, api.documents("Secret")) == (0, list(secrets.values()))
    mounts = {
        volume["secret"]["secretName"]
        for deployment in api.documents("Deployment")
        for volume in deployment["spec"]["template"]["spec"]["volumes"]
        if "secret" in volume
    }
    assert mounts == secrets.keys()
    gone = await call("uninstall", "--yes", "--settle-seconds=0")
    assert (gone.exit_code, api.documents("Secret")) == (0, [])
    printed = "".join(each.output + each.stderr for each in (first, again, gone))
    assert all(f"Secret kvmesh-system/{name}" in printed for name in secrets)
    assert not [word for word in words if word in printed or b64decode(word).decode() in printed]


async def test_a_secret_of_ones_own_is_mounted_and_none_is_made(api: KubeApi) -> None:
    flags = ("--admin-token-secret=ours", "--redis-password-secret=users")
    done = await call("install", *FLAGS, "--wait-seconds=0", *flags)
    assert (done.exit_code, api.documents("Secret")) == (0, [])
    for deployment in api.documents("Deployment"):
        volumes = [each for each in deployment["spec"]["template"]["spec"]["volumes"] if "secret" in each]
        user = deployment["metadata"]["name"].removeprefix("kvmesh-")
        assert [each["secret"] for each in volumes] == [
            {"secretName": "ours", "defaultMode": 0o440, "optional": True},
            {"secretName": "users", "items": [{"key": user, "path": "password"}], "defaultMode": 0o440},
        ]


async def test_installing_again_changes_nothing_and_another_release_changes_what_differs(api: KubeApi) -> None:
    await call("install", *FLAGS, "--wait-seconds=0", "--istio-version=1.28")
    first = {each["metadata"]["name"]: each for each in api.documents("Deployment")}
    again = await call("install", *FLAGS, "--wait-seconds=0", "--istio-version=1.28")
    assert again.exit_code == 0, again.output
    second = {each["metadata"]["name"]: each for each in api.documents("Deployment")}
    assert {name: each["metadata"]["generation"] for name, each in second.items()} == {
        name: each["metadata"]["generation"] for name, each in first.items()
    }
    upgraded = await call("install", *FLAGS, "--wait-seconds=0", "--istio-version=1.30")
    assert upgraded.exit_code == 0, upgraded.output
    [stored] = api.documents("EnvoyFilter")
    [expected] = [each for each in render(SAMPLE_1_30) if each["kind"] == "EnvoyFilter"]
    assert stored["spec"] == expected["spec"]


async def test_what_somebody_else_has_changed_is_not_overwritten_unawares(api: KubeApi) -> None:
    await call("install", *FLAGS, "--wait-seconds=0")
    change = {"spec": {"sessionAffinity": "ClientIP", "type": "NodePort"}, "metadata": {"labels": {PART_OF: "theirs"}}}
    await asyncio.to_thread(edit_service, change)
    refused = await call("install", *FLAGS, "--wait-seconds=0")
    assert refused.exit_code == 1
    assert str(refused.exception).endswith("--force-conflicts takes them over. Nothing was changed")
    taken = await call("install", *FLAGS, "--wait-seconds=0", "--force-conflicts")
    assert taken.exit_code == 0, taken.output


async def test_without_rights_the_answer_says_so(api: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    token = api.user("nobody", [])
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(token)))
    done = await call("install", *FLAGS, "--wait-seconds=0")
    assert done.exit_code == 1
    assert "needs the rights of a cluster's administrator" in str(done.exception)
    assert ours(api) == set()


async def test_an_api_server_that_only_starts_is_waited_for(api: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightkube_cluster, "POLL_SECONDS", 0.01)
    api.state.faults = Starting(refusals=9)
    done = await call("install", *FLAGS, "--istio-version=1.28", "--wait-seconds=0")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("waiting for the API server, which is not ready for this yet") == 1


async def test_an_api_server_that_never_gets_ready_is_named_beside_the_rights(
    api: KubeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightkube_cluster, "STARTING_SECONDS", 1e-9)
    monkeypatch.setattr(lightkube_cluster, "POLL_SECONDS", 1e-3)
    api.state.faults = Starting(refusals=1000)
    done = await call("uninstall", "--yes")
    assert done.exit_code == 1
    assert "rights of a cluster's administrator" in str(done.exception)
    assert "wait until the API server is ready" in str(done.exception)


async def test_a_namespace_that_is_not_there_is_found_before_anything_is_changed(api: KubeApi) -> None:
    refused = await call("install", *FLAGS, "--gateway=nowhere/gateway", "--wait-seconds=0")
    assert refused.exit_code == 1
    assert 'namespaces "nowhere" not found. Nothing was changed' in str(refused.exception)
    assert ours(api) == set()


async def test_a_cluster_without_istio_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with kube_api(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig()))
        done = await call("install", *FLAGS, "--wait-seconds=0")
        assert "the cluster has no AuthorizationPolicy, DestinationRule, EnvoyFilter" in str(done.exception)
        assert server.documents("Deployment") == []


async def test_uninstalling_asks_first_where_nobody_can_answer(api: KubeApi) -> None:
    await call("install", *FLAGS, "--wait-seconds=0")
    refused = await call("uninstall")
    assert "say --yes to remove the installation of namespace kvmesh-system" in str(refused.exception)
    assert ours(api)


SAMPLE_1_30 = SAMPLE.__class__(
    istio=parse_release("1.30"), pools=SAMPLE.pools, gateways=SAMPLE.gateways, routes=SAMPLE.routes
)
