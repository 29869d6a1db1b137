"""A real server's --chat-template and --default-chat-template-kwargs are applied as it applies them.

And requests whose prompt only a pod can make: with a template of their own, a suffix, or vectors.
"""

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.models.models import ServedModel, TokensFrom
from extproc.prompts.pod_render import PodRender, RenderSettings
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
    flags = [
        *("--chat-template", str(template), "--default-chat-template-kwargs", json.dumps(DEFAULTS)),
        "--trust-request-chat-template",
    ]
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


async def test_a_template_of_the_request_s_own_is_rendered_by_a_pod_that_trusts_it(
    pod: VllmPod, source: tuple[PromptTokenSource, ServedModel]
) -> None:
    _, model = source
    render = PodRender(endpoints=lambda _: [pod.address], settings=RenderSettings(timeout_seconds=10.0))
    tokens = PromptTokenSource([model], render=render)
    body = {"model": pod.model, "messages": MESSAGES, "chat_template": "mine: {{ messages[0].content }}"}
    raw = json.dumps(body).encode()
    found = await tokens.prompts(parse_request(path="/v1/chat/completions", body=raw), raw, model=model, limit=1)
    status, rendered = pod.post("/v1/chat/completions/render", body)
    assert (found.degraded, status) == (None, 200)
    assert [list(array("I", prompt.tokens)) for prompt in found.prompts] == [rendered["token_ids"]]
    assert (
        rendered["token_ids"] != pod.post("/v1/chat/completions/render", body | {"chat_template": None})[1]["token_ids"]
    )
    tokens.close()
    render.close()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"prompt": "def f(", "suffix": "return x"}, "suffix is only supported for models with FIM"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ],
)
def test_the_server_refuses_what_we_do_not_read(pod: VllmPod, fields: dict[str, Any], why: str) -> None:
    status, answer = pod.post("/v1/completions", {"model": pod.model, **fields})
    assert (status, why in json.dumps(answer)) == (400, True), answer
