"""What the prefill pod gets of a request, and which requests are not taken apart."""

import json
from typing import Any

import pytest

from extproc.disaggregation.leg_body import cannot_be_split, decode_body, prefill_body
from extproc.disaggregation.transfer_protocols import PROTOCOLS, LegNames
from extproc.policy.disaggregation import Protocol
from extproc.requests.json_edit import JsonObject
from extproc.requests.openai import parse_request

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, GENERATE = "/v1/messages", "/inference/v1/generate"
TALK = [{"role": "user", "content": "hi"}]
NAMES = LegNames(host="10.0.0.1", bootstrap_port=8998, number=5, claim=print)
ROOM = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 5}
SEARCH = {"type": "web_search_preview"}
FUNCTION = {"type": "function", "name": "f", "parameters": {}}


def body(**fields: Any) -> JsonObject:
    return JsonObject(json.dumps({"model": "m", **fields}).encode())


def sent(path: str, plain: JsonObject, protocol: Protocol) -> dict[str, Any]:
    """Return what the prefill pod gets."""
    request = parse_request(path=path, body=plain.raw)
    found: dict[str, Any] = json.loads(prefill_body(request, plain, PROTOCOLS[protocol], NAMES))
    return found


@pytest.mark.parametrize(
    ("path", "fields", "changed"),
    [
        (CHAT, {"messages": TALK}, {"max_tokens": 1}),
        (
            CHAT,
            {"messages": TALK, "max_completion_tokens": 9, "min_tokens": 3},
            {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1},
        ),
        (
            CHAT,
            {"messages": TALK, "logprobs": True, "top_logprobs": 4},
            {"max_tokens": 1, "logprobs": None, "top_logprobs": None},
        ),
        (
            CHAT,
            {"messages": TALK, "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}, "seed": 3},
            {"max_tokens": 1, "stream_options": None},
        ),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 9}, {"max_tokens": 1}),
        (MESSAGES, {"messages": TALK, "max_tokens": 9, "stream": True}, {"max_tokens": 1}),
        (RESPONSES, {"input": "a", "max_output_tokens": 9, "store": True}, {"max_output_tokens": 1, "store": False}),
        (RESPONSES, {"input": "a", "stream": True}, {"max_output_tokens": 1, "store": False}),
        (GENERATE, {"token_ids": [1, 2]}, {"sampling_params": {"max_tokens": 1}}),
        (
            GENERATE,
            {"token_ids": [1], "sampling_params": {"max_tokens": 9, "min_tokens": 2, "logprobs": 1, "seed": 3}},
            {"sampling_params": {"max_tokens": 1, "min_tokens": 1, "logprobs": None, "seed": 3}},
        ),
    ],
)
def test_the_prefill_pod_is_asked_for_one_token_without_a_stream(
    path: str, fields: dict[str, Any], changed: dict[str, Any]
) -> None:
    plain = body(**fields)
    asked = sent(path, plain, Protocol.NIXL)
    assert asked.pop("kv_transfer_params")["do_remote_decode"] is True
    assert asked == {**json.loads(plain.raw), **changed, "stream": False}
    assert sent(path, plain, Protocol.SHARED_STORAGE) == asked


def test_where_the_engine_ends_a_prefill_itself_its_limits_are_the_clients() -> None:
    fields = {"messages": TALK, "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}, "n": 2}
    assert sent(CHAT, body(**fields), Protocol.SGLANG) == {
        "model": "m", **fields, **ROOM, "stream": False, "stream_options": None
    }  # fmt: skip


def test_the_decode_pod_gets_the_clients_bytes_and_the_protocols_fields() -> None:
    raw = b'{"model": "m", "prompt": "caf\\u00e9", "n": 1.0, "max_tokens": 7 }'
    assert decode_body(JsonObject(raw), {"bootstrap_room": b"5"}) == raw[:-2] + b',"bootstrap_room":5 }'
    assert decode_body(JsonObject(raw), {}) == raw


@pytest.mark.parametrize(
    ("path", "fields", "why"),
    [
        (CHAT, {"messages": TALK}, None),
        (CHAT, {"messages": TALK, "n": 1, "echo": False, "prompt_logprobs": None}, None),
        (COMPLETIONS, {"prompt": "a"}, None),
        (COMPLETIONS, {"prompt": [1, 2]}, None),
        (CHAT, {"messages": TALK, "n": 2}, "it has n"),
        (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, "it has use_beam_search"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, "it has echo"),
        (CHAT, {"messages": TALK, "prompt_logprobs": 2}, "it has prompt_logprobs"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "it has not exactly one prompt"),
        ("/v1/embeddings", {"input": "a"}, "requests of embeddings have no prefill leg"),
        (MESSAGES, {"messages": TALK, "max_tokens": 3, "tools": [{"name": "f", "input_schema": {}}]}, None),
        (RESPONSES, {"input": "a", "tools": [FUNCTION]}, None),
        (RESPONSES, {"input": "a", "tools": None}, None),
        (RESPONSES, {"input": "a", "tools": [FUNCTION, SEARCH]}, "it has tools that the pod uses itself"),
        (RESPONSES, {"input": "a", "tools": [{"type": 5}]}, "it has tools that the pod uses itself"),
        (RESPONSES, {"input": "a", "background": True}, "it has background"),
        (GENERATE, {"token_ids": [1]}, None),
        (GENERATE, {"token_ids": [1], "sampling_params": {"n": 1}}, None),
        (GENERATE, {"token_ids": [1], "sampling_params": {"n": 2}}, "it has n"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"prompt_logprobs": 1}}, "it has prompt_logprobs"),
    ],
)
def test_what_cannot_be_taken_apart_is_computed_where_it_is_decoded(
    path: str, fields: dict[str, Any], why: str | None
) -> None:
    plain = body(**fields)
    assert cannot_be_split(parse_request(path=path, body=plain.raw), plain, PROTOCOLS[Protocol.NIXL]) == why


def test_where_decode_pods_compute_no_prompts_whatever_can_have_a_leg_has_one() -> None:
    plain = body(prompt=["a", "b"], n=3)
    request = parse_request(path=COMPLETIONS, body=plain.raw)
    assert cannot_be_split(request, plain, PROTOCOLS[Protocol.SGLANG]) is None
    plain = body(token_ids=[1])
    why = cannot_be_split(parse_request(path=GENERATE, body=plain.raw), plain, PROTOCOLS[Protocol.SGLANG])
    assert why == "requests of generate have no prefill leg"
