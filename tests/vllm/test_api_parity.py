"""For every API form our token ids are those that a real vLLM server makes of the same body.

Each body goes to the API's own render endpoint (`--enable-scale-out`) and through `parse_request` and the tokenizer.
Where many chat templates matter, vLLM's code is asked without a server (`api_oracle`).
"""

import json
import subprocess
import urllib.error
import urllib.request
from array import array
from pathlib import Path
from typing import Any

import pytest

from extproc.errors import MalformedRequestError, PromptTokensError
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.openai import parse_request
from extproc.requests.request import ChatPrompt, InferenceRequest
from tests.vllm.environment import VllmEnvironment, offline
from tests.vllm.random_bodies import random_bodies
from tests.vllm.servers import MAX_MODEL_LEN, VllmPod

HERE = Path(__file__).parent
TEMPLATES = sorted(path for path in (HERE / "templates").glob("*.jinja") if path.stem != "sandbox_style")  # refuses all
RANDOM = random_bodies(150, seed=20261121)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HI = {"role": "user", "content": "Hi"}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "at": {"const": 12345678901234567890123}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Asks", "parameters": WEATHER}}
FUNCTION = {"type": "function", "name": "weather", "description": "Asks", "parameters": WEATHER, "strict": True}
ANTHROPIC_TOOL = {"name": "weather", "description": "Asks", "input_schema": {"properties": WEATHER["properties"]}}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Ulm"}'}
LONG = "one two three four five six seven eight nine ten " * 4

CHATS: dict[str, dict[str, Any]] = {
    "cut on the default side": {"messages": [{"role": "user", "content": LONG}], "truncate_prompt_tokens": 20},
    "cut on the left": {
        "messages": [{"role": "user", "content": LONG}],
        "truncate_prompt_tokens": 20,
        "truncation_side": "left",
    },
    "cut on the right": {
        "messages": [{"role": "user", "content": LONG}],
        "truncate_prompt_tokens": 20,
        "truncation_side": "right",
    },
    "cut to the context": {
        "messages": [{"role": "user", "content": LONG * 100}],
        "truncate_prompt_tokens": -1,
        "max_tokens": 5,
    },
    "cut with special tokens": {
        "messages": [{"role": "user", "content": LONG}],
        "truncate_prompt_tokens": 20,
        "add_special_tokens": True,
    },
    "tools that are not to be used": {"messages": [HI], "tools": [TOOL], "tool_choice": "none"},
    "an effort": {"messages": [HI], "reasoning_effort": "low"},
    "continue": {
        "messages": [HI, {"role": "assistant", "content": "Well"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}
COMPLETION_BODIES: dict[str, dict[str, Any]] = {
    "text": {"prompt": "one"},
    "texts": {"prompt": ["one", "two words"]},
    "ids": {"prompt": [5, 6, 7]},
    "lists of ids": {"prompt": [[5, 6], [7, 8, 9]]},
    "no special tokens": {"prompt": "one", "add_special_tokens": False},
    "cut": {"prompt": LONG, "truncate_prompt_tokens": 7},
    "cut on the right": {"prompt": LONG, "truncate_prompt_tokens": 7, "truncation_side": "right"},
    "cut on the left": {"prompt": LONG, "truncate_prompt_tokens": 7, "truncation_side": "left"},
    "null as the limit": {"prompt": LONG * 100, "truncate_prompt_tokens": -1, "max_tokens": None},
    "ids cut": {"prompt": list(range(5, 50)), "truncate_prompt_tokens": 7},
    "cut to the context": {"prompt": LONG * 100, "truncate_prompt_tokens": -1},
}
ITEMS: dict[str, Any] = {
    "a text": "Hi",
    "messages": [{"role": "developer", "content": "Dev"}, HI],
    "parts": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
    "what the model said": [
        HI,
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes"}, {"type": "output_text", "text": "no"}],
        },
        HI,
    ],
    "plain assistant": [HI, {"role": "assistant", "content": "Yes", "extra": 1}, HI],
    "calls": [
        HI,
        CALL,
        {**CALL, "call_id": "c2", "namespace": "ns"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
    ],
    "a call and a text": [HI, CALL, {"role": "assistant", "content": "and"}, {"role": "assistant", "content": "more"}],
    "reasoning": [
        HI,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "Yes"},
        HI,
    ],
    "a summary": [HI, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}, CALL],
    "custom calls": [
        HI,
        {"type": "custom_tool_call", "call_id": "c", "name": "shell", "input": "ls é\n"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "a b"},
    ],
    "to be continued": [HI, {"role": "assistant", "content": "Well", "status": "in_progress"}],
}
RESPONSE_BODIES: dict[str, dict[str, Any]] = {
    **{name: {"input": items} for name, items in ITEMS.items()},
    "instructions": {"input": [HI], "instructions": "Be brief."},
    "functions": {"input": "Hi", "tools": [FUNCTION, {"type": "function", "name": "f", "parameters": None}]},
    "custom tools": {"input": "Hi", "tools": [{"type": "custom", "name": "shell", "description": "Runs"}]},
    "namespaces": {
        "input": "Hi",
        "tools": [{"type": "namespace", "name": "ns", "description": "x", "tools": [FUNCTION]}],
    },
    "other tools": {"input": "Hi", "tools": [{"type": "web_search_preview"}]},
    "an effort": {"input": "Hi", "reasoning": {"effort": "low"}},
    "cut": {"input": LONG * 100, "truncation": "auto", "max_output_tokens": 7},
    "cut with null": {"input": LONG * 100, "truncation": None, "max_output_tokens": 7},
    "a long one": {"input": LONG, "truncation": "auto"},
}
BLOCKS: dict[str, Any] = {
    "text": [HI],
    "blocks": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    "cache control": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "e"}}]}],
    "thinking": [
        HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Yes"},
            ],
        },
        HI,
    ],
    "tools": [
        HI,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Look"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm", "n": 1.5, "z": None}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "before"},
                {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "sun"}, {"type": "text", "text": "wind"}],
                },
                {"type": "text", "text": "after"},
            ],
        },
    ],
    "nothing said": [HI, {"role": "assistant", "content": []}, {"role": "user", "content": []}, HI],
    "a result by the assistant": [HI, {"role": "assistant", "content": [{"type": "tool_result", "content": "odd"}]}],
    "later system messages": [HI, {"role": "system", "content": "Remember."}, HI],
    "later system blocks": [
        HI,
        {
            "role": "system",
            "content": [
                {"type": "text", "text": "x-anthropic-billing-header: 1"},
                {"type": "text", "text": "Re"},
                {"type": "text", "text": "member."},
            ],
        },
        {"role": "system", "content": "x-anthropic-billing-header: 2"},
        HI,
    ],
}
UNUSED = {"tool_choice": {"type": "none"}}  # the pods have no tool parser; the tools are rendered all the same
MESSAGE_BODIES: dict[str, dict[str, Any]] = {
    **{name: {"messages": messages} for name, messages in BLOCKS.items()},
    "system": {"messages": [HI], "system": "Be brief."},
    "system blocks": {
        "messages": [HI],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
            {"type": "text", "text": "Be "},
            {"type": "text", "text": "brief."},
        ],
    },
    "both systems": {"messages": BLOCKS["later system messages"], "system": "Be brief. "},
    "declared tools": {
        "messages": [HI],
        **UNUSED,
        "tools": [ANTHROPIC_TOOL, {"name": "f", "input_schema": {"type": "object"}}],
    },
    "changed tools": {
        **UNUSED,
        "messages": [
            HI,
            {
                "role": "system",
                "content": [
                    {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "weather"}},
                    {
                        "type": "tool_addition",
                        "tool": {"type": "tool_definition", "definition": {"name": "g", "input_schema": {}}},
                    },
                    {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "late"}},
                ],
            },
        ],
        "tools": [ANTHROPIC_TOOL, {"name": "late", "input_schema": {"type": "object"}, "defer_loading": True}],
    },
    "no tools in the end": {"messages": [HI], **UNUSED, "tools": []},
    "an effort": {"messages": [HI], "output_config": {"effort": "high"}},
    "thinking off": {"messages": [HI], "thinking": {"type": "disabled"}},
}
CASES = [
    *((CHAT, name, body) for name, body in CHATS.items()),
    *((COMPLETIONS, name, body) for name, body in COMPLETION_BODIES.items()),
    *((RESPONSES, name, body) for name, body in RESPONSE_BODIES.items()),
    *((MESSAGES, name, body | {"max_tokens": 9}) for name, body in MESSAGE_BODIES.items()),
]
REFUSED: dict[tuple[str, str], dict[str, Any]] = {  # by vLLM: we leave them to the pod, or our tokens go nowhere
    (RESPONSES, "refusal"): {
        "input": [HI, {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]
    },
    (RESPONSES, "encrypted"): {"input": [HI, {"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
    (RESPONSES, "reference"): {"input": [HI, {"type": "item_reference", "id": "x"}]},
    (RESPONSES, "kept"): {"input": "Hi", "previous_response_id": "resp_1"},
    (RESPONSES, "template"): {"input": "Hi", "prompt": {"id": "p"}},
    (MESSAGES, "unknown block"): {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "odd"}]}]},
    (MESSAGES, "unknown role"): {"max_tokens": 9, "messages": [{"role": "tool", "content": "x"}]},
    (COMPLETIONS, "nothing"): {"prompt": []},
    (CHAT, "own template"): {"messages": [HI], "chat_template": "{{ messages }}"},
}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> ModelTokenizer:
    return ModelTokenizer.load(tiny_model)


@pytest.fixture
def pod(vllm_pods: tuple[VllmPod, ...]) -> VllmPod:
    return vllm_pods[0]


def our_ids(tokenizer: ModelTokenizer, request: InferenceRequest) -> list[list[int]]:
    return [list(array("I", buffer)) for buffer in tokenizer.token_buffers(request, max_model_len=MAX_MODEL_LEN)]


def rendered(pod: VllmPod, path: str, body: bytes, *, content_type: str | None = "application/json") -> Any:
    """POST raw bytes to the render endpoint; return one list of ids per prompt, or the status where it refuses."""
    request = urllib.request.Request(pod.url + path + "/render", data=body)
    if content_type is not None:
        request.add_header("content-type", content_type)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            document = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    return [prompt["token_ids"] for prompt in (document if isinstance(document, list) else [document])]


@pytest.mark.parametrize(("path", "name", "body"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_each_form_of_each_api_has_vllms_token_ids(
    pod: VllmPod, tokenizer: ModelTokenizer, path: str, name: str, body: dict[str, Any]
) -> None:
    raw = json.dumps({"model": pod.model, **body}).encode()
    theirs = rendered(pod, path, raw)
    assert our_ids(tokenizer, parse_request(path=path, body=raw)) == theirs


@pytest.mark.parametrize(("path", "name"), REFUSED, ids=lambda value: value)
def test_what_vllm_refuses_has_no_tokens_here(pod: VllmPod, path: str, name: str) -> None:
    raw = json.dumps({"model": pod.model, **REFUSED[path, name]}).encode()
    status = rendered(pod, path, raw)
    request = parse_request(path=path, body=raw)
    assert isinstance(status, int)
    assert status >= 400
    assert (request.model, request.prompts) == (pod.model, ())
    assert request.unsupported_reason


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "nobody", "messages": [{"role": "user", "content": "Hi"}], "model": "tiny"}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "temperature": 1, "x": NaN}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "x": -Infinity}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "x": [1e999]}',
        b'\xef\xbb\xbf{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "x": "\\ud83d"}',
        '{"model": "tiny", "messages": [{"role": "user", "content": "Grüße"}]}'.encode("utf-16"),
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\u0047r\\u00fc\\u00dfe \\ud83d\\ude00"}]}',
    ],
    ids=["duplicate key", "NaN", "Infinity", "beyond a float", "BOM", "lone surrogate", "UTF-16", "escapes"],
)
def test_json_that_vllms_parser_takes_has_vllms_token_ids(pod: VllmPod, tokenizer: ModelTokenizer, body: bytes) -> None:
    theirs = rendered(pod, CHAT, body)
    assert isinstance(theirs, list)
    assert our_ids(tokenizer, parse_request(path=CHAT, body=body)) == theirs


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model": "tiny", "messages": [],}',
        b'{"model": "tiny", "messages": ' + b"[" * 100_000,
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff"}]}',
        b'[{"model": "tiny"}]',
    ],
    ids=["nothing", "half", "comma", "deep", "not UTF-8", "list"],
)
def test_what_we_answer_400_vllm_does_not_serve_either(pod: VllmPod, body: bytes) -> None:
    status = rendered(pod, CHAT, body)
    assert isinstance(status, int)
    assert status >= 400
    with pytest.raises(MalformedRequestError):
        parse_request(path=CHAT, body=body)


@pytest.mark.parametrize("content_type", ["text/plain", "application/json ; charset=utf-8", "multipart/form-data"])
def test_vllm_refuses_the_content_types_that_we_do_not_read(pod: VllmPod, content_type: str) -> None:
    body = json.dumps({"model": pod.model, "messages": [HI]}).encode()
    assert isinstance(rendered(pod, CHAT, body, content_type=content_type), int)
    request = parse_request(path=CHAT, body=body, content_type=content_type)
    assert (request.model, request.prompts) == (pod.model, ())
    assert request.unsupported_reason


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON", "application/json; charset=utf-8"])
def test_the_content_types_that_vllm_takes_are_read(pod: VllmPod, tokenizer: ModelTokenizer, content_type: str) -> None:
    body = json.dumps({"model": pod.model, "messages": [HI]}).encode()
    theirs = rendered(pod, CHAT, body, content_type=content_type)
    assert our_ids(tokenizer, parse_request(path=CHAT, body=body, content_type=content_type)) == theirs


def test_the_engine_counts_as_many_prompt_tokens_as_we_do_in_each_api(pod: VllmPod, tokenizer: ModelTokenizer) -> None:
    bodies: dict[str, dict[str, Any]] = {
        RESPONSES: {"input": ITEMS["reasoning"], "max_output_tokens": 1},
        MESSAGES: {"messages": BLOCKS["tools"], "tools": [ANTHROPIC_TOOL], **UNUSED, "max_tokens": 1},
    }
    ours, theirs = {}, {}
    for path, body in bodies.items():
        whole = {"model": pod.model, **body}
        status, answer = pod.post(path, whole)
        assert status == 200, answer
        usage = answer["usage"]
        cached = ("cache_read_input_tokens", "cache_creation_input_tokens")  # Anthropic counts these apart
        theirs[path] = usage["input_tokens"] + sum(usage.get(name) or 0 for name in cached)
        (ids,) = our_ids(tokenizer, parse_request(path=path, body=json.dumps(whole).encode()))
        ours[path] = len(ids)
    assert ours == theirs


def test_random_bodies_that_vllm_takes_have_vllms_token_ids(pod: VllmPod, tokenizer: ModelTokenizer) -> None:
    compared, different = 0, []
    for path, body in RANDOM:
        raw = json.dumps({"model": pod.model, **body}).encode()
        theirs = rendered(pod, path, raw)
        if isinstance(theirs, list):
            compared += 1
            request = parse_request(path=path, body=raw)
            if not request.prompts or our_ids(tokenizer, request) != theirs:
                different.append((path, body))
    assert different == []
    assert compared > 150


@pytest.fixture(scope="module")
def vllm_texts(vllm_environment: VllmEnvironment, tiny_model: Path) -> dict[str, list[str | None]]:
    """What vLLM makes of every random body with every template; see `api_oracle`."""
    question = {
        "tokenizer": str(tiny_model),
        "templates": {path.stem: path.read_text() for path in TEMPLATES},
        "requests": [[path, {"model": "tiny", **body}] for path, body in RANDOM],
    }
    done = subprocess.run(
        [str(vllm_environment.python), str(HERE / "api_oracle.py")],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        env=offline(),
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, list[str | None]] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_random_bodies_render_as_in_vllm_with_every_template(
    tiny_model: Path, vllm_texts: dict[str, list[str | None]], template: Path
) -> None:
    tokenizer = ModelTokenizer.load(tiny_model, chat_template=template)
    compared, different = 0, []
    for (path, body), theirs in zip(RANDOM, vllm_texts[template.stem], strict=True):
        if theirs is not None:
            compared += 1
            if our_text(tokenizer, path, body) != theirs:
                different.append((path, body))
    assert different == []
    assert compared > 30


def our_text(tokenizer: ModelTokenizer, path: str, body: dict[str, Any]) -> str | None:
    prompts = parse_request(path=path, body=json.dumps({"model": "tiny", **body}).encode()).prompts
    try:
        return tokenizer.render(prompts[0]) if prompts and isinstance(prompts[0], ChatPrompt) else None
    except PromptTokensError:
        return None


def test_a_prompt_that_the_template_refuses_is_an_error_of_its_own(tokenizer: ModelTokenizer) -> None:
    body = json.dumps({"messages": [HI, {"role": "system", "content": "late"}]}).encode()
    with pytest.raises(PromptTokensError):
        our_ids(tokenizer, parse_request(path=CHAT, body=body))
