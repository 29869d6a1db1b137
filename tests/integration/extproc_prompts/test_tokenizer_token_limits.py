"""truncate_prompt_tokens and the token budget on the tiny model, against the library that vLLM cuts with."""

import json
import shutil
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from extproc.errors import TokenizerError
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.openai import parse_request
from extproc.requests.request import InferenceRequest

TINY_MODEL = Path(__file__).parents[3] / "podsim" / "tiny_model"
TEXT = "def truncate(prompt): return prompt[-limit:]  # naïve 字"
FRAMES = {"none": "$A", "bos": "<|bos|> $A", "bos and eos": "<|bos|> $A <|eos|>", "two before": "<|bos|> <|bos|> $A"}


def completion(prompt: Any, **fields: Any) -> InferenceRequest:
    return parse_request(path="/v1/completions", body=json.dumps({"prompt": prompt, **fields}).encode())


def ids(tokenizer: ModelTokenizer, request: InferenceRequest) -> list[int]:
    (buffer,) = tokenizer.token_buffers(request)
    return list(array("I", buffer))


@pytest.fixture(params=FRAMES, scope="module")
def framed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other special tokens around a text."""
    folder = tmp_path_factory.mktemp("framed")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_MODEL / name, folder / name)
    tokenizer = tokenizers.Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single=FRAMES[request.param], special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("keep", [2, 3, 7, 12, 100])
def test_without_a_side_the_prompt_is_cut_as_the_tokenizer_library_cuts_it(framed: Path, keep: int) -> None:
    reference = tokenizers.Tokenizer.from_file(str(framed / "tokenizer.json"))
    ours = ModelTokenizer.load(framed)
    reference.enable_truncation(keep, direction="left")
    for special in (True, False):
        request = completion(TEXT, truncate_prompt_tokens=keep, add_special_tokens=special)
        assert ids(ours, request) == reference.encode(TEXT, add_special_tokens=special).ids


def test_with_a_side_the_finished_tokens_are_sliced_special_ones_too(framed: Path) -> None:
    reference = tokenizers.Tokenizer.from_file(str(framed / "tokenizer.json"))
    ours, whole = ModelTokenizer.load(framed), reference.encode(TEXT).ids
    assert ids(ours, completion(TEXT, truncate_prompt_tokens=5, truncation_side="left")) == whole[-5:]
    assert ids(ours, completion(TEXT, truncate_prompt_tokens=5, truncation_side="right")) == whole[:5]


def test_a_limit_below_the_special_tokens_has_no_known_tokens(framed: Path) -> None:
    tokenizer = ModelTokenizer.load(framed)
    request = completion(TEXT, truncate_prompt_tokens=1)
    specials = len(tokenizer.token_buffers(completion(""))[0]) // 4
    if specials > 1:
        with pytest.raises(TokenizerError, match="1 tokens leave no room beside 2 special tokens"):
            ids(tokenizer, request)
    else:
        assert len(ids(tokenizer, request)) == 1


def test_the_beginning_of_a_long_batch_is_tokenized_within_the_budget() -> None:
    tokenizer = ModelTokenizer.load(TINY_MODEL)
    kinds = (["a b c d " * 10], [[5] * 30], ["more"], [[6] * 7])
    prompts = tuple(prompt for kind in kinds for prompt in completion(kind).prompts)
    request = msgspec.structs.replace(completion("x"), prompts=prompts)
    whole = tokenizer.token_buffers(request)
    buffers, left_out = tokenizer.leading_tokens(request, limit=4, budget_tokens=len(whole[0]) // 4 + 10)
    assert buffers == (whole[0], whole[1][:40])
    assert left_out == 20 + 1 + 7


def test_a_long_prompt_that_is_to_be_truncated_has_no_known_beginning() -> None:
    tokenizer = ModelTokenizer.load(TINY_MODEL)
    with pytest.raises(TokenizerError, match="no known beginning"):
        tokenizer.leading_tokens(completion("x", truncate_prompt_tokens=1), budget_tokens=10)


def test_a_later_system_message_goes_to_the_front_where_the_template_refuses_it() -> None:
    tokenizer = ModelTokenizer.load(TINY_MODEL)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    anthropic = parse_request(
        path="/v1/messages",
        body=json.dumps(
            {
                "max_tokens": 5,
                "system": "First.",
                "messages": [*turns, {"role": "system", "content": "Later."}, {"role": "user", "content": "Go"}],
            }
        ).encode(),
    )
    chat = parse_request(
        path="/v1/chat/completions",
        body=json.dumps(
            {"messages": [{"role": "system", "content": "First.Later."}, *turns, {"role": "user", "content": "Go"}]}
        ).encode(),
    )
    texts = [tokenizer.render(request.prompts[0]) for request in (anthropic, chat)]  # type: ignore[arg-type]
    assert texts[0] == texts[1]
