"""Uploads go to a pod of the model that their form names; rules, classes, quotas and limits hold for them."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from tests.e2e.echo_pod import echo_pod
from tests.e2e.overload_stack import TENANT
from tests.e2e.stack import Answer, Stack, eventually, free_ports, running_stack
from tests.integration.kv_redis import RedisServer

MODELS = ("whisper", "voxtral")
AUDIO = os.urandom(600_000)  # is read in a thread
PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits")
POLICY = """
policy:
  models:
    served: [{name: whisper}, {name: voxtral}]
    rules: [{model: listen, targets: [{model: voxtral}]}]
  priorities:
    classes: [{name: heard, priority: 5}, {name: standard}]
    rules: [{models: [voxtral], priorityClass: heard}]
  quotas: [{tenant: acme, model: whisper, requestsPerMinute: 2, burstSeconds: 60}]
"""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["duplex", "buffered"])
async def mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """The gateway before one pod of each model; each answers with what it has got, or 404 for the other's model."""
    redis = RedisServer(tmp_path_factory.mktemp("redis"))
    redis.start()
    try:
        async with AsyncExitStack() as exits:
            pods = [f"127.0.0.1:{port}" for port in free_ports(len(MODELS))]
            for pod, model in zip(pods, MODELS, strict=True):
                host, _, port = pod.partition(":")
                await exits.enter_async_context(echo_pod(host, int(port), _answer(model), model=model))
            folder = tmp_path_factory.mktemp("stack")
            flags = ("--redis", redis.url, "--body-mode", request.param)
            settings = f"scrape_interval_ms: 50\nindex_timeout_ms: 1000\n{POLICY}"
            stack = await exits.enter_async_context(running_stack(folder, *flags, settings=settings, endpoints=pods))
            await eventually(stack.state, lambda state: all(pod["models"] for pod in state["endpoints"]))
            yield stack
    finally:
        redis.kill()


def _answer(model: str) -> Any:
    async def answer(request: web.Request) -> web.Response:
        form = await request.post()
        file = form.get("file")
        if form.get("model") != model or not isinstance(file, web.FileField):
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        return web.json_response({"model": model, "bytes": len(file.file.read()), "language": form.get("language")})

    return answer


async def upload(
    stack: Stack, model: str | None, *, path: str = PATHS[0], audio: bytes = AUDIO, last: bool = True, tenant: str = ""
) -> Answer:
    """Send a form as OpenAI's client does, with the model before or after the file."""
    form = aiohttp.FormData(default_to_multipart=True)
    for name in ("file", "model") if last else ("model", "file"):
        if name == "file":
            form.add_field("file", audio, filename="model.wav", content_type="audio/wav")
        elif model is not None:
            form.add_field("model", model)
    form.add_field("language", "fr")
    return await stack.send("POST", path, data=form, headers={TENANT: tenant} if tenant else None)


async def test_twelve_of_twelve_uploads_reach_a_pod_with_their_model(mesh: Stack) -> None:
    for number in range(12):
        model, path = MODELS[number % 2], PATHS[number % len(PATHS)]
        answer = await upload(mesh, model, path=path, last=number % 4 < 2, audio=AUDIO[: 100_000 * (number % 6 + 1)])
        assert answer.status == 200, answer.body
        assert (answer.json["model"], answer.json["language"]) == (model, "fr")


async def test_a_rule_changes_the_model_in_the_form(mesh: Stack) -> None:
    for last in (False, True):
        answer = await upload(mesh, "listen", last=last)
        assert answer.status == 200, answer.body
        assert answer.json["bytes"] == len(AUDIO)


async def test_a_class_and_a_quota_count_the_model_of_the_form(mesh: Stack) -> None:
    statuses = [(await upload(mesh, "whisper", tenant="acme")).status for _ in range(4)]
    assert statuses == [200, 200, 429, 429]
    other = await upload(mesh, "voxtral", tenant="acme")
    assert other.status == 200
    decision = other.headers["x-kvmesh-decision-id"]
    async with mesh.http.get(f"{mesh.ready['admin']}/v1/decisions", params={"decision_id": decision}) as answer:
        (found,) = await answer.json()
    assert (found["class"], found["model"]) == ("heard", "voxtral"), found


async def test_a_model_that_no_pod_has_is_refused(mesh: Stack) -> None:
    answer = await upload(mesh, "gone")
    assert answer.status in (404, 503)


async def test_an_upload_that_parsers_may_read_differently_is_refused_because_rules_depend_on_its_model(
    mesh: Stack,
) -> None:
    body = b'--cut \r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--cut--\r\n'
    headers = {"content-type": "multipart/form-data; boundary=cut"}
    answer = await mesh.send("POST", PATHS[0], data=body, headers=headers)
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")


async def test_an_upload_may_have_thirty_two_mebibytes_and_more_gets_a_413_of_the_api(mesh: Stack) -> None:
    audio = bytes(31 << 20)
    answer = await upload(mesh, "whisper", audio=audio)
    assert (answer.status, answer.json["bytes"]) == (200, len(audio))
    too_large = await upload(mesh, "whisper", audio=bytes(33 << 20))
    assert too_large.status == 413
    assert too_large.json["error"]["code"] == "body_too_large"
    assert "33554432 bytes" in too_large.json["error"]["message"]
    prompt = {"model": "whisper", "prompt": "x" * (17 << 20)}
    assert (await mesh.send("POST", "/v1/completions", json=prompt)).json["error"]["code"] == "body_too_large"
