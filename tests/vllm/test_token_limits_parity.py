"""Truncated prompts have the token ids that a real vLLM server cuts, and its render endpoint answers what we read."""

import json
import urllib.parse
from array import array
from typing import Any

import pytest

from extproc.models.models import ServedModel, TokensFrom
from extproc.prompts.pod_render import PodRender, RenderSettings, RenderUnavailableError
from extproc.prompts.prompt_tokens import PromptTokenSource
from extproc.requests.openai import parse_request
from tests.vllm.servers import MAX_MODEL_LEN, VllmPod

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
RESPONSES_PATH, MESSAGES_PATH = "/v1/responses", "/v1/messages"
TEXT = "def truncate(prompt):\n    return prompt[-limit:]  # naïve 字\n"
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.fixture
def pod(vllm_pods: tuple[VllmPod, ...]) -> VllmPod:
    return vllm_pods[0]


def served(pod: VllmPod, tokens_from: TokensFrom) -> ServedModel:
    return ServedModel(
        name=pod.model, tokens_from=tokens_from, tokenizer_folder=pod.model_folder, max_model_len=MAX_MODEL_LEN
    )


def rendered(pod: VllmPod, path: str, body: dict[str, Any]) -> list[list[int]]:
    status, answer = pod.post(path + "/render", body)
    assert status == 200, answer
    return [prompt["token_ids"] for prompt in (answer if isinstance(answer, list) else [answer])]


async def ours(pod: VllmPod, path: str, body: dict[str, Any]) -> list[list[int]]:
    model = served(pod, TokensFrom.TOKENIZER)
    source = PromptTokenSource([model])
    raw = json.dumps(body).encode()
    known = await source.prompts(parse_request(path=path, body=raw), raw, model=model, limit=16)
    source.close()
    assert known.degraded is None, known
    return [list(array("I", prompt.tokens)) for prompt in known.prompts]


@pytest.mark.parametrize(
    "fields",
    [
        {"truncate_prompt_tokens": 7},
        {"truncate_prompt_tokens": 7, "truncation_side": "left"},
        {"truncate_prompt_tokens": 7, "truncation_side": "right"},
        {"truncate_prompt_tokens": 7, "add_special_tokens": False},
        {"truncate_prompt_tokens": 7, "add_special_tokens": True},
        {"truncate_prompt_tokens": 4000},
        {"truncate_prompt_tokens": -1},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        (CHAT_PATH, {"messages": MESSAGES}),
        (COMPLETIONS_PATH, {"prompt": TEXT}),
        (COMPLETIONS_PATH, {"prompt": [TEXT, "short"]}),
        (COMPLETIONS_PATH, {"prompt": list(range(5, 30))}),
    ],
    ids=["chat", "text", "texts", "token ids"],
)
async def test_a_truncated_prompt_has_vllms_token_ids(
    pod: VllmPod, path: str, prompt: dict[str, Any], fields: dict[str, Any]
) -> None:
    body = {"model": pod.model, "max_tokens": 5, **prompt, **fields}
    assert await ours(pod, path, body) == rendered(pod, path, body)


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 5}, {"max_tokens": None}], ids=json.dumps)
@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
@pytest.mark.parametrize("side", [{}, {"truncation_side": "left"}, {"truncation_side": "right"}], ids=json.dumps)
async def test_minus_one_cuts_a_long_prompt_to_vllms_context(
    pod: VllmPod, path: str, limit: dict[str, Any], side: dict[str, Any]
) -> None:
    text = "".join(f"line {number} of the file\n" for number in range(1500))
    prompt = {"messages": [{"role": "user", "content": text}]} if path == CHAT_PATH else {"prompt": text}
    body = {"model": pod.model, "truncate_prompt_tokens": -1, **prompt, **limit, **side}
    status, answer = pod.post(path + "/render", body)
    known = await ours(pod, path, body)
    if status != 200:  # with the whole context for the prompt there is none left for output
        assert len(known[0]) == MAX_MODEL_LEN, answer
        return
    assert known == [prompt["token_ids"] for prompt in (answer if isinstance(answer, list) else [answer])]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        (CHAT_PATH, {"messages": MESSAGES}),
        (COMPLETIONS_PATH, {"prompt": [TEXT, [5, 6]][:1]}),
        (COMPLETIONS_PATH, {"prompt": [[5, 6, 7], [8]]}),
        (RESPONSES_PATH, {"input": TEXT}),
        (MESSAGES_PATH, {"messages": MESSAGES, "max_tokens": 5}),
    ],
    ids=["chat", "texts", "token ids", "responses", "messages"],
)
async def test_a_real_pods_render_endpoint_is_read(pod: VllmPod, path: str, prompt: dict[str, Any]) -> None:
    body = {"model": pod.model, **prompt}
    raw = json.dumps(body).encode()
    address = urllib.parse.urlsplit(pod.url).netloc
    render = PodRender(endpoints=lambda model: [address], settings=RenderSettings(timeout_seconds=10.0))
    try:
        prompts = await render.prompts(
            parse_request(path=path, body=raw), raw, model=served(pod, TokensFrom.RENDER), limit=16
        )
        assert [list(array("I", each.tokens)) for each in prompts] == rendered(pod, path, body)
        wrong = json.dumps(body | {"model": "nobody"}).encode()
        with pytest.raises(RenderUnavailableError, match="'nobody' is not on the pods"):
            await render.prompts(
                parse_request(path=path, body=wrong), wrong, model=served(pod, TokensFrom.RENDER), limit=16
            )
    finally:
        render.close()
