"""`kvmesh policy explain` against a picker's admin page."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from typer.testing import CliRunner

from extproc.errors import ConfigError, KvmeshError
from extproc.pages.admin_http import AdminServer
from extproc.pages.admin_pages import PickerPages
from extproc.reach.mesh_policy import PolicyTargetError
from extproc.reach.view import ask_picker
from operate.local.ports import pick_free_port
from operate.policy.commands import app
from tests.kube_api import kube_api
from tests.unit.extproc_reach.mesh_documents import Mesh, inference_policy, inference_pool

HOST = "127.0.0.1"
CRD = Path(__file__).parents[3] / "manifests" / "crds" / "kvmesh.io_inferencepolicies.yaml"


class Pages:
    """The one page that counts here."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    async def policies(self, target: str | None) -> dict[str, Any]:
        return self._mesh.policy.explain(target)


@asynccontextmanager
async def picker(mesh: Mesh) -> AsyncIterator[str]:
    server = AdminServer(cast("PickerPages", Pages(mesh)), max_body_bytes=1024)
    port = pick_free_port(host=HOST, avoid=())
    await server.start(host=HOST, port=port)
    try:
        yield f"http://{HOST}:{port}"
    finally:
        await server.stop()


@asynccontextmanager
async def page(answer: web.Response) -> AsyncIterator[str]:
    site = web.Application()

    async def handle(_: web.Request) -> web.Response:
        return answer

    site.add_routes([web.get("/policies", handle)])
    runner = web.AppRunner(site)
    await runner.setup()
    port = pick_free_port(host=HOST, avoid=())
    await web.TCPSite(runner, HOST, port).start()
    try:
        yield f"http://{HOST}:{port}"
    finally:
        await runner.cleanup()


async def test_a_running_picker_says_what_holds_there() -> None:
    mesh = Mesh()
    mesh.update(inference_pool("a/llama"), inference_policy("a/own", {"scoring": {"fallbacks": 5}}))
    async with picker(mesh) as url:
        assert await ask_picker(url, "a/llama", timeout_seconds=5) == mesh.policy.explain("a/llama")
        assert await ask_picker(f"{url}/", None, timeout_seconds=5) == mesh.policy.explain(None)
        with pytest.raises(PolicyTargetError, match="there is no pool 'a/lama'; the nearest is 'a/llama'"):
            await ask_picker(url, "a/lama", timeout_seconds=5)


async def test_whatever_else_answers_is_named_and_not_believed() -> None:
    async with page(web.Response(text="<html>")) as url:
        with pytest.raises(KvmeshError, match="is not a picker's admin page: its answer is no JSON"):
            await ask_picker(url, None, timeout_seconds=5)
    answers: tuple[Any, ...] = ({}, [], {"pools": []})
    for answer in answers:
        async with page(web.json_response(answer)) as url:
            with pytest.raises(KvmeshError, match="answered 200 without policies"):
                await ask_picker(url, None, timeout_seconds=5)


async def test_a_picker_that_is_away_or_slow_is_named() -> None:
    url = f"http://{HOST}:{pick_free_port(host=HOST, avoid=())}"
    with pytest.raises(KvmeshError, match=f"the picker's admin page at {url} does not answer"):
        await ask_picker(url, None, timeout_seconds=5)
    with pytest.raises(ConfigError, match="is not a URL like"):
        await ask_picker("http://[", None, timeout_seconds=5)
    ended = asyncio.Event()

    async def never(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.close()

    silent = await asyncio.start_server(never, HOST, 0)
    try:
        port = silent.sockets[0].getsockname()[1]
        with pytest.raises(KvmeshError, match="does not answer"):
            await ask_picker(f"http://{HOST}:{port}", None, timeout_seconds=0.05)
    finally:
        ended.set()
        silent.close()


async def test_a_cluster_is_explained_without_any_picker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with kube_api(tmp_path) as api:
        api.install_crd(CRD)
        api.loose_crd(group="inference.networking.k8s.io", version="v1", kind="InferencePool", plural="inferencepools")
        api.put(dict(inference_pool("a/llama")))
        api.put(inference_policy("a/own", {"scoring": {"fallbacks": 5}}))
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig()))
        arguments = ["policy", "explain", "a/llama", "--kubernetes"]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert (result.exit_code, "scoring.fallbacks  5" in result.output) == (0, True), result.output
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert (result.exit_code, str(tmp_path / "none") in result.output) == (2, True), result.output


async def test_a_picker_that_is_named_is_asked_although_the_settings_file_has_its_folder(tmp_path: Path) -> None:
    elsewhere = {
        "policy": {"explain": {"policies": str(tmp_path)}}
    }  # an empty folder, as the picker's own file names it
    mesh = Mesh()
    mesh.update(inference_pool("a/llama"), inference_policy("a/chat", {}))
    async with picker(mesh) as url:
        asked = ["policy", "explain", "a/llama", "--picker", url, "-o", "json"]
        result = await asyncio.to_thread(CliRunner().invoke, app, asked, default_map=elsewhere)
        assert "a/chat" in result.output
        both = await asyncio.to_thread(CliRunner().invoke, app, [*asked, "--policies", str(tmp_path)])
        assert "a/chat" not in both.output
