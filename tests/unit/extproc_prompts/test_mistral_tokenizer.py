"""Folders with Mistral's own tokenizer files: which they are, what is refused, and what vLLM does with chats before."""

import importlib.resources
import shutil
from array import array
from pathlib import Path
from typing import Any

import pytest

from extproc.errors import ChatTemplateError, TokenizerError
from extproc.prompts.mistral_tokenizer import has_mistral_file, load_mistral
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.prompts.tokenizer_folder import has_tokenizer, why_not_readable
from extproc.requests.request import (
    ApiKind,
    ChatPrompt,
    InferenceRequest,
    PairPrompt,
    Prompt,
    TextPrompt,
    Truncation,
    TruncationSide,
)

FILE = "mistral_instruct_tokenizer_241114.model.v7"  # in the library's own package: a real one
USER = {"role": "user", "content": "hi"}
SECRET = "rosebud"
CALL = {"id": "call_0123456789", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mistral")
    shutil.copy(Path(str(importlib.resources.files("mistral_common"))) / "data" / FILE, made / "tokenizer.model.v7")
    (made / "params.json").write_text("{}")
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ModelTokenizer:
    return ModelTokenizer.load(folder)


def request(prompt: Prompt, api: ApiKind = ApiKind.CHAT_COMPLETIONS, **fields: Any) -> InferenceRequest:
    return InferenceRequest(api=api, path="/v1/x", prompts=(prompt,), **fields)


def text_of(tokenizer: ModelTokenizer, *messages: Any, **fields: Any) -> str:
    (tokens,) = tokenizer.token_buffers(request(ChatPrompt(messages=messages, **fields)))
    return tokenizer.text(tokens)


@pytest.mark.parametrize("name", ["tekken.json", "tokenizer.model.v3"])
@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((), True),
        (("consolidated.safetensors",), True),
        (("consolidated-00001.safetensors", "model-00001.safetensors"), True),
        (("model-00001-of-00002.safetensors",), False),
    ],
)
def test_the_names_of_the_weights_say_whether_mistral_common_reads_a_folder(
    tmp_path: Path, name: str, weights: tuple[str, ...], expected: bool
) -> None:
    for file in (name, *weights):
        (tmp_path / file).touch()
    assert has_mistral_file(tmp_path) is expected
    assert has_tokenizer(tmp_path) is expected


def test_a_folder_without_its_file_is_none_of_mistrals(tmp_path: Path) -> None:
    (tmp_path / "consolidated.safetensors").touch()
    assert not has_mistral_file(tmp_path)


def test_a_copy_that_does_not_say_whose_weights_the_pods_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(
        TokenizerError, match=r"nothing says so: if they are, copy params\.json, too; or let the pods be asked"
    ):
        ModelTokenizer.load(tmp_path)


def test_without_the_library_the_error_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TokenizerError, match=r"pip install 'kvmesh\[mistral\]'.*`tokens: render`.*--tokenizer-mode hf"):
        ModelTokenizer.load(folder)
    assert str(why_not_readable(folder)).endswith("not tokenizer.json: pip install 'kvmesh[mistral]'")


@pytest.mark.parametrize("content", ["", "{", "{}", '{"vocab": [], "config": {"version": "v99"}}'])
def test_a_damaged_file_is_an_error_that_names_the_folder(tmp_path: Path, content: str) -> None:
    (tmp_path / "tekken.json").write_text(content)
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(TokenizerError, match=f"mistral-common cannot load {tmp_path}: .*copy the folder"):
        load_mistral(tmp_path)


def test_the_library_tokenizes_texts_and_renders_chats(tokenizer: ModelTokenizer) -> None:
    assert tokenizer.engine == "mistral-common"
    assert text_of(tokenizer, {"role": "system", "content": "s"}, USER) == (
        "<s>[SYSTEM_PROMPT]▁s[/SYSTEM_PROMPT][INST]▁hi[/INST]"
    )
    (plain,) = tokenizer.token_buffers(request(TextPrompt(text="[INST] hi"), ApiKind.COMPLETIONS))
    assert array("I", plain)[:2].tolist() == [1, 1501]  # a special token in a text is text


def test_calls_have_the_end_of_their_ids_and_parsed_arguments(tokenizer: ModelTokenizer) -> None:
    result = {"role": "tool", "tool_call_id": CALL["id"], "content": "21"}
    text = text_of(tokenizer, USER, {"role": "assistant", "tool_calls": [CALL]}, result)
    assert text.count("123456789") == 2
    assert "call_0" not in text
    assert '{"a":▁"é"}' in text


def test_each_text_of_a_conversation_is_tokenized_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer

    tokenized: list[str] = []
    tokenize = SentencePieceTokenizer.encode

    def counting(self: Any, s: str, bos: bool, eos: bool) -> list[int]:
        tokenized.append(s)
        return list(tokenize(self, s, bos=bos, eos=eos))

    monkeypatch.setattr(SentencePieceTokenizer, "encode", counting)
    loaded = ModelTokenizer.load(folder)
    answer, again = {"role": "assistant", "content": "one"}, {"role": "user", "content": "two"}
    first = text_of(loaded, USER)
    before = len(tokenized)
    assert text_of(loaded, USER, answer, again).startswith(first)
    assert tokenized[before:] == ["one", "two"]


def test_media_never_reach_the_library_which_would_fetch_them(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = tokenizer._chats
    monkeypatch.setattr(chats, "_mistral", None)
    for part in ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}, {"type": "image"}, "text", {}):
        with pytest.raises(ChatTemplateError, match="content parts must be text"):
            text_of(tokenizer, {"role": "user", "content": [part]})


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ((), {}),
        (({"role": SECRET, "content": SECRET},), {}),
        (({"role": "user", "content": {SECRET: 1}},), {}),
        ((SECRET,), {}),
        ((USER, {"role": "assistant", "content": SECRET}), {}),
        ((USER,), {"continue_final_message": True, "add_generation_prompt": False}),
        ((USER,), {"continue_final_message": True}),
        ((USER,), {"chat_template_kwargs": {"truncation": True, "max_length": 1}}),
        ((USER, {"role": "assistant", "tool_calls": [{"id": 1}]}, USER), {}),
    ],
)
def test_what_is_refused_says_why_without_the_clients_words(
    tokenizer: ModelTokenizer, messages: tuple[Any, ...], fields: dict[str, Any]
) -> None:
    with pytest.raises(ChatTemplateError) as raised:
        text_of(tokenizer, *messages, **fields)
    assert SECRET not in str(raised.value)
    assert str(raised.value)


def test_an_answer_is_continued_where_that_is_asked_for(tokenizer: ModelTokenizer) -> None:
    answer = {"role": "assistant", "content": "It is"}
    text = text_of(tokenizer, USER, answer, continue_final_message=True, add_generation_prompt=False)
    assert text.endswith("[/INST]▁It▁is")


@pytest.mark.parametrize("api", [ApiKind.RESPONSES, ApiKind.EMBEDDINGS])
def test_chats_of_other_apis_are_left_to_the_pods(tokenizer: ModelTokenizer, api: ApiKind) -> None:
    with pytest.raises(ChatTemplateError, match=f"vLLM renders {api.value} of this model in code of its own"):
        tokenizer.token_buffers(request(ChatPrompt(messages=(USER,)), api))


def test_of_anthropics_messages_later_system_texts_come_first(tokenizer: ModelTokenizer) -> None:
    system = {"role": "system", "content": "s"}
    prompt = ChatPrompt(messages=(USER, system, USER), messages_system_first=(system, USER, USER))
    (tokens,) = tokenizer.token_buffers(request(prompt, ApiKind.MESSAGES))
    assert tokenizer.text(tokens).startswith("<s>[SYSTEM_PROMPT]▁s[/SYSTEM_PROMPT][INST]▁hi")


def test_pairs_are_left_to_the_pods(folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder, tmp_path / "ranker")
    (model / "config.json").write_text('{"architectures": ["MistralForSequenceClassification"], "use_sep_token": true}')
    with pytest.raises(TokenizerError, match="form of a pair"):
        ModelTokenizer.load(model).token_buffers(request(PairPrompt(query="q", document="d"), ApiKind.SCORE))


def test_texts_are_cut_at_their_end_but_where_a_side_is_named(tokenizer: ModelTokenizer) -> None:
    text = TextPrompt(text="one two three four")
    (whole,) = tokenizer.token_buffers(request(text, ApiKind.COMPLETIONS))
    by_tokenizer = Truncation(tokens=3)
    left = Truncation(tokens=3, side=TruncationSide.LEFT, keeps_special_tokens=False)
    cut = [
        tokenizer.token_buffers(request(text, ApiKind.COMPLETIONS, truncation=each))[0] for each in (by_tokenizer, left)
    ]
    assert cut == [whole[:12], whole[-12:]]
