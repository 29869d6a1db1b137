"""A picker before pods with --api-key: what it asks shows the key, to the pods alone, and a wrong key is said."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from extproc.models.models import ModelTable, ServedModel
from extproc.pods.metrics_scraper import MetricsScraper
from kvmesh.pods import pod_key
from kvmesh.pods.pod_access import PodAccess
from kvmesh.pods.pod_http import PodPages
from kvmesh.pods.pod_key import PodKey
from podsim.server import RunningPod
from tests.integration.doctor_mesh import picker, picker_settings, two_ports
from tests.integration.keyed_pods import KEY, address_of, keyed_pod, write_key
from tests.integration.kv_redis import RedisServer

DEADLINE_SECONDS = 20.0
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "What is a block pool? " * 8}]}
TINY = ModelTable(served=(ServedModel(name="tiny"),))
WANTS_A_KEY = "the pod wants a key: give --pod-key-file"
TAKES_ANOTHER = "the pod does not take the key of --pod-key-file"


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_key, "LOOK_SECONDS", 0.0)
    defaults = MetricsScraper.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "models_interval_seconds", 0.05)


class Pages:
    """The admin pages of a picker."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url, self._http = url, http

    async def get(self, path: str) -> Any:
        async with self._http.get(self.url + path) as answer:
            return await (answer.json() if answer.content_type == "application/json" else answer.text())

    async def explain(self) -> Any:
        async with self._http.post(f"{self.url}/v1/explain", data=json.dumps(CHAT)) as answer:
            return await answer.json()

    async def models(self) -> Any:
        [endpoint] = (await self.get("/state"))["endpoints"]
        return endpoint["models"]

    async def problem(self) -> str:
        return next(iter((await self.get("/readyz"))["endpoint_problems"].values()), "")

    async def eventually(self, look: Callable[[], Any], holds: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not holds(seen := await look()):
                await asyncio.sleep(0.02)
        return seen


@asynccontextmanager
async def picker_before(pod: RunningPod, redis: RedisServer, *, key_file: Path | None) -> AsyncIterator[Pages]:
    grpc_port, admin_port = two_ports()
    settings = picker_settings(
        redis.url,
        [address_of(pod)],
        model=None,
        tokenizer=None,
        models=TINY,
        grpc_port=grpc_port,
        admin_port=admin_port,
    )
    async with (
        picker(replace(settings, pod_access=PodAccess(key_file=key_file), render_timeout_seconds=10.0)) as url,
        aiohttp.ClientSession() as http,
    ):
        yield Pages(url, http)


async def test_with_the_key_models_are_learned_and_prompts_rendered(
    redis_server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with (
        keyed_pod(KEY) as pod,
        picker_before(pod, redis_server, key_file=write_key(tmp_path / "key", KEY)) as pages,
    ):
        assert await pages.eventually(pages.models, bool) == ["tiny"]
        explained = await pages.explain()
        assert explained["prompt_tokens"] > 16
        ready = await pages.get("/readyz")
        assert (ready["endpoint_problems"], ready["render_problems"], ready["pod_key_problem"]) == ({}, {}, None)
        shown = [await pages.get(path) for path in ("/state", "/readyz", "/metrics", "/v1/decisions")]
        assert f'kvmesh_endpoint_wants_key{{endpoint="{address_of(pod)}"}} 0' in shown[2]
        assert "kvmesh_pod_key_unusable 0" in shown[2]
    assert KEY not in str(shown) + str(explained) + caplog.text


async def test_without_a_key_it_is_said_which_flag_to_give(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with keyed_pod(KEY) as pod, picker_before(pod, redis_server, key_file=None) as pages:
        assert WANTS_A_KEY in await pages.eventually(pages.problem, bool)
        assert await pages.models() is None
        explained = await pages.explain()
        assert explained["prompt_tokens"] > 16  # /tokenize stays open
        assert WANTS_A_KEY in str((await pages.get("/readyz"))["render_problems"])
        assert f'kvmesh_endpoint_wants_key{{endpoint="{address_of(pod)}"}} 1' in await pages.get("/metrics")
    said = [each.getMessage() for each in caplog.records if "does not list its models" in each.getMessage()]
    assert said == [f"endpoint does not list its models: {WANTS_A_KEY}"]


async def test_a_wrong_key_keeps_what_is_known_and_the_right_one_mends_it(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    file = write_key(tmp_path / "key", KEY)
    async with keyed_pod(KEY, "next") as pod, picker_before(pod, redis_server, key_file=file) as pages:
        await pages.eventually(pages.models, bool)

        write_key(file, "wrong")
        await pages.eventually(pages.problem, lambda problem: TAKES_ANOTHER in problem)
        assert await pages.models() == ["tiny"]
        assert (await pages.explain())["prompt_tokens"] > 16
        assert TAKES_ANOTHER in str((await pages.get("/readyz"))["render_problems"])

        write_key(file, "")
        await pages.eventually(lambda: pages.get("/readyz"), lambda ready: "is empty" in str(ready["pod_key_problem"]))
        assert "kvmesh_pod_key_unusable 1" in await pages.get("/metrics")

        write_key(file, "next")
        await pages.eventually(pages.problem, lambda problem: not problem)
        assert (await pages.get("/readyz"))["pod_key_problem"] is None


async def test_a_pod_that_leads_elsewhere_takes_the_key_nowhere(tmp_path: Path) -> None:
    heard: list[tuple[str, str | None]] = []

    def answering(name: str, leads_to: str = "") -> web.Application:
        async def answer(request: web.Request) -> web.Response:
            heard.append((name, request.headers.get("Authorization")))
            return web.Response(status=307, headers={"Location": leads_to}) if leads_to else web.Response()

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        return app

    runners = []

    async def serve(app: web.Application) -> str:
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"127.0.0.1:{runner.addresses[0][1]}"

    pages = PodPages(key=PodKey(write_key(tmp_path / "key", KEY)))
    try:
        other = await serve(answering("other"))
        pod = await serve(answering("pod", f"http://{other}/v1/models"))
        got = await pages.get(pod, "/v1/models", timeout_seconds=5.0, max_body_bytes=1000)
        posted = await pages.post(pod, "/tokenize", b"{}", timeout_seconds=5.0, max_body_bytes=1000)
        assert (got.status, posted.status) == (307, 307)
        assert heard == [("pod", f"Bearer {KEY}")] * 2
    finally:
        pages.close()
        for runner in runners:
            await runner.cleanup()
