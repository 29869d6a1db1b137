"""Chats of gpt-oss: what vLLM puts before a conversation, what it drops, and what is left to the pods."""

import json
import logging
import shutil
from array import array
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from extproc.errors import ChatTemplateError
from extproc.prompts.harmony_chats import HarmonyChats
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.openai import parse_request
from extproc.requests.request import ChatPrompt

TINY_MODEL = Path(__file__).parents[3] / "podsim" / "tiny_model"
USER = {"role": "user", "content": "hi"}
SECRET = "rosebud"
TOOL = {"type": "function", "function": {"name": "weather", "description": "Asks.", "parameters": None}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"a":1}'}}
SYSTEM = """<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: 2026-11-25

Reasoning: medium

# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"""


@pytest.fixture(scope="module")
def chats() -> HarmonyChats:
    return HarmonyChats(now=lambda: datetime(2026, 11, 25, 23, 59))


def text_of(chats: HarmonyChats, *messages: Any, **fields: Any) -> str:
    ids = array("I", chats.tokens(ChatPrompt(messages=messages, **fields))).tolist()
    return chats._rendered.text(ids)


def test_a_chat_begins_with_the_days_date_and_ends_where_the_model_goes_on(chats: HarmonyChats) -> None:
    assert text_of(chats, USER) == f"{SYSTEM}<|start|>user<|message|>hi<|end|><|start|>assistant"


def test_a_first_system_message_is_the_developers(chats: HarmonyChats) -> None:
    for role in ("system", "developer"):
        assert text_of(chats, {"role": role, "content": [{"type": "text", "text": "Be brief."}]}, USER) == (
            f"{SYSTEM}<|start|>developer<|message|># Instructions\n\nBe brief.<|end|>"
            "<|start|>user<|message|>hi<|end|><|start|>assistant"
        )


def test_the_effort_is_the_requests_own_field_not_a_template_variable(chats: HarmonyChats) -> None:
    def asked(**body: Any) -> str:
        request = parse_request(path="/v1/chat/completions", body=json.dumps({"messages": [USER], **body}).encode())
        (prompt,) = request.prompts
        assert isinstance(prompt, ChatPrompt)
        return text_of(chats, *prompt.messages, reasoning_effort=prompt.reasoning_effort)

    assert "Reasoning: high\n" in asked(reasoning_effort="high")
    assert "Reasoning: medium\n" in asked(chat_template_kwargs={"reasoning_effort": "high"})
    with pytest.raises(ChatTemplateError, match="no such reasoning_effort"):
        asked(reasoning_effort="none")


def test_tools_and_calls_have_the_recipient_before_the_channel(chats: HarmonyChats) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "21"}
    text = text_of(chats, USER, called, result, tools=(TOOL,))
    assert "## functions\n\nnamespace functions {\n\n// Asks.\ntype weather = () => any;" in text
    assert text.endswith(
        "<|start|>user<|message|>hi<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"a":1}<|call|>'
        "<|start|>functions.weather<|channel|>commentary to=assistant<|message|>21<|end|><|start|>assistant"
    )


def test_reasoning_is_kept_only_behind_the_last_answer(chats: HarmonyChats) -> None:
    answered = {"role": "assistant", "reasoning": "old thoughts", "content": "yes"}
    called = {"role": "assistant", "reasoning_content": "new thoughts", "tool_calls": [CALL]}
    text = text_of(chats, USER, answered, USER, called, {"role": "tool", "tool_call_id": "c1", "content": "21"})
    assert "old thoughts" not in text
    assert "<|start|>assistant<|channel|>analysis<|message|>new thoughts<|end|>" in text


@pytest.mark.parametrize(
    "messages",
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": SECRET}}]},),
        ({"role": "tool", "content": [SECRET]},),
        ({"role": SECRET, "content": "x"},),
        ({"role": "user", "content": {SECRET: 1}},),
        (SECRET,),
    ],
)
def test_what_is_refused_says_why_without_the_clients_words(chats: HarmonyChats, messages: tuple[Any, ...]) -> None:
    with pytest.raises(ChatTemplateError) as raised:
        text_of(chats, *messages)
    assert SECRET not in str(raised.value)


# --- folders ------------------------------------------------------------------------------------------------------


def folder(path: Path, **config: Any) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_MODEL / name, path / name)
    (path / "config.json").write_text(json.dumps(config))
    return path


def tokens(tokenizer: ModelTokenizer, path: str, **body: Any) -> list[int]:
    (found,) = tokenizer.token_buffers(parse_request(path=path, body=json.dumps(body).encode()))
    return array("I", found).tolist()


def test_a_folder_of_gpt_oss_has_harmony_chats_and_its_own_texts(tmp_path: Path, chats: HarmonyChats) -> None:
    tokenizer = ModelTokenizer.load(folder(tmp_path, model_type="gpt_oss"))
    made = tokens(tokenizer, "/v1/chat/completions", messages=[USER])
    assert chats._rendered.text(made).endswith("<|start|>user<|message|>hi<|end|><|start|>assistant")
    assert tokens(tokenizer, "/v1/completions", prompt="hi") == tokens(
        ModelTokenizer.load(TINY_MODEL), "/v1/completions", prompt="hi"
    )


def test_anthropics_messages_have_a_low_effort_where_thinking_is_off(tmp_path: Path, chats: HarmonyChats) -> None:
    tokenizer = ModelTokenizer.load(folder(tmp_path, model_type="gpt_oss"))
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
    messages = [
        USER,
        called,
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]},
    ]
    made = tokens(tokenizer, "/v1/messages", max_tokens=9, messages=messages, thinking={"type": "disabled"})
    text = chats._rendered.text(made)
    assert "Reasoning: low\n" in text
    assert "to=functions.f<|channel|>commentary json<|message|>{}<|call|>" in text


def test_without_the_library_texts_are_known_and_the_log_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = folder(tmp_path, model_type="gpt_oss", tokenizer_class="PreTrainedTokenizerFast")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        tokenizer = ModelTokenizer.load(made)
    assert "pip install 'kvmesh[harmony]'" in caplog.text
    assert "the pods are asked for the tokens of chats" in caplog.text
    assert tokens(tokenizer, "/v1/completions", prompt="hi")
    with pytest.raises(ChatTemplateError, match=r"kvmesh\[harmony\]"):
        tokens(tokenizer, "/v1/chat/completions", messages=[USER])


def test_chats_that_only_vllm_renders_are_named_when_the_folder_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = ModelTokenizer.load(folder(tmp_path, architectures=["Other", "DeepseekV32ForCausalLM"]))
    assert "only vLLM's own code renders chats for DeepseekV32ForCausalLM: the pods are asked" in caplog.text
    assert tokens(tokenizer, "/v1/completions", prompt="hi")
    with pytest.raises(ChatTemplateError, match="DeepseekV32ForCausalLM"):
        tokens(tokenizer, "/v1/chat/completions", messages=[USER])
