"""What is known of a request's prompts, from the tokenizer, from a pod or from the text, and what bounds it."""

import asyncio
import json
import os
import shutil
import threading
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from extproc.errors import PromptTokensError, TokenizerError
from extproc.models.models import ServedModel, TokensFrom
from extproc.prompts import prompt_tokens
from extproc.prompts.pod_render import PodRender
from extproc.prompts.prompt_tokens import PromptTokenSource, TokenSettings
from extproc.prompts.tokenized_prompt import NO_PROMPT, PromptTokens, TokenizedPrompt
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.openai import parse_request
from extproc.requests.request import ApiKind, InferenceRequest

TINY_MODEL = Path(__file__).parents[3] / "podsim" / "tiny_model"
TINY = ServedModel(name="tiny", tokens_from=TokensFrom.TOKENIZER, tokenizer_folder=TINY_MODEL)
TEXT = ServedModel(name="tiny", tokens_from=TokensFrom.TEXT)
RENDER = ServedModel(name="tiny", tokens_from=TokensFrom.RENDER)
LONG_CHAT = {"messages": [{"role": "user", "content": "What is a block pool? " * 40}]}


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def completion(prompt: Any, **fields: Any) -> InferenceRequest:
    return parse_request(path="/v1/completions", body=body(prompt=prompt, **fields))


def chat(**fields: Any) -> InferenceRequest:
    return parse_request(path="/v1/chat/completions", body=body(**fields))


def ids(known: PromptTokens) -> list[list[int]]:
    return [list(array("I", prompt.tokens)) for prompt in known.prompts]


class FakeRender(PodRender):
    """A pod that renders everything as the same tokens, or refuses."""

    def __init__(self, *, refusal: str | None = None) -> None:
        self.refusal = refusal
        self.asked: list[bytes] = []

    async def prompts(
        self, request: InferenceRequest, body: bytes, *, model: ServedModel, limit: int
    ) -> tuple[TokenizedPrompt, ...]:
        self.asked.append(body)
        if self.refusal is not None:
            raise PromptTokensError(self.refusal)
        return (TokenizedPrompt(tokens=b"\1\0\0\0" * 5),)


class Stuck(ModelTokenizer):
    """A tokenizer that goes on only when told to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.threads: set[str] = set()

    @property
    def thread_above_bytes(self) -> int:
        return 100

    def token_buffers(
        self, request: InferenceRequest, *, limit: int | None = None, max_model_len: int | None = None
    ) -> tuple[bytes, ...]:
        self.threads.add(threading.current_thread().name)
        self.go_on.wait(10)
        return (b"abcd",)


def stuck_source(
    monkeypatch: pytest.MonkeyPatch, *, timeout_seconds: float = 10.0, max_waiting: int = 8
) -> tuple[Stuck, PromptTokenSource]:
    stuck = Stuck()
    monkeypatch.setattr(prompt_tokens, "load_tokenizer", lambda model: stuck)
    settings = TokenSettings(timeout_seconds=timeout_seconds, max_waiting=max_waiting)
    return stuck, PromptTokenSource([TINY], settings=settings)


async def test_a_prompt_that_takes_too_long_is_predicted_from_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, source = stuck_source(monkeypatch, timeout_seconds=0.01)
    known = await source.prompts(completion("x" * 600), None, model=TINY, limit=1)
    assert known.degraded == "prompt-too-large"
    assert known.degraded_why == "the prompt is too long to be tokenized now: it took longer than 0.01 s"
    assert (len(known.chunks), known.estimated_tokens) == (2 * 8, 150)
    stuck.go_on.set()
    source.close()


async def test_too_many_large_prompts_are_predicted_and_tokenized_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, source = stuck_source(monkeypatch, max_waiting=1)
    large = completion("x" * 200)
    waiting = [asyncio.create_task(source.prompts(large, None, model=TINY, limit=1)) for _ in range(2)]
    await asyncio.sleep(0)
    known = await source.prompts(large, None, model=TINY, limit=1)
    assert "1 long requests of the tenant wait already" in known.degraded_why
    stuck.go_on.set()
    expected = PromptTokens(prompts=(TokenizedPrompt(tokens=b"abcd"),), estimated_tokens=1)
    assert await asyncio.gather(*waiting) == [expected] * 2
    assert await source.prompts(large, None, model=TINY, limit=1) == expected
    assert all(name.startswith("long-work") for name in stuck.threads)
    source.close()


async def test_only_the_first_prompts_are_tokenized_and_the_others_estimated() -> None:
    source = PromptTokenSource([TINY])
    known = await source.prompts(completion(["a", "b", "c" * 40]), None, model=TINY, limit=2)
    assert (len(known.prompts), known.estimated_tokens, known.degraded) == (2, 2 + 2 + 10, None)
    source.close()


async def test_a_prompt_over_the_budget_is_tokenized_at_its_beginning() -> None:
    source = PromptTokenSource([TINY], settings=TokenSettings(budget_tokens=50_000))
    whole = PromptTokenSource([TINY])
    request = completion(["returns the function " * 20_000, "rest " * 100])
    short, known = [await each.prompts(request, None, model=TINY, limit=2) for each in (source, whole)]
    first, second = (len(prompt.tokens) // 4 for prompt in short.prompts)
    assert known.prompts[0].tokens.startswith(short.prompts[0].tokens[:-16])
    assert known.prompts[1] == short.prompts[1]
    assert 25_000 < first < 30_000  # 200,000 characters
    assert short.degraded == "prompt-too-large"
    assert short.degraded_why.startswith(f"only the first {first + second} of about ")
    assert short.estimated_tokens == pytest.approx(known.estimated_tokens, rel=0.01)
    source.close()
    whole.close()


async def test_a_text_of_many_tokens_a_byte_is_within_the_budget_too() -> None:
    source = PromptTokenSource([TINY], settings=TokenSettings(budget_tokens=1_000))
    known = await source.prompts(completion("\u16a0" * 1_000), None, model=TINY, limit=1)  # three tokens each
    assert [len(prompt.tokens) // 4 for prompt in known.prompts] == [1_000]
    assert (known.degraded, known.estimated_tokens > 2_900) == ("prompt-too-large", True)
    source.close()


async def test_token_ids_need_no_tokenizer_and_are_bounded_by_the_budget() -> None:
    source = PromptTokenSource([], settings=TokenSettings(budget_tokens=3))
    assert await source.prompts(completion([5, 6, 7]), None, model=TEXT, limit=1) == PromptTokens(
        prompts=(TokenizedPrompt(tokens=array("I", [5, 6, 7]).tobytes()),), estimated_tokens=3
    )
    known = await source.prompts(completion([[5, 6, 7, 8, 9], [4]]), None, model=TEXT, limit=2)
    assert (ids(known), known.estimated_tokens) == ([[5, 6, 7]], 6)
    assert known.degraded_why == "only the first 3 of about 6 tokens are looked up"
    source.close()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 3}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [5, 6, 7]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 9}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 9}, [5, 6, 7, 8, 9]),
    ],
)
async def test_token_ids_are_truncated_as_the_pod_does(fields: dict[str, Any], expected: list[int]) -> None:
    source = PromptTokenSource([])
    request = completion([5, 6, 7, 8, 9], **fields)
    known = await source.prompts(request, None, model=replace(TEXT, max_model_len=4), limit=1)
    assert (ids(known), known.degraded) == ([expected], None)
    source.close()


async def test_a_cut_to_a_context_length_that_is_not_known_is_said() -> None:
    source = PromptTokenSource([TINY])
    request = completion("Hello you there", truncate_prompt_tokens=-1)
    known = await source.prompts(request, None, model=TINY, limit=1)
    assert (known.degraded, len(known.prompts)) == ("truncation-unknown", 1)
    longer = await source.prompts(request, None, model=replace(TINY, max_model_len=3), limit=1)
    assert (longer.degraded, longer.estimated_tokens) == (None, 2)
    source.close()


async def test_default_kwargs_and_another_template_are_the_servers(tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{{ style }}|{{ enable_thinking }}|{{ messages[0].content }}")
    defaults = {"style": "brief", "enable_thinking": False}
    model = replace(TINY, chat_template=template, chat_template_kwargs=defaults)
    source, plain = PromptTokenSource([model]), ModelTokenizer.load(TINY_MODEL)
    message = {"role": "user", "content": "Hi"}
    for fields, expected in (
        ({}, "brief|False|Hi"),
        ({"chat_template_kwargs": {"style": "long"}}, "long|False|Hi"),
        ({"chat_template_kwargs": {"style": None, "enable_thinking": "auto"}}, "brief|False|Hi"),
        ({"reasoning_effort": "high"}, "brief|True|Hi"),
    ):
        known = await source.prompts(chat(messages=[message], **fields), None, model=model, limit=1)
        assert known.prompts[0].tokens == plain.token_buffers(completion(expected, add_special_tokens=False))[0]
    source.close()


def test_a_template_that_is_not_there_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"none\.jinja cannot be read"):
        PromptTokenSource([replace(TINY, chat_template=tmp_path / "none.jinja")])
    with pytest.raises(TokenizerError, match="no tokenizer folder"):
        PromptTokenSource([replace(TINY, tokenizer_folder=None)])


def test_a_template_is_a_file_of_a_sensible_size_and_no_device_that_is_read_for_ever(tmp_path: Path) -> None:
    endless, pipe = tmp_path / "endless.jinja", tmp_path / "pipe.jinja"
    endless.write_bytes(b" " * ((1 << 20) + 1))
    os.mkfifo(pipe)
    for path, words in ((endless, "longer than 1048576"), (pipe, "no file"), (Path("/dev/zero"), "no file")):
        with pytest.raises(TokenizerError, match=f"{path} cannot be read: it is {words}"):
            ModelTokenizer.load(TINY_MODEL, chat_template=path)


async def test_a_model_that_was_not_loaded_is_an_error() -> None:
    source = PromptTokenSource([])
    with pytest.raises(TokenizerError, match="not loaded"):
        await source.prompts(completion("Hi"), None, model=TINY, limit=1)
    source.close()


async def test_without_a_tokenizer_the_text_predicts_and_adapters_and_salts_are_kept_apart() -> None:
    source = PromptTokenSource([])
    plain = await source.prompts(chat(**LONG_CHAT), None, model=TEXT, limit=1)
    assert (plain.degraded, plain.prompts, len(plain.chunks)) == ("no-tokenizer", (), 3 * 8)
    assert (plain.chunk_tokens, plain.estimated_tokens) == (64, -(-(40 * 22 + 6) // 4))
    adapted = await source.prompts(chat(**LONG_CHAT), None, model=TEXT, limit=1, adapter="ad")
    salted = await source.prompts(chat(**LONG_CHAT, cache_salt="s"), None, model=TEXT, limit=1)
    assert len({known.chunks[:8] for known in (plain, adapted, salted)}) == 3
    source.close()


async def test_a_pod_is_asked_where_the_model_says_so_and_nowhere_else() -> None:
    render = FakeRender()
    source = PromptTokenSource([TINY], render=render)
    request, raw = chat(**LONG_CHAT), body(**LONG_CHAT)
    rendered = PromptTokens(prompts=(TokenizedPrompt(tokens=b"\1\0\0\0" * 5),), estimated_tokens=5)
    assert await source.prompts(request, raw, model=RENDER, limit=1) == rendered
    assert render.asked == [raw]
    assert (await source.prompts(request, raw, model=TEXT, limit=1)).degraded == "no-tokenizer"
    assert (await source.prompts(request, raw, model=TINY, limit=1)).degraded is None
    assert len(render.asked) == 1
    source.close()


async def test_a_folder_that_is_not_believed_leaves_the_word_to_the_pods() -> None:
    doubts, render = dict[str, str](), FakeRender()
    source = PromptTokenSource([TINY], render=render, doubts=doubts)
    request, raw = chat(**LONG_CHAT), body(**LONG_CHAT)
    believed = await source.prompts(request, raw, model=TINY, limit=1)
    doubts["tiny"] = "it differs from 2 pods"

    known = await source.prompts(request, raw, model=TINY, limit=1)
    assert (known.estimated_tokens, known.degraded, render.asked) == (5, None, [raw])
    given = await source.prompts(completion([1, 2, 3]), b"{}", model=TINY, limit=1)
    assert (ids(given), len(render.asked)) == ([[1, 2, 3]], 1)  # a client's own ids need nobody

    render.refusal = "no pod renders"
    known = await source.prompts(request, raw, model=TINY, limit=1)
    assert ids(known) == ids(believed)  # its tokens predict no worse than the text
    assert (known.degraded, known.degraded_why) == ("tokens-differ", "it differs from 2 pods; no pod renders")
    doubts.clear()
    assert await source.prompts(request, raw, model=TINY, limit=1) == believed
    source.close()


IMAGE = {
    "messages": [
        {"role": "system", "content": "You see well. " * 40},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://pictures/cat.png"}}]},
    ]
}


PICTURE = InferenceRequest(
    api=ApiKind.CHAT_COMPLETIONS, path="/v1/chat/completions", has_media=True, unsupported_reason="there is an image"
)


async def test_what_the_tokenizer_cannot_know_is_rendered_by_a_pod() -> None:
    render = FakeRender()
    source = PromptTokenSource([TINY], render=render)
    known = await source.prompts(PICTURE, body(**IMAGE), model=TINY, limit=1)
    assert (known.estimated_tokens, known.degraded, render.asked) == (5, None, [body(**IMAGE)])
    source.close()


async def test_where_no_pod_renders_it_the_text_predicts_and_both_reasons_are_given() -> None:
    source = PromptTokenSource([TINY], render=FakeRender(refusal="no pod renders"))
    known = await source.prompts(PICTURE, body(**IMAGE), model=TINY, limit=1)
    assert (known.degraded, known.degraded_why) == ("prompt-unsupported", "there is an image; no pod renders")
    assert len(known.chunks) == 2 * 8
    alone = await source.prompts(chat(**LONG_CHAT), body(**LONG_CHAT), model=RENDER, limit=1)
    assert (alone.degraded, alone.degraded_why) == ("prompt-tokens", "no pod renders")
    source.close()


async def test_chats_of_a_folder_without_a_template_are_rendered_by_a_pod(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_MODEL / name, tmp_path / name)
    render = FakeRender()
    model = replace(TINY, tokenizer_folder=tmp_path)
    source = PromptTokenSource([model], render=render)
    assert (await source.prompts(chat(**LONG_CHAT), b"{}", model=model, limit=1)).estimated_tokens == 5
    assert (await source.prompts(completion("Hi"), b"{}", model=model, limit=1)).degraded is None
    assert len(render.asked) == 1
    source.close()


async def test_requests_without_a_prompt_are_nothing_and_unknown_bodies_say_so() -> None:
    source = PromptTokenSource([TINY])
    other = InferenceRequest(api=ApiKind.OTHER, path="/metrics")
    assert await source.prompts(other, b"{}", model=TINY, limit=1) == NO_PROMPT
    hidden = parse_request(path="/v1/completions", body=None)
    assert await source.prompts(hidden, None, model=TINY, limit=1) == PromptTokens(
        degraded="prompt-unsupported", degraded_why="Envoy does not send the body"
    )
    source.close()


async def test_half_a_surrogate_pair_in_a_salt_is_no_failure() -> None:
    source = PromptTokenSource([])
    request = msgspec.structs.replace(chat(**LONG_CHAT), cache_salt="\ud800")
    assert (await source.prompts(request, None, model=TEXT, limit=1)).degraded == "no-tokenizer"
    source.close()
