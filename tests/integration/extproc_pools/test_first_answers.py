"""A picker that takes traffic has asked the pods for their models: at its start, and in a pool that is new."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.pools import pools as module
from extproc.prompts.prompt_tokens import LEAST_PROMPTS
from operate.local.ports import pick_free_port
from podsim.model_folder import TINY_MODEL
from tests.integration.hermetic_envoy import Routed
from tests.integration.overload_pods import MODEL, HeldPod
from tests.integration.pools_picker import Mesh, pod_document, pool_document, running_mesh

HOST = "127.0.0.1"
DEADLINE_SECONDS = 10.0
PROMPT = "the same words " * 40
SOURCES = "kvmesh_prompt_token_sources_total"


@asynccontextmanager
async def one_pod(**changes: Any) -> AsyncIterator[HeldPod]:
    pod = HeldPod(**changes)
    await pod.start(host="127.0.1.1")
    try:
        yield pod
    finally:
        await pod.stop()


def documents(pod: HeldPod) -> tuple[dict[str, Any], ...]:
    return pool_document("a", port=int(pod.address.rpartition(":")[2])), pod_document(pod.address, pool="a")


async def last_decision(mesh: Mesh) -> dict[str, Any]:
    decision: dict[str, Any] = (await mesh.picker.get("/state?pool=llm/a"))["decisions"][0]
    return decision


async def sources(mesh: Mesh) -> set[str]:
    page = await mesh.picker.get("/metrics")
    return {line.rpartition(" ")[0] for line in page.splitlines() if line.startswith(SOURCES)}


async def the_model_was_known(mesh: Mesh) -> None:
    assert "models-unknown" not in (await last_decision(mesh))["degraded"]
    assert [f'model="{MODEL}"' in line for line in await sources(mesh)] == [True]


async def test_a_picker_is_not_ready_before_a_pod_that_is_slow_to_tell_its_models_has_told_them(tmp_path: Path) -> None:
    admin = pick_free_port(host=HOST, avoid=())
    async with one_pod(told=asyncio.Event()) as pod, AsyncExitStack() as stack, asyncio.timeout(DEADLINE_SECONDS):
        mesh = running_mesh(tmp_path, *documents(pod), admin_port=admin)
        entering = asyncio.create_task(stack.enter_async_context(mesh))
        while pod.scrapes < 2:
            await asyncio.sleep(0.01)
        async with aiohttp.ClientSession() as http, http.get(f"http://{HOST}:{admin}/readyz") as answer:
            assert answer.status == 503
        assert pod.told is not None
        pod.told.set()
        picker = await entering

        await picker.pick(pool="llm/a", prompt=PROMPT)
        await the_model_was_known(picker)


async def test_the_first_request_has_the_tokens_of_the_folder_of_a_model_that_pods_tell(tmp_path: Path) -> None:
    folders = tmp_path / "tokenizers"
    shutil.copytree(TINY_MODEL, folders / MODEL)
    async with one_pod() as pod, running_mesh(tmp_path, *documents(pod), tokenizer_folders=folders) as mesh:
        await mesh.pick(pool="llm/a", prompt=PROMPT)

        assert await sources(mesh) == {f'{SOURCES}{{pool="llm/a",model="{MODEL}",source="folder"}}'}


async def test_a_pod_that_never_tells_its_models_does_not_hold_the_picker_up_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    async with (
        one_pod(told=asyncio.Event()) as pod,
        running_mesh(tmp_path, *documents(pod), scrape_timeout_seconds=0.1) as mesh,
    ):
        for _ in range(LEAST_PROMPTS):
            await mesh.pick(pool="llm/a", prompt=PROMPT)

        assert "models-unknown" in (await last_decision(mesh))["degraded"]
        assert "no model is configured, and no pod has told its models yet (GET /v1/models)" in caplog.text
        assert await sources(mesh) == {f'{SOURCES}{{pool="llm/a",model="(unknown)",source="text"}}'}
        finding = 'kvmesh_extproc_model_finding{pool="llm/a",model="(unknown)",reason="models-unknown"} 1.0'
        await mesh.eventually("/metrics", lambda page: finding in page.splitlines())


async def test_the_first_request_of_a_pool_that_appears_later_waits_for_its_pods_models(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh, asyncio.timeout(DEADLINE_SECONDS):
        mesh.desk.put(pool_document("a", port=mesh.port))
        pod = await mesh.pod("a", told=asyncio.Event())
        await pod.asked_for_models.wait()
        asked = asyncio.create_task(mesh.asked(pool="llm/a", prompt=PROMPT))
        await asyncio.wait((asked,), timeout=0.1)
        assert pod.told is not None
        pod.told.set()

        assert isinstance(await asked, Routed)
        await the_model_was_known(mesh)


async def test_the_first_pod_of_a_pool_of_which_nothing_is_known_is_asked_when_it_becomes_ready(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_mesh(tmp_path) as mesh, asyncio.timeout(DEADLINE_SECONDS):
        address = mesh.address()
        mesh.desk.put(pool_document("a", port=mesh.port), pod_document(address, pool="a", ready=False))
        await mesh.eventually(
            "/state?pool=llm/a", lambda state: [each["state"] for each in state.get("endpoints", ())] == ["not-ready"]
        )
        while "no load from /metrics" not in caplog.text:  # nothing listens there yet
            await asyncio.sleep(0.01)
        await mesh.pod("a", address=address)

        while not isinstance(await mesh.asked(pool="llm/a", prompt=PROMPT), Routed):
            await asyncio.sleep(0)
        await the_model_was_known(mesh)
