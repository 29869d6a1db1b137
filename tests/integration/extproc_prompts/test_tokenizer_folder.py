"""Loading a model's folder: what counts, what does not, and what is said about a folder that is unusable."""

import json
import shutil
from array import array
from pathlib import Path
from typing import Any

import pytest

from extproc.errors import ChatTemplateError, TokenizerError
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.openai import parse_request
from extproc.requests.request import ChatPrompt

TINY_MODEL = Path(__file__).parents[3] / "podsim" / "tiny_model"
HELLO = ChatPrompt(messages=({"role": "user", "content": "Hello"},))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny model's tokenizer that a test may damage."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_MODEL / name, tmp_path / name)
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def complete(tokenizer: ModelTokenizer, text: str) -> list[int]:
    body = json.dumps({"prompt": text}).encode()
    (buffer,) = tokenizer.token_buffers(parse_request(path="/v1/completions", body=body))
    return list(array("I", buffer))


def test_truncation_and_padding_in_tokenizer_json_do_not_count(folder: Path) -> None:
    expected = complete(ModelTokenizer.load(folder), "one two three four five six")
    edit(
        folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 1,
            "pad_type_id": 0,
            "pad_token": "<|eos|>",
        },
    )
    tokenizer = ModelTokenizer.load(folder)
    assert (tokenizer.engine, complete(tokenizer, "one two three four five six")) == ("fastokens", expected)


def test_tokens_that_only_the_configuration_knows_are_added(folder: Path) -> None:
    added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    more = {"content": "<|more|>", "special": True, "normalized": False}
    edit(folder / "tokenizer_config.json", added_tokens_decoder={**added, "4096": more}, unk_token="<|unk|>")
    tokenizer = ModelTokenizer.load(folder)
    vocabulary = 4096
    assert tokenizer.engine == "fastokens"
    assert complete(tokenizer, "<|more|><|unk|>")[1:] == [vocabulary, vocabulary + 1]


def test_a_template_file_wins_over_the_configuration(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template="from the configuration")
    (folder / "chat_template.jinja").write_text("from the file")
    assert ModelTokenizer.load(folder).render(HELLO) == "from the file"
    (folder / "chat_template.jinja").unlink()
    assert ModelTokenizer.load(folder).render(HELLO) == "from the configuration"


def test_chats_with_tools_use_the_tool_template_if_there_is_one(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    edit(folder / "tokenizer_config.json", chat_template=templates)
    tokenizer = ModelTokenizer.load(folder)
    tool = {"type": "function", "function": {"name": "f"}}
    with_tools = ChatPrompt(messages=HELLO.messages, tools=(tool,))
    assert (tokenizer.render(HELLO), tokenizer.render(with_tools)) == ("plain", "tools")
    among_variables = ChatPrompt(messages=HELLO.messages, chat_template_kwargs={"tools": [{"name": "f"}]})
    assert tokenizer.render(among_variables) == "tools"
    of_the_server = ModelTokenizer.load(folder, chat_template_kwargs={"tools": [tool]})
    assert of_the_server.render(HELLO) == "tools"


def test_special_tokens_of_older_folders_come_from_the_map_file(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|eos|>"}}))
    assert ModelTokenizer.load(folder).render(HELLO).startswith("<|eos|>")


def test_without_a_template_completions_still_work_and_chats_say_why_not(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    tokenizer = ModelTokenizer.load(folder)
    assert complete(tokenizer, "Hello")
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja"):
        tokenizer.render(HELLO)


def test_models_whose_chats_vllm_renders_in_code_have_no_template(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["GptOssForCausalLM"]}))
    with pytest.raises(ChatTemplateError, match="GptOssForCausalLM"):
        ModelTokenizer.load(folder).render(HELLO)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "not json"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("config.json", "["),
    ],
)
def test_a_damaged_folder_is_an_error_that_names_the_file(folder: Path, name: str, content: str | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=name):
        ModelTokenizer.load(folder)


def test_a_folder_that_does_not_exist_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="point --tokenizer at the folder"):
        ModelTokenizer.load(tmp_path / "nowhere")


def test_a_template_that_does_not_compile_is_an_error_at_start(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ChatTemplateError):
        ModelTokenizer.load(folder)
