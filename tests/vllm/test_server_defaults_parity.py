"""A real server's --chat-template and --default-chat-template-kwargs are applied as it applies them."""

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.models.models import ServedModel, TokensFrom
from extproc.prompts.prompt_tokens import PromptTokenSource
from extproc.requests.openai import parse_request
from tests.vllm.environment import VllmEnvironment
from tests.vllm.servers import VllmPod, running_pods

TEMPLATE = """\
{%- if style is defined %}style {{ style }} {% endif -%}
{%- if enable_thinking is defined %}thinking {{ enable_thinking }} {% endif -%}
{%- if reasoning_effort is defined %}effort {{ reasoning_effort }} {% endif -%}
{%- if documents %}{{ documents | tojson }}{% endif -%}
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor -%}
{%- if add_generation_prompt %}assistant:{% endif -%}
"""
DEFAULTS = {"style": "brief", "enable_thinking": False, "reasoning_effort": "low", "add_generation_prompt": False}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "mine.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def pod(
    vllm_environment: VllmEnvironment, tiny_model: Path, template: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmPod]:
    flags = ("--chat-template", str(template), "--default-chat-template-kwargs", json.dumps(DEFAULTS))
    logs = tmp_path_factory.mktemp("defaults")
    with running_pods(1, environment=vllm_environment, model_folder=tiny_model, logs=logs, extra_flags=flags) as pods:
        yield pods[0]


@pytest.fixture(scope="module")
def source(pod: VllmPod, template: Path) -> Iterator[tuple[PromptTokenSource, ServedModel]]:
    model = ServedModel(
        name=pod.model,
        tokens_from=TokensFrom.TOKENIZER,
        tokenizer_folder=pod.model_folder,
        chat_template=template,
        chat_template_kwargs=DEFAULTS,
    )
    tokens = PromptTokenSource([model])
    yield tokens, model
    tokens.close()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"chat_template_kwargs": {"style": "long"}},
        {"chat_template_kwargs": {"style": None, "enable_thinking": "auto"}},
        {"chat_template_kwargs": {"enable_thinking": True, "unknown": 1}},
        {"reasoning_effort": "high"},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
        {"documents": [{"title": "t", "text": "x"}]},
        {"tools": [TOOL], "tool_choice": "none"},
    ],
    ids=json.dumps,
)
async def test_a_chat_has_the_token_ids_of_a_server_with_defaults(
    pod: VllmPod, source: tuple[PromptTokenSource, ServedModel], fields: dict[str, Any]
) -> None:
    tokens, model = source
    body = {"model": pod.model, "messages": MESSAGES, **fields}
    raw = json.dumps(body).encode()
    known = await tokens.prompts(parse_request(path="/v1/chat/completions", body=raw), raw, model=model, limit=1)
    status, answer = pod.post("/v1/chat/completions/render", body)
    assert status == 200, answer
    assert [list(array("I", prompt.tokens)) for prompt in known.prompts] == [answer["token_ids"]]
