"""The two requests of a leg and the answer between them; the answers are those of vLLM 0.32.0 with NixlConnector."""

import json
from typing import Any

import pytest

from extproc.disaggregation.transfer_protocols import (
    LegAnswerError,
    cannot_be_split,
    decode_body,
    has_parameters,
    prefill_body,
    read_answer,
    removed_headers,
)
from extproc.requests.json_edit import JsonObject
from extproc.requests.openai import parse_request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
PARAMETERS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "97270537-e9c7-4553-a13a-23faca3814ad",
    "remote_request_id": "cmpl-a2fa0fcd676dc5b3-0-934a547d",
    "remote_host": "127.0.0.1",
    "remote_port": 25453,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 592,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 576,
}
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def answer(**changes: Any) -> bytes:
    usage = {"prompt_tokens": 592, "prompt_tokens_details": {"cached_tokens": 576}}
    return json.dumps({"usage": usage, "kv_transfer_params": PARAMETERS | changes}).encode()


def body(**fields: Any) -> JsonObject:
    return JsonObject(json.dumps({"model": "m", **fields}).encode())


@pytest.mark.parametrize(
    ("path", "fields", "changed"),
    [
        (CHAT, {}, {"max_tokens": 1}),
        (
            CHAT,
            {"max_completion_tokens": 9, "min_tokens": 3},
            {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1},
        ),
        (CHAT, {"logprobs": True, "top_logprobs": 4}, {"max_tokens": 1, "logprobs": None, "top_logprobs": None}),
        (
            CHAT,
            {"max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}, "seed": 3},
            {"max_tokens": 1, "stream_options": None},
        ),
    ],
)
def test_the_prefill_pod_is_asked_for_one_token_without_a_stream(
    path: str, fields: dict[str, Any], changed: dict[str, Any]
) -> None:
    plain = body(messages=MESSAGES, **fields)
    sent = json.loads(prefill_body(parse_request(path=path, body=plain.raw), plain))
    assert sent == {
        **json.loads(plain.raw), **changed, "stream": False, "kv_transfer_params": ASKED
    }  # fmt: skip


def test_the_decode_pod_gets_the_clients_bytes_and_the_answers_parameters() -> None:
    raw = b'{"model": "m", "prompt": "caf\\u00e9", "n": 1.0, "max_tokens": 7 }'
    parameters = read_answer(answer())
    assert parameters.cached_tokens == 576
    sent = decode_body(JsonObject(raw), parameters)
    assert sent == raw[:-2] + b',"kv_transfer_params":' + json.dumps(PARAMETERS).encode() + b" }"


@pytest.mark.parametrize(
    ("path", "fields", "why"),
    [
        (CHAT, {"messages": MESSAGES}, None),
        (CHAT, {"messages": MESSAGES, "n": 1, "echo": False, "prompt_logprobs": None}, None),
        (COMPLETIONS, {"prompt": "a"}, None),
        (COMPLETIONS, {"prompt": [1, 2]}, None),
        (CHAT, {"messages": MESSAGES, "n": 2}, "it has n"),
        (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, "it has use_beam_search"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, "it has echo"),
        (CHAT, {"messages": MESSAGES, "prompt_logprobs": 2}, "it has prompt_logprobs"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "it has not exactly one prompt"),
        ("/v1/embeddings", {"input": "a"}, "requests of embeddings have no prefill leg"),
        ("/v1/responses", {"input": "a"}, "requests of responses have no prefill leg"),
    ],
)
def test_what_cannot_be_taken_apart_is_computed_where_it_is_decoded(
    path: str, fields: dict[str, Any], why: str | None
) -> None:
    plain = body(**fields)
    assert cannot_be_split(parse_request(path=path, body=plain.raw), plain) == why


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cannot be read"),
        (b"[1]", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b'{"usage": {}}', "no kv_transfer_params"),
        (b'{"kv_transfer_params": null}', "no kv_transfer_params"),
        (b'{"kv_transfer_params": "x"}', "no kv_transfer_params"),
        (answer(remote_block_ids=None, remote_port=None), "lack remote_block_ids, remote_port"),
        (answer(do_remote_prefill=False), "lack do_remote_prefill"),
        (answer(transfer_mode="push"), "mode 'push'"),
    ],
)
def test_an_answer_that_does_not_say_where_the_blocks_are_brings_nothing(content: bytes, why: str) -> None:
    with pytest.raises(LegAnswerError, match=why):
        read_answer(content)


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b'{"messages": [{"content": "\\"kv_transfer_params\\": {}"}]}', False),
        (b'{"prompt": "a", "kv_transfer_params": {"remote_host": "10.0.0.9"}}', True),
        (b'{"prompt": "a", "kv\\u005ftransfer_params": {}}', True),
        (b'{"prompt": {"kv_transfer_params": {}}}', False),
    ],
)
def test_a_clients_own_parameters_are_seen_however_they_are_written(raw: bytes, found: bool) -> None:
    assert has_parameters(JsonObject(raw)) is found


def test_headers_by_which_a_client_would_choose_pods_are_taken_off() -> None:
    headers = {"x-prefiller-host-port": "10.0.0.9:80", "x-session-id": "s", "x-encoder-hosts-ports": "a:1"}
    assert removed_headers(headers) == ("x-prefiller-host-port", "x-encoder-hosts-ports")
    assert removed_headers({"x-session-id": "s"}) == ()
