"""Our token ids are the ids that a real vLLM server makes of the same request."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from extproc.errors import PromptTokensError
from extproc.prompts.pod_tokenize import tokenize_body
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.openai import parse_request
from tests.vllm.servers import VllmPod

CHATS = json.loads((Path(__file__).parents[1] / "data" / "awkward_chats.json").read_text())
CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"

TEXTS = [
    "",
    "Hello",
    "  leading and trailing  ",
    "<|im_start|>user\nspecial<|im_end|>",
    "👩‍👩‍👧‍👦 naïve e\u0301 字 עברית \u200b",
    "def f(x):\n\treturn {'a': [x, 0x1F]}\r\n\n\n",
    "\u0000\u0001\u2028",
    "word " * 3000,
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> ModelTokenizer:
    return ModelTokenizer.load(tiny_model)


@pytest.fixture
def pod(vllm_pods: tuple[VllmPod, ...]) -> VllmPod:
    return vllm_pods[0]


def our_ids(tokenizer: ModelTokenizer, path: str, body: dict[str, Any]) -> list[list[int]] | None:
    """Return one list per prompt, None where we cannot know the tokens."""
    request = parse_request(path=path, body=json.dumps(body).encode())
    try:
        return [list(array("I", buffer)) for buffer in tokenizer.token_buffers(request)]
    except PromptTokensError:
        return None


def tokenize(pod: VllmPod, body: dict[str, Any]) -> list[int] | None:
    status, answer = pod.post("/tokenize", body)
    return list(answer["tokens"]) if status == 200 else None


def rendered(pod: VllmPod, path: str, body: dict[str, Any]) -> list[list[int]] | None:
    status, answer = pod.post(path + "/render", body)
    if status != 200:
        return None
    return [prompt["token_ids"] for prompt in (answer if isinstance(answer, list) else [answer])]


@pytest.mark.parametrize("case", CHATS, ids=lambda case: case["name"])
def test_awkward_chats_have_vllms_token_ids(pod: VllmPod, tokenizer: ModelTokenizer, case: dict[str, Any]) -> None:
    body = {"model": pod.model, **case["request"]}
    ours = our_ids(tokenizer, CHAT_PATH, body)
    if case["via"] == "render":
        theirs = rendered(pod, CHAT_PATH, body)
    else:
        ids = tokenize(pod, body)
        theirs = None if ids is None else [ids]
    assert ours == theirs
    assert (theirs is None) == case["name"].startswith("refused:")


@pytest.mark.parametrize("case", [c for c in CHATS if "tools" not in c["request"]], ids=lambda case: case["name"])
def test_the_request_itself_gives_the_same_ids_as_rendering_it(
    pod: VllmPod, tokenizer: ModelTokenizer, case: dict[str, Any]
) -> None:
    body = {"model": pod.model, **case["request"], "max_completion_tokens": 1}
    theirs = rendered(pod, CHAT_PATH, body)
    ours = our_ids(tokenizer, CHAT_PATH, body)
    # a render also refuses what exceeds the server's context, which is not the tokenizer's business
    assert ours == theirs or (theirs is None and case["name"] == "very long message")


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:20]))
@pytest.mark.parametrize("special", [True, False])
def test_completion_texts_have_vllms_token_ids(
    pod: VllmPod, tokenizer: ModelTokenizer, text: str, special: bool
) -> None:
    body = {"model": pod.model, "prompt": text, "add_special_tokens": special}
    ids = tokenize(pod, body)
    assert our_ids(tokenizer, COMPLETIONS_PATH, body) == [ids]


@pytest.mark.parametrize(
    "prompt",
    ["one text", ["two", "texts"], [5, 6, 7], [[5, 6, 7], [4095]], [True, 2], ["", "x"]],
    ids=json.dumps,
)
def test_every_form_of_a_completion_prompt_has_vllms_token_ids(
    pod: VllmPod, tokenizer: ModelTokenizer, prompt: Any
) -> None:
    body = {"model": pod.model, "prompt": prompt, "max_tokens": 1}
    assert our_ids(tokenizer, COMPLETIONS_PATH, body) == rendered(pod, COMPLETIONS_PATH, body)


def test_the_engine_counts_as_many_prompt_tokens_as_we_do(pod: VllmPod, tokenizer: ModelTokenizer) -> None:
    body = {
        "model": pod.model,
        "messages": [{"role": "system", "content": "Count."}, {"role": "user", "content": "👍🏽 naïve\n\n字"}],
        "max_tokens": 1,
    }
    status, answer = pod.post(CHAT_PATH, body)
    assert status == 200, answer
    ours = our_ids(tokenizer, CHAT_PATH, body)
    assert ours is not None
    assert answer["usage"]["prompt_tokens"] == len(ours[0])


def test_tokenize_says_what_a_render_says_wherever_it_is_asked(pod: VllmPod) -> None:
    bodies = [(CHAT_PATH, case["request"]) for case in CHATS] + [(COMPLETIONS_PATH, {"prompt": text}) for text in TEXTS]
    asked, different = 0, []
    for path, request in bodies:
        raw = json.dumps({"model": pod.model, "max_tokens": 1, **request}).encode()
        question = tokenize_body(parse_request(path=path, body=raw), raw)
        theirs = rendered(pod, path, json.loads(raw))
        if question is None or theirs is None:  # what the pod refuses to render, it refuses to serve
            continue
        asked += 1
        if [tokenize(pod, json.loads(question))] != theirs:
            different.append(request)
    assert different == []
    assert asked > 40


def test_each_pod_tells_the_ports_its_events_were_bound_to(vllm_pods: tuple[VllmPod, ...]) -> None:
    sources = [pod.get("/kv_event_sources")["0"] for pod in vllm_pods]
    endpoints = [source[name] for source in sources for name in ("endpoint", "replay_endpoint")]
    assert len(set(endpoints)) == 2 * len(vllm_pods)
    assert all(endpoint.startswith("tcp://127.0.0.1:") and not endpoint.endswith(":0") for endpoint in endpoints)
