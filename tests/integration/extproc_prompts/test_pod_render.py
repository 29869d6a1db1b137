"""Tokens from a pod's render endpoint: real HTTP against simulated pods, and against pods that misbehave."""

import asyncio
import json
import logging
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from extproc.models.models import ServedModel, TokensFrom
from extproc.prompts.pod_render import (
    PodRender,
    RenderRefusedError,
    RenderSettings,
    RenderTimeoutError,
    RenderUnavailableError,
)
from extproc.prompts.tokenized_prompt import Feature, TokenizedPrompt
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.openai import parse_request
from extproc.requests.request import ApiKind, InferenceRequest
from kvmesh.pods.pod_key import PodKey
from podsim.core.scheduler import EngineSettings
from podsim.model_folder import TINY_MODEL, load_model_folder
from podsim.pod import PodSettings
from podsim.publisher import PublisherSettings
from podsim.server import running_pods
from tests.integration.keyed_pods import KEY, write_key

TINY = ServedModel(name="tiny", tokens_from=TokensFrom.RENDER)
UNDECLARED = ServedModel(name="tiny")
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "What is a block pool?"}]}
RENDERED = {"token_ids": [1, 2, 3]}
ONE_TWO_THREE = (TokenizedPrompt(tokens=array("I", [1, 2, 3]).tobytes()),)
WITH_IMAGE = InferenceRequest(api=ApiKind.CHAT_COMPLETIONS, path="/v1/chat/completions", has_media=True)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakePod:
    """Answers every POST as `handler` says and keeps what it was sent."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.address = ""
        self.asked: list[tuple[str, Any]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, json.loads(await request.read())))
        return await self.handler(request)


@asynccontextmanager
async def serving(*handlers: Handler) -> AsyncIterator[list[FakePod]]:
    pods, runners = [FakePod(handler) for handler in handlers], []
    for pod in pods:
        app = web.Application()
        app.router.add_post("/{path:.*}", pod.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pod.address = f"127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield pods
    finally:
        for runner in runners:
            await runner.cleanup()


@asynccontextmanager
async def simulated_pod(*, renders: bool = True) -> AsyncIterator[str]:
    settings = PodSettings(max_model_len=2048, engine=EngineSettings(total_blocks=200), scale_out=renders)
    folder, publisher = load_model_folder(TINY_MODEL), PublisherSettings(host="127.0.0.1")
    async with running_pods(settings, folder=folder, publisher=publisher) as [pod]:
        yield f"{pod.host}:{pod.port}"


def answers(answer: Any, *, status: int = 200) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response(answer, status=status)

    return handle


async def never(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError


@asynccontextmanager
async def rendering(
    addresses: Sequence[str],
    *,
    clock: Clock | None = None,
    key: PodKey | None = None,
    is_sglang: Callable[[str], bool] = lambda _: False,
    **settings: Any,
) -> AsyncIterator[PodRender]:
    render = PodRender(
        endpoints=lambda model: addresses,
        settings=RenderSettings(**settings),
        clock=clock or Clock(),
        key=key,
        is_sglang=is_sglang,
    )
    try:
        yield render
    finally:
        render.close()


async def ask(
    render: PodRender,
    body: Any,
    *,
    path: str = "/v1/chat/completions",
    limit: int = 16,
    model: ServedModel = TINY,
) -> tuple[TokenizedPrompt, ...]:
    raw = json.dumps(body).encode()
    return await render.prompts(parse_request(path=path, body=raw), raw, model=model, limit=limit)


async def test_a_simulated_pod_renders_what_the_tokenizer_makes() -> None:
    tokenizer = ModelTokenizer.load(Path(TINY_MODEL))
    async with simulated_pod() as address, rendering([address]) as render:
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"model": "tiny", "prompt": ["one", "two"]}),
        ):
            expected = tokenizer.token_buffers(parse_request(path=path, body=json.dumps(body).encode()))
            assert tuple(prompt.tokens for prompt in await ask(render, body, path=path)) == expected
        with pytest.raises(RenderUnavailableError, match="'other' is not on the pods that were asked"):
            await ask(render, CHAT | {"model": "other"})
        assert render.problems() == {}


async def test_a_pod_that_does_not_render_tokenizes_what_it_can_for_a_model_of_which_nobody_said_anything() -> None:
    tokenizer = ModelTokenizer.load(Path(TINY_MODEL))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": "é"}}}]
    async with simulated_pod(renders=False) as address, rendering([address]) as render:
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/chat/completions", CHAT | {"tools": tools, "add_generation_prompt": False, "max_tokens": 9}),
            ("/v1/completions", {"model": "tiny", "prompt": "one"}),
        ):
            expected = tokenizer.token_buffers(parse_request(path=path, body=json.dumps(body).encode()))
            found = await ask(render, body, path=path, model=UNDECLARED)
            assert tuple(prompt.tokens for prompt in found) == expected
        assert list(render.problems()) == [address]  # of its render endpoint
        with pytest.raises(RenderUnavailableError, match="--enable-scale-out"):
            await ask(render, CHAT | {"user": "another"}, model=TINY)


@pytest.mark.parametrize("is_sglang", [True, False])
async def test_only_sglang_is_not_told_of_the_generation_prompt(is_sglang: bool) -> None:
    """Its chats ignore the field, its /tokenize does not."""
    asked: list[Any] = []

    async def tokenizes(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/render"):
            return web.json_response({}, status=404)
        asked.append(await request.json())
        return web.json_response({"tokens": [1, 2, 3]})

    async with (
        serving(tokenizes) as [pod],
        rendering([pod.address], is_sglang=lambda address: is_sglang and address == pod.address) as render,
    ):
        await ask(render, CHAT | {"add_generation_prompt": False}, model=UNDECLARED)
        await ask(render, {"model": "tiny", "prompt": "one"}, path="/v1/completions", model=UNDECLARED)
    assert [body.get("add_generation_prompt") for body in asked] == [None if is_sglang else False, None]


@pytest.mark.parametrize("change", ["restarted", "gone"])
async def test_an_answer_that_is_under_way_when_its_source_is_let_go_of_is_not_kept(change: str) -> None:
    go_on = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        await go_on.wait()
        return web.json_response(RENDERED)

    async with serving(slow) as [pod], rendering([pod.address], timeout_seconds=10.0) as render:
        asking = asyncio.create_task(ask(render, CHAT))
        while not pod.asked:
            await asyncio.sleep(0.001)
        if change == "restarted":
            render.is_another(pod.address)
        else:
            render.keep([])
        go_on.set()
        assert await asking == ONE_TWO_THREE
        for _ in range(2):
            await ask(render, CHAT)
        assert len(pod.asked) == 2


async def test_a_rollout_takes_what_the_former_pods_have_said() -> None:
    addresses: list[str] = []
    async with serving(answers(RENDERED), answers({"token_ids": [4]})) as [old, new], rendering(addresses) as render:
        addresses[:] = [old.address]
        render.keep(addresses)
        assert await ask(render, CHAT) == ONE_TWO_THREE
        addresses[:] = [new.address]
        render.keep(addresses)
        assert [array("I", each.tokens).tolist() for each in await ask(render, CHAT)] == [[4]]


async def test_a_pod_that_begins_to_render_was_started_otherwise() -> None:
    is_able = True

    async def sometimes(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/render"):
            return web.json_response({"token_ids": [4]} if is_able else {}, status=200 if is_able else 403)
        return web.json_response({"tokens": [1, 2, 3]})

    clock = Clock()
    async with serving(sometimes) as [pod], rendering([pod.address], clock=clock, disabled_seconds=10.0) as render:
        is_able = False
        assert await ask(render, CHAT, model=UNDECLARED) == ONE_TWO_THREE
        is_able = True
        clock.now += 20.0
        await ask(render, CHAT | {"user": "another"}, model=UNDECLARED)
        [prompt] = await ask(render, CHAT, model=UNDECLARED)
        assert array("I", prompt.tokens).tolist() == [4]


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (answers({"tokens": [1, 2, 3]}), ONE_TWO_THREE[0]),
        (answers({}, status=400), None),
        (answers({"error": {"message": "The model does not exist"}}, status=404), "/tokenize does not know the model"),
        (answers({}, status=401), "/tokenize: the pod wants a key: give --pod-key-file"),
        (answers({"tokens": "no"}), "not an answer of vLLM's tokenize endpoint"),
        (never, "no answer within 0.2 s"),
    ],
)
async def test_one_pod_is_asked_for_a_comparison(handler: Handler, expected: TokenizedPrompt | str | None) -> None:
    raw = json.dumps(CHAT).encode()
    request = parse_request(path="/v1/chat/completions", body=raw)
    async with serving(handler) as [pod], rendering([], timeout_seconds=0.2) as render:
        if isinstance(expected, str):
            with pytest.raises(RenderUnavailableError, match=expected):
                await render.ask_one(pod.address, request, raw, model=UNDECLARED)
        else:
            assert await render.ask_one(pod.address, request, raw, model=UNDECLARED) == expected
        assert render.problems() == {}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"reasoning_effort": "low"}),
        ("/v1/chat/completions", CHAT | {"documents": [{"text": "d"}]}),
        ("/v1/chat/completions", CHAT | {"chat_template": "{{ 1 }}"}),
        ("/v1/chat/completions", CHAT | {"tool_choice": "none"}),
        ("/v1/completions", {"model": "tiny", "prompt": ["one", "two"]}),
        ("/v1/completions", {"model": "tiny", "prompt": "one", "truncate_prompt_tokens": 3}),
        ("/v1/completions", {"model": "tiny", "prompt": "one", "suffix": "two"}),
        ("/v1/messages", CHAT | {"max_tokens": 5}),
    ],
)
async def test_what_tokenize_would_get_wrong_is_not_asked_there(path: str, body: Any) -> None:
    async with serving(answers({}, status=403)) as [pod], rendering([pod.address]) as render:
        with pytest.raises(RenderUnavailableError, match="--enable-scale-out"):
            await ask(render, body, path=path, model=UNDECLARED)
        assert [asked.endswith("/render") for asked, _ in pod.asked] == [True]


@pytest.mark.parametrize(
    "model",
    [
        ServedModel(name="openai/gpt-oss-20b"),
        ServedModel(name="chat", aliases=frozenset({"DeepSeek-V3.2"})),
        ServedModel(name="tiny", tokens_from=TokensFrom.TOKENIZER),  # its folder cannot do it
    ],
)
async def test_chats_that_pods_render_in_code_are_not_asked_for_at_tokenize(model: ServedModel) -> None:
    async with serving(answers({}, status=403)) as [pod], rendering([pod.address]) as render:
        with pytest.raises(RenderUnavailableError, match="--enable-scale-out"):
            await ask(render, CHAT, model=model)
        assert [path for path, _ in pod.asked] == ["/v1/chat/completions/render"]


@pytest.mark.parametrize(
    ("path", "rendered_at"),
    [
        ("/some/prefix/v1/chat/completions", "/v1/chat/completions/render"),
        ("/v1/responses", "/v1/responses/render"),
        ("/v1/messages", "/v1/messages/render"),
    ],
)
async def test_every_api_has_its_render_endpoint(path: str, rendered_at: str) -> None:
    async with serving(answers(RENDERED)) as [pod], rendering([pod.address]) as render:
        body = CHAT | {"input": "Hi", "max_tokens": 5}
        assert await ask(render, body, path=path) == ONE_TWO_THREE
        assert pod.asked == [(rendered_at, body)]


async def test_media_are_asked_for_without_their_pixels_and_come_with_their_places() -> None:
    features = {"mm_hashes": {"image": ["cat"]}, "mm_placeholders": {"image": [{"offset": 1, "length": 2}]}}
    async with serving(answers(RENDERED | {"features": features})) as [pod], rendering([pod.address]) as render:
        prompts = await render.prompts(WITH_IMAGE, json.dumps(CHAT).encode(), model=TINY, limit=1)
    assert prompts[0].features == (Feature(identifier="cat", first_token=1, length=2),)
    assert pod.asked == [("/v1/chat/completions/render", CHAT | {"mm_payload": "none", "return_mm_kwargs": False})]


async def test_the_same_body_is_asked_once_until_the_answer_is_old_or_pushed_out() -> None:
    clock = Clock()
    async with (
        serving(answers([RENDERED, RENDERED])) as [pod],
        rendering([pod.address], clock=clock, cache_seconds=300.0, cache_bytes=3_000) as render,
    ):
        body = {"model": "tiny", "prompt": ["a", "b"]}
        for limit in (2, 1):
            assert await ask(render, body, path="/v1/completions", limit=limit) == ONE_TWO_THREE * limit
        assert len(pod.asked) == 1
        clock.now += 300.0
        await ask(render, body, path="/v1/completions")
        assert len(pod.asked) == 2
        for number in range(20):
            await ask(render, body | {"prompt": [str(number), "b"]}, path="/v1/completions")
        await ask(render, body, path="/v1/completions")
        assert len(pod.asked) == 23


async def test_a_pod_that_does_not_take_the_key_is_asked_again_soon_and_is_no_other_pod(tmp_path: Path) -> None:
    clock = Clock()
    key = PodKey(write_key(tmp_path / "key", KEY), clock=clock)
    async with (
        serving(answers(RENDERED)) as [pod],
        rendering([pod.address], clock=clock, key=key) as render,
    ):
        assert await ask(render, CHAT) == ONE_TWO_THREE
        pod.handler = answers({"error": "Unauthorized"}, status=401)
        with pytest.raises(RenderUnavailableError, match="the pod does not take the key of --pod-key-file"):
            await ask(render, CHAT | {"user": "another"})
        assert await ask(render, CHAT) == ONE_TWO_THREE  # what it has said before is still what it says
        pod.handler = answers(RENDERED)
        clock.now += RenderSettings().retry_seconds
        assert await ask(render, CHAT | {"user": "another"}) == ONE_TWO_THREE


@pytest.mark.parametrize(
    ("status", "answer", "problem", "rests_seconds"),
    [
        (403, {"error": {"message": "Scale-out endpoints are disabled."}}, "--enable-scale-out", 120.0),
        (401, {"error": "Unauthorized"}, "the pod wants a key: give --pod-key-file", 120.0),
        (404, {"detail": "Not Found"}, "has no /v1/chat/completions/render", 120.0),
        (501, {"error": {"message": "not supported"}}, "status 501", 120.0),
        (500, {"error": {"message": "out of luck"}}, "answered /v1/chat/completions/render with status 500", 5.0),
        (200, {"hello": "world"}, "not an answer of vLLM's render endpoint", 120.0),
    ],
)
async def test_a_pod_that_cannot_render_is_left_alone_for_a_while_and_said_once(
    status: int, answer: Any, problem: str, rests_seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    async with serving(answers(answer, status=status)) as [pod], rendering([pod.address], clock=clock) as render:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                with pytest.raises(RenderUnavailableError, match=problem):
                    await ask(render, CHAT)
            assert len(pod.asked) == 1
            assert [problem in why for why in render.problems().values()] == [True]
            clock.now += rests_seconds
            pod.handler = answers(RENDERED)
            assert await ask(render, CHAT) == ONE_TWO_THREE
            assert render.problems() == {}
        assert len([record for record in caplog.records if record.name == "extproc.prompts.pod_render"]) == 1


async def test_another_pod_is_asked_when_one_is_gone_and_the_gone_one_not_again() -> None:
    async with serving(answers(RENDERED), answers(RENDERED)) as [gone, _]:
        nobody = gone.address
    async with serving(answers(RENDERED)) as [pod], rendering([nobody, pod.address]) as render:
        for number in range(4):
            assert await ask(render, CHAT | {"user": str(number)}) == ONE_TWO_THREE
        assert len(pod.asked) == 4
        assert list(render.problems()) == [nobody]


async def test_pods_take_turns() -> None:
    async with serving(*[answers(RENDERED)] * 3) as pods, rendering([pod.address for pod in pods]) as render:
        for number in range(9):
            await ask(render, CHAT | {"user": str(number)})
        assert [len(pod.asked) for pod in pods] == [3, 3, 3]


async def test_an_adapter_that_one_pod_lacks_is_rendered_by_another_and_is_no_problem_of_the_pod() -> None:
    lacks = answers({"error": {"message": "The model `tiny` does not exist."}}, status=404)
    async with serving(lacks, answers(RENDERED)) as pods, rendering([pod.address for pod in pods]) as render:
        for number in range(4):
            assert await ask(render, CHAT | {"user": str(number)}) == ONE_TWO_THREE
        assert render.problems() == {}
        pods[1].handler = lacks
        with pytest.raises(RenderUnavailableError, match="'tiny' is not on the pods that were asked"):
            await ask(render, CHAT)


async def test_a_pod_that_refuses_every_prompt_costs_none_its_tokens() -> None:
    addresses: list[str] = []
    async with serving(answers({}, status=400), answers(RENDERED)) as [wrong, right], rendering(addresses) as render:
        addresses[:] = [wrong.address, right.address]
        for number in range(4):
            assert await ask(render, CHAT | {"user": str(number)}) == ONE_TWO_THREE
    assert len(right.asked) == 4


async def test_a_request_that_the_pod_refuses_is_no_problem_of_the_pod() -> None:
    async with (
        serving(answers({"error": {"message": "bad roles"}}, status=400)) as [pod],
        rendering([pod.address]) as render,
    ):
        for _ in range(2):
            with pytest.raises(RenderRefusedError, match="status 400") as caught:
                await ask(render, CHAT)
            assert "bad roles" not in str(caught.value), "a pod's words may be the client's"
        assert (len(pod.asked), render.problems()) == (2, {})


async def test_a_slow_pod_costs_one_deadline_and_is_then_left_alone() -> None:
    async with serving(never) as [pod], rendering([pod.address], timeout_seconds=0.05) as render:
        with pytest.raises(RenderTimeoutError, match=r"within 0.05 s"):
            await ask(render, CHAT)
        with pytest.raises(RenderUnavailableError, match=r"no answer within 0.05 s"):
            await ask(render, CHAT)
        assert len(pod.asked) <= 1, "on a busy machine the deadline may pass before the question has arrived"


async def test_media_that_are_slow_to_fetch_say_nothing_of_the_pod() -> None:
    async with (
        serving(never) as [pod],
        rendering([pod.address], timeout_seconds=60.0, media_timeout_seconds=0.05) as render,
    ):
        async with asyncio.timeout(10):  # on a busy machine a deadline may pass before the question has arrived
            while len(pod.asked) < 2:
                with pytest.raises(RenderTimeoutError):
                    await render.prompts(WITH_IMAGE, b"{}", model=TINY, limit=1)
        assert render.problems() == {}


async def test_questions_under_way_are_bounded() -> None:
    released = asyncio.Event()

    async def later(request: web.Request) -> web.StreamResponse:
        async with asyncio.timeout(10):
            await released.wait()
        return web.json_response(RENDERED)

    async with serving(later) as [pod], rendering([pod.address], timeout_seconds=10.0, max_under_way=2) as render:
        waiting = [asyncio.create_task(ask(render, CHAT | {"user": str(number)})) for number in range(2)]
        async with asyncio.timeout(10):
            while len(pod.asked) < 2:
                await asyncio.sleep(0.001)
        with pytest.raises(RenderUnavailableError, match="2 other prompts wait"):
            await ask(render, CHAT)
        released.set()
        assert await asyncio.gather(*waiting) == [ONE_TWO_THREE] * 2
        assert await ask(render, CHAT) == ONE_TWO_THREE


async def test_an_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.prompts.pod_render.MAX_ANSWER_BYTES", 10_000)
    async with serving(answers({"token_ids": [1] * 10_000})) as [pod], rendering([pod.address]) as render:
        with pytest.raises(RenderUnavailableError, match="larger than 10000 bytes"):
            await ask(render, CHAT)


async def test_no_pod_other_apis_and_huge_bodies_are_unavailable_at_once() -> None:
    async with rendering([]) as render:
        with pytest.raises(RenderUnavailableError, match="no pod serves 'tiny' now"):
            await ask(render, CHAT)
    async with serving(answers(RENDERED)) as [pod], rendering([pod.address], max_body_bytes=100) as render:
        with pytest.raises(RenderUnavailableError, match="pods do not render embeddings"):
            await render.prompts(
                InferenceRequest(api=ApiKind.EMBEDDINGS, path="/v1/embeddings"), b"{}", model=TINY, limit=1
            )
        with pytest.raises(RenderUnavailableError, match="too large to be sent twice"):
            await ask(render, CHAT | {"user": "x" * 100})
        assert pod.asked == []
