"""Both tokenizer libraries on the tiny model: same ids, and a fallback when they are not the same."""

import asyncio
import json
import logging
import random
from array import array
from pathlib import Path
from typing import Any

import fastokens  # type: ignore[import-untyped]
import pytest
import tokenizers

from extproc.errors import TokenizerError
from extproc.models.models import ServedModel, TokensFrom
from extproc.prompts.engines import choose_engine
from extproc.prompts.prompt_tokens import PromptTokenSource
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.openai import parse_request
from extproc.requests.request import InferenceRequest

TINY_MODEL = Path(__file__).parents[3] / "podsim" / "tiny_model"
CHATS = json.loads((Path(__file__).parents[2] / "data" / "awkward_chats.json").read_text())


def completion(prompt: Any, **fields: Any) -> InferenceRequest:
    return parse_request(path="/v1/completions", body=json.dumps({"prompt": prompt, **fields}).encode())


def chat(**body: Any) -> InferenceRequest:
    return parse_request(path="/v1/chat/completions", body=json.dumps(body).encode())


TINY = ServedModel(name="tiny", tokens_from=TokensFrom.TOKENIZER, tokenizer_folder=TINY_MODEL)


async def source_buffers(source: PromptTokenSource, request: InferenceRequest) -> tuple[bytes, ...]:
    known = await source.prompts(request, None, model=TINY, limit=1)
    assert known.degraded is None
    return tuple(prompt.tokens for prompt in known.prompts)


def ids(buffer: bytes) -> list[int]:
    return list(array("I", buffer))


@pytest.fixture(scope="module")
def fast() -> ModelTokenizer:
    return ModelTokenizer.load(TINY_MODEL)


@pytest.fixture(scope="module")
def reference() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))


def test_the_tiny_model_runs_on_fastokens(fast: ModelTokenizer) -> None:
    assert fast.engine == "fastokens"


def test_completions_get_special_tokens_unless_the_request_refuses_them(
    fast: ModelTokenizer, reference: tokenizers.Tokenizer
) -> None:
    with_bos, without = reference.encode("Hello").ids, reference.encode("Hello", add_special_tokens=False).ids
    assert with_bos != without
    assert [ids(b) for b in fast.token_buffers(completion(["Hello", "Hello"]))] == [with_bos, with_bos]
    assert [ids(b) for b in fast.token_buffers(completion("Hello", add_special_tokens=False))] == [without]


def test_chats_get_only_the_special_tokens_of_the_template_unless_the_request_asks_for_more(
    fast: ModelTokenizer, reference: tokenizers.Tokenizer
) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    bos = reference.token_to_id("<|bos|>")
    (plain,) = fast.token_buffers(chat(messages=messages))
    (doubled,) = fast.token_buffers(chat(messages=messages, add_special_tokens=True))
    assert ids(plain)[0] == bos
    assert ids(doubled) == [bos, *ids(plain)]


def test_token_ids_pass_unchanged_and_nothing_gives_nothing(fast: ModelTokenizer) -> None:
    assert [ids(b) for b in fast.token_buffers(completion([[5, 4095], [7]]))] == [[5, 4095], [7]]
    assert fast.token_buffers(completion(5)) == ()
    assert fast.token_buffers(parse_request(path="/v1/models", body=b"")) == ()


def test_the_cache_of_segments_never_changes_the_ids(fast: ModelTokenizer, reference: tokenizers.Tokenizer) -> None:
    pieces = ["<|im_start|>", "<|im_end|>", "\n", " ", "user", "naïve é", "字", "👍🏽", "x = {1: 2}", "\t\t", "<|im_"]
    source = random.Random(7)
    for _ in range(300):
        text = "".join(source.choice(pieces) for _ in range(source.randrange(40)))
        (buffer,) = fast.token_buffers(completion(text))
        assert ids(buffer) == reference.encode(text).ids


async def test_long_texts_in_threads_give_the_same_ids(fast: ModelTokenizer, reference: tokenizers.Tokenizer) -> None:
    texts = [f"{number} tokens and 字 " * 15_000 for number in range(4)]
    assert all(len(text) > 200_000 for text in texts)
    source = PromptTokenSource([TINY])
    buffers = await asyncio.gather(*(source_buffers(source, completion(text)) for text in texts))
    source.close()
    assert [ids(buffer) for (buffer,) in buffers] == [reference.encode(text).ids for text in texts]


async def test_both_ways_to_ask_agree_on_every_awkward_chat(fast: ModelTokenizer) -> None:
    source = PromptTokenSource([TINY])
    for case in CHATS:
        if case["name"].startswith("refused:"):
            continue
        request = chat(**case["request"])
        assert await source_buffers(source, request) == fast.token_buffers(request), case["name"]
    source.close()


def test_text_that_is_not_unicode_is_an_error_with_a_reason(fast: ModelTokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    with pytest.raises(TokenizerError) as caught:
        fast.token_buffers(chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}]))
    assert caught.value.reason == "tokenizer"


class Disagreeing:
    """A fastokens that gets one special token wrong."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def from_json_str(cls, text: str) -> "Disagreeing":
        return cls(fastokens._native.Tokenizer.from_json_str(text))

    def enable_segment_cache(self, max_bytes: int) -> None:
        self._tokenizer.enable_segment_cache(max_bytes)

    def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
        ids, offsets = self._tokenizer.encode_batch_flat(texts, add_special_tokens=add_special_tokens)
        return (ids[4:] if "<|im_end|>" in texts[0] else ids), offsets


class Unable:
    """A fastokens that cannot load the file."""

    @classmethod
    def from_json_str(cls, text: str) -> "Unable":
        raise ValueError("unsupported model")


@pytest.mark.parametrize("library", [Disagreeing, Unable])
def test_a_fastokens_that_is_wrong_or_unable_is_replaced_loudly(
    library: type,
    reference: tokenizers.Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fastokens, "Tokenizer", library)
    with caplog.at_level(logging.WARNING):
        tokenizer = ModelTokenizer.load(TINY_MODEL)
    assert tokenizer.engine == "tokenizers"
    assert [record.name for record in caplog.records] == ["extproc.prompts.engines"]
    text = "Hello <|im_end|>"
    assert [ids(b) for b in tokenizer.token_buffers(completion(text))] == [reference.encode(text).ids]


async def test_the_reference_library_gives_the_same_ids_for_every_awkward_chat(
    fast: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastokens, "Tokenizer", Unable)
    slow = PromptTokenSource([TINY])
    for case in CHATS:
        if not case["name"].startswith("refused:"):
            request = chat(**case["request"])
            assert await source_buffers(slow, request) == fast.token_buffers(request), case["name"]
    slow.close()


@pytest.mark.parametrize(
    ("scheme", "special_is_normalized", "engine"),
    [("always", False, "fastokens"), ("always", True, "tokenizers"), ("first", False, "tokenizers")],
)
def test_a_metaspace_before_every_piece_runs_on_fastokens(
    scheme: Any, special_is_normalized: bool, engine: str, reference: tokenizers.Tokenizer
) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(reference.to_str())
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.add_tokens([tokenizers.AddedToken("<|x|>", normalized=special_is_normalized)])
    chosen = choose_engine(tokenizer, ("<|im_end|>", "<|x|>"), TINY_MODEL, 1 << 20)
    assert chosen.name == engine
    for text in ("", "a", " a", "▁a", "<|im_end|>a <|im_end|> b", "a<|x|>b"):
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids(chosen.encode(text, add_special_tokens=False)) == expected
