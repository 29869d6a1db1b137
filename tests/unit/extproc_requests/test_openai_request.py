"""What `parse_request` makes of bodies that vLLM would serve."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from extproc.requests.json_body import MalformedFieldError
from extproc.requests.openai import parse_request
from extproc.requests.request import (
    ApiKind,
    ChatPrompt,
    InferenceRequest,
    PairPrompt,
    TextPrompt,
    TokenPrompt,
    Truncation,
    TruncationSide,
)
from kvmesh.blocks.block_keys import held_name

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"role": "user", "content": "Hello"}


def parse(path: str, **body: Any) -> InferenceRequest:
    """Read a body; how long it is does not count."""
    return replace(parse_request(path=path, body=json.dumps(body).encode()), body_bytes=0)


def chat_prompt(**body: Any) -> ChatPrompt:
    (prompt,) = parse(CHAT, **{"messages": [HELLO], **body}).prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_a_plain_chat_has_vllms_defaults() -> None:
    assert parse(CHAT, model="m", messages=[HELLO]) == InferenceRequest(
        api=ApiKind.CHAT_COMPLETIONS, path=CHAT, model="m", prompts=(ChatPrompt(messages=(HELLO,)),)
    )


def test_every_field_of_a_chat_that_changes_its_tokens_is_kept() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    request = parse(
        CHAT,
        model=None,
        messages=[HELLO],
        tools=[tool],
        documents=[{"title": "t", "text": "d"}],
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
        chat_template_kwargs={"custom": {"b": 1, "a": 2}},
        stream=True,
        max_tokens=5,
        cache_salt="salt",
    )
    assert request == InferenceRequest(
        api=ApiKind.CHAT_COMPLETIONS,
        path=CHAT,
        prompts=(
            ChatPrompt(
                messages=(HELLO,),
                tools=(tool,),
                documents=({"title": "t", "text": "d"},),
                add_generation_prompt=False,
                continue_final_message=True,
                add_special_tokens=True,
                chat_template_kwargs={"custom": {"b": 1, "a": 2}},
            ),
        ),
        stream=True,
        max_tokens=5,
        cache_salt="salt",
    )


@pytest.mark.parametrize("number", [2**53, 2**64, 10**400])
def test_a_limit_beyond_any_context_is_as_much_as_records_take(number: int) -> None:
    assert parse(CHAT, messages=[HELLO], max_tokens=number).max_tokens == 2**53 - 1


def test_a_long_salt_is_held_as_its_digest_alone() -> None:
    salt = "s" * 900_000
    assert parse(CHAT, messages=[HELLO], cache_salt=salt).cache_salt == held_name(salt)


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert parse(CHAT, messages=[HELLO], max_tokens=5, max_completion_tokens=7).max_tokens == 7


def test_null_and_auto_template_variables_count_as_not_given() -> None:
    kwargs = {"a": None, "b": "auto", "c": False, "d": ""}
    assert chat_prompt(chat_template_kwargs=kwargs).chat_template_kwargs == {"c": False, "d": ""}


@pytest.mark.parametrize(
    ("effort", "kwargs", "expected"),
    [
        ("low", {}, {"reasoning_effort": "low", "enable_thinking": True}),
        ("none", {}, {"reasoning_effort": "none", "enable_thinking": False}),
        ("high", {"enable_thinking": False}, {"reasoning_effort": "high", "enable_thinking": False}),
    ],
)
def test_a_reasoning_effort_switches_thinking_unless_the_request_says_otherwise(
    effort: str, kwargs: dict[str, Any], expected: dict[str, Any]
) -> None:
    prompt = chat_prompt(reasoning_effort=effort, chat_template_kwargs=kwargs)
    assert prompt.chat_template_kwargs == expected


@pytest.mark.parametrize("word", ["true", "Yes", "on", "1", 1])
def test_booleans_may_be_spelled_as_pydantic_takes_them(word: Any) -> None:
    assert parse(CHAT, messages=[HELLO], stream=word).stream is True


@pytest.mark.parametrize("word", ["false", "No", "off", "0", 0])
def test_a_generation_prompt_can_be_switched_off_in_words(word: Any) -> None:
    assert chat_prompt(add_generation_prompt=word).add_generation_prompt is False


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", (TextPrompt(text="text"),)),
        ("", (TextPrompt(text=""),)),
        (["a", "b"], (TextPrompt(text="a"), TextPrompt(text="b"))),
        ([1, 2, 4095], (TokenPrompt.of([1, 2, 4095]),)),
        ([[1], [2, 3]], (TokenPrompt.of([1]), TokenPrompt.of([2, 3]))),
        ([True, 0], (TokenPrompt.of([1, 0]),)),
        ([4294967295], (TokenPrompt.of([4294967295]),)),
    ],
)
def test_all_four_forms_of_a_completion_prompt_are_understood(prompt: Any, expected: tuple[Any, ...]) -> None:
    assert parse(COMPLETIONS, model="m", prompt=prompt) == InferenceRequest(
        api=ApiKind.COMPLETIONS, path=COMPLETIONS, model="m", prompts=expected, max_tokens=16, sequences=len(expected)
    )


def test_token_ids_are_packed_as_little_endian_uint32() -> None:
    assert TokenPrompt.of([1, 258]).token_bytes == b"\x01\x00\x00\x00\x02\x01\x00\x00"


def test_a_completion_may_do_without_special_tokens() -> None:
    request = parse(COMPLETIONS, prompt="x", add_special_tokens=False)
    assert request.prompts == (TextPrompt(text="x", add_special_tokens=False),)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": None},
        {"prompt": []},
        {"prompt": 5},
        {"prompt": {"text": "x"}},
        {"prompt": [1, "a"]},
        {"prompt": ["a", 1]},
        {"prompt": ["a", ["b"]]},
        {"prompt": [[1], "a"]},
        {"prompt": [1.0]},
        {"prompt": [[1.5]]},
        {"prompt": [-1]},
        {"prompt": [4294967296]},
        {"prompt": [10**30]},
        {"prompt": "x", "prompt_embeds": "AAAA"},
        {"prompt": [1], "suffix": "y"},
        {"prompt": "x", "suffix": "y", "truncate_prompt_tokens": 5},
        {"prompt": "x", "suffix": 5},
        {"prompt": "x", "truncate_prompt_tokens": -2},
        {"prompt": "x", "truncate_prompt_tokens": "many"},
        {"prompt": "x", "truncate_prompt_tokens": 5, "truncation_side": "middle"},
    ],
)
def test_a_completion_whose_tokens_cannot_be_known_is_left_to_the_pod(body: dict[str, Any]) -> None:
    request = parse(COMPLETIONS, model="m", **body)
    assert (request.model, request.prompts) == ("m", ())
    assert request.unsupported_reason


@pytest.mark.parametrize(
    "body",
    [
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": [1]},
        {"truncate_prompt_tokens": 1.5},
        {"tools": "weather"},
        {"documents": {"title": "x"}},
    ],
)
def test_a_chat_whose_tokens_cannot_be_known_is_left_to_the_pod(body: dict[str, Any]) -> None:
    request = parse(CHAT, model="m", messages=[HELLO], **body)
    assert (request.model, request.prompts) == ("m", ())
    assert request.unsupported_reason


def test_prefix_and_query_string_do_not_hide_the_api() -> None:
    request = parse_request(path="/team/v1/chat/completions?x=/v1/completions", body=b'{"messages": []}')
    assert (request.api, request.path) == (ApiKind.CHAT_COMPLETIONS, "/team/v1/chat/completions")


@pytest.mark.parametrize(
    ("path", "method", "body", "model"),
    [
        ("/v1/audio/transcriptions", "POST", b'--x\r\ncontent-disposition: form-data; name="model"', None),
        ("/v1/rerouted", "POST", b'{"model": 5}', None),
        ("/v1/rerouted", "POST", b'{"model": "\\ud800"}', None),
        ("/v1/rerouted", "POST", b'\xef\xbb\xbf {"x": NaN, "model": "m"}', "m"),
        ("/upload", "POST", b"\xff\xfe not json", None),
        ("/deep", "POST", b"[" * 100_000, None),
        ("", "POST", b"", None),
    ],
)
def test_other_paths_have_no_prompt_and_never_fail(path: str, method: str, body: bytes, model: str | None) -> None:
    request = parse_request(path=path, method=method, body=body)
    assert request == InferenceRequest(api=ApiKind.OTHER, path=path, model=model)


@pytest.mark.parametrize(
    ("method", "path", "costs_gpu"),
    [
        *(("GET", "/v1/models", False), ("GET", "/health", False), ("OPTIONS", "/v1/chat/completions", False)),
        *(("GET", "/v1/responses/resp_1", False), ("DELETE", "/v1/responses/resp_1", False)),
        *(("POST", "/v1/responses/resp_1/cancel", False), ("POST", "/tokenize", False)),
        *(("POST", "/v1/audio/transcriptions", True), ("POST", "/v1/responses", True)),
    ],
)
def test_requests_without_inference_cost_no_gpu(method: str, path: str, costs_gpu: bool) -> None:
    request = parse_request(path=path, method=method, body=b"{}")
    assert (request.costs_gpu, request.prompts) == (costs_gpu, ())


def test_a_two_way_request_is_inference_whatever_its_method() -> None:
    request = parse_request(path="/v1/realtime", method="GET", body=None, is_two_way=True)
    assert (request.costs_gpu, request.max_tokens, request.unsupported_reason) == (True, None, None)


@pytest.mark.parametrize("body_type", [bytes, bytearray, memoryview])
def test_the_body_is_only_read(body_type: Any) -> None:
    raw = b'{"messages": [{"role": "user", "content": "caf\\u00e9"}], "unknown": [1, 2]}'
    body = body_type(raw)
    assert parse_request(path=CHAT, body=body).prompts == (ChatPrompt(messages=({"role": "user", "content": "café"},)),)
    assert bytes(body) == raw


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 5}, Truncation(tokens=5)),
        ({"truncate_prompt_tokens": -1}, Truncation(tokens=-1)),
        ({"truncate_prompt_tokens": "7", "truncation_side": None}, Truncation(tokens=7)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 5}, Truncation(tokens=-1, held_back=1)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 5, "max_completion_tokens": 0}, Truncation(tokens=-1)),
        (
            {"truncate_prompt_tokens": 5, "truncation_side": "right"},
            Truncation(tokens=5, side=TruncationSide.RIGHT, keeps_special_tokens=False),
        ),
        (
            {"truncate_prompt_tokens": 5, "truncation_side": "left"},
            Truncation(tokens=5, side=TruncationSide.LEFT, keeps_special_tokens=False),
        ),
        ({"truncate_prompt_tokens": None, "truncation_side": "left"}, None),
    ],
)
def test_a_chat_may_be_cut(fields: dict[str, Any], expected: Truncation | None) -> None:
    assert parse(CHAT, messages=[HELLO], **fields).truncation == expected


def test_a_completion_that_is_cut_to_the_context_leaves_room_for_its_sixteen_tokens() -> None:
    request = parse(COMPLETIONS, prompt="x", truncate_prompt_tokens=-1)
    assert (request.truncation, request.max_tokens) == (Truncation(tokens=-1, held_back=1), 16)


def test_null_leaves_a_completion_its_sixteen_tokens() -> None:
    assert parse(COMPLETIONS, prompt="x", max_tokens=None).max_tokens == 16


@pytest.mark.parametrize(
    ("fields", "user"),
    [
        ({"user": "ann"}, "ann"),
        ({"safety_identifier": "bob"}, "bob"),
        ({"user": "ann", "safety_identifier": "bob"}, "ann"),
        ({"metadata": {"user_id": "eve"}}, "eve"),
        ({"metadata": {"user_id": 5}}, None),
        ({"metadata": "eve"}, None),
        ({"user": 5}, None),
        ({"user": ""}, None),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_who_asks_is_read_from_the_fields_of_both_vendors(path: str, fields: dict[str, Any], user: str | None) -> None:
    assert parse(path, messages=[HELLO], **fields).user == user


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "http://x/y.mp4"}},
        {"image_url": {"url": "http://x/y.png"}},
        {"type": "image_url", "image_url": None, "uuid": "u"},
    ],
)
def test_a_chat_with_media_keeps_its_messages_and_says_so(part: dict[str, Any]) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}
    request = parse(CHAT, messages=[message])
    assert request.prompts == (ChatPrompt(messages=(message,)),)
    assert (request.has_media, request.unsupported_reason) == (True, None)


def test_words_like_image_are_no_media() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "image_url"}, "input_audio", 5]}
    assert parse(CHAT, messages=[message, "image", None]).has_media is False


def test_a_batch_of_chats_has_one_prompt_for_each_conversation() -> None:
    path = CHAT + "/batch"
    bye = {"role": "user", "content": "Bye"}
    assert parse(path, model="m", messages=[[HELLO], [bye]], add_generation_prompt=False) == InferenceRequest(
        api=ApiKind.CHAT_COMPLETIONS,
        path=path,
        model="m",
        prompts=(
            ChatPrompt(messages=(HELLO,), add_generation_prompt=False),
            ChatPrompt(messages=(bye,), add_generation_prompt=False),
        ),
        sequences=2,
    )


def test_a_batch_that_is_a_single_conversation_is_left_to_the_pod() -> None:
    request = parse(CHAT + "/batch", messages=[HELLO])
    assert (request.prompts, request.unsupported_reason) == ((), "messages must be a list of conversations")


def test_a_prompt_that_was_rendered_elsewhere_is_its_token_ids() -> None:
    path = "/inference/v1/generate"
    body = {"model": "m", "token_ids": [5, 6], "sampling_params": {"max_tokens": 3}, "cache_salt": "s"}
    assert parse(path, **body) == InferenceRequest(
        api=ApiKind.GENERATE, path=path, model="m", prompts=(TokenPrompt.of([5, 6]),), max_tokens=3, cache_salt="s"
    )


@pytest.mark.parametrize("fields", [{}, {"token_ids": "x"}, {"token_ids": [5], "features": {"mm_hashes": {}}}])
def test_a_rendered_prompt_with_media_or_without_ids_is_left_to_the_pod(fields: dict[str, Any]) -> None:
    request = parse("/inference/v1/generate", **fields)
    assert request.prompts == ()
    assert request.unsupported_reason


@pytest.mark.parametrize(
    "path",
    [
        *("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/chat/completions/render"),
        *("/v1/responses/render", "/v1/completions/derender"),
    ],
)
def test_turning_texts_into_tokens_has_no_prompt_and_no_output(path: str) -> None:
    request = parse(path, model="m", prompt="x", messages=[HELLO])
    assert request == InferenceRequest(api=ApiKind.TOKENIZE, path=path, model="m", max_tokens=0, costs_gpu=False)


@pytest.mark.parametrize(
    ("path", "api"),
    [
        (CHAT, ApiKind.CHAT_COMPLETIONS),
        ("/v1/responses", ApiKind.RESPONSES),
        ("/v1/messages", ApiKind.MESSAGES),
        ("/v1/embeddings", ApiKind.EMBEDDINGS),
        ("/score", ApiKind.SCORE),
    ],
)
def test_without_its_body_a_request_is_routed_on_load(path: str, api: ApiKind) -> None:
    request = parse_request(path=path, body=None)
    assert request == InferenceRequest(api=api, path=path, unsupported_reason="Envoy does not send the body")


def test_the_sizes_that_the_client_claims_do_not_count() -> None:
    body = b'{"prompt": "x", "body_bytes": "many"}'
    assert parse_request(path=COMPLETIONS, body=body).body_bytes == len(body)


@pytest.mark.parametrize(
    ("fields", "api", "prompts"),
    [
        ({"messages": [HELLO]}, ApiKind.CHAT_COMPLETIONS, (ChatPrompt(messages=(HELLO,)),)),
        ({"prompt": "x"}, ApiKind.COMPLETIONS, (TextPrompt(text="x"),)),
        ({"messages": "x", "prompt": "x"}, ApiKind.COMPLETIONS, (TextPrompt(text="x"),)),
        ({"prompt_embeds": "x"}, ApiKind.COMPLETIONS, ()),
        ({"input": "x"}, ApiKind.POOLING, (TextPrompt(text="x"),)),
        ({"query": "x", "documents": ["y"]}, ApiKind.RERANK, (PairPrompt(query="x", document="y"),)),
        ({"queries": "x", "documents": ["y"]}, ApiKind.SCORE, (PairPrompt(query="x", document="y"),)),
        ({"else": 1}, ApiKind.OTHER, ()),
        ({"messages": [HELLO], "cache_salt": 1}, ApiKind.CHAT_COMPLETIONS, (ChatPrompt(messages=(HELLO,)),)),
    ],
)
def test_invocations_are_read_by_the_names_of_their_fields(
    fields: dict[str, Any], api: ApiKind, prompts: tuple[Any, ...]
) -> None:
    request = parse("/invocations", model="m", **fields)
    assert (request.api, request.model, request.prompts) == (api, "m", prompts)


def test_an_invocation_that_fits_two_apis_is_refused_where_the_policy_needs_bodies() -> None:
    body = json.dumps({"model": "m", "messages": [HELLO], "prompt": "x"}).encode()
    assert parse_request(path="/invocations", body=body).api is ApiKind.CHAT_COMPLETIONS
    with pytest.raises(MalformedFieldError, match="both messages and a prompt"):
        parse_request(path="/invocations", body=body, require_readable=True)


@pytest.mark.parametrize("body", [b"", b"x=1", b"[1]", b'{"messages": 1'])
def test_an_invocation_that_is_no_object_is_another_applications(body: bytes) -> None:
    assert parse_request(path="/invocations", body=body).api is ApiKind.OTHER


@pytest.mark.parametrize("path", [CHAT, "/other"])
def test_an_empty_name_is_none(path: str) -> None:
    assert parse(path, model="", messages=[HELLO]).model is None


@pytest.mark.parametrize("coding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_the_model_of_an_unknown_path_is_read_in_every_encoding_that_the_pod_reads(coding: str) -> None:
    body = (" " * 99 + json.dumps({"model": "m"})).encode(coding)
    assert parse_request(path="/other", body=body).model == "m"


@pytest.mark.parametrize(
    ("path", "fields", "sequences"),
    [
        (CHAT, {"messages": [HELLO]}, 1),
        (CHAT, {"messages": [HELLO], "n": 50}, 50),
        (CHAT, {"messages": [HELLO], "n": "50.0"}, 50),
        (CHAT, {"messages": [HELLO], "n": 4, "use_beam_search": True}, 4),
        (CHAT, {"messages": [HELLO], "n": "many"}, 1),  # the pod refuses it
        (CHAT, {"messages": [HELLO], "n": 0}, 1),
        (CHAT + "/batch", {"messages": [[HELLO], [HELLO]], "n": 3}, 6),
        (COMPLETIONS, {"prompt": ["a"] * 50}, 50),
        (COMPLETIONS, {"prompt": ["a"] * 5_000}, 5_000),  # too many to read
        (COMPLETIONS, {"prompt": [[1, 2], [3]], "n": 2, "best_of": 5}, 10),
        (COMPLETIONS, {"prompt": [1, 2, 3], "n": 2}, 2),
        (COMPLETIONS, {"prompt_embeds": ["AAAA", "AAAA"], "n": 2}, 4),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 7}}, 7),
    ],
)
def test_choices_and_prompts_are_sequences_of_their_own(path: str, fields: dict[str, Any], sequences: int) -> None:
    assert parse(path, model="m", **fields).sequences == sequences


@pytest.mark.parametrize(
    ("written", "tokens"),
    [
        *((1000, 1000), (1000.0, 1000), ("1000", 1000), ("1000.0", 1000), (" 1000 ", 1000), ("1_000", 1000), (True, 1)),
        *(
            (1e300, (1 << 53) - 1),
            (1.5, None),
            ("1.5", None),
            ("x", None),
            (-1, None),
            ([1], None),
            ("9" * 5_000, None),
        ),
    ],
)
def test_a_limit_is_read_in_every_form_that_the_pod_accepts(written: Any, tokens: int | None) -> None:
    assert parse(CHAT, model="m", messages=[HELLO], max_tokens=written).max_tokens == tokens


@pytest.mark.parametrize(
    ("path", "fields", "skips_cache"),
    [
        (CHAT, {"messages": [HELLO], "prompt_logprobs": 0}, True),
        (CHAT, {"messages": [HELLO], "echo": True}, True),
        (CHAT, {"messages": [HELLO], "echo": "false", "logprobs": True}, False),
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 0}, True),
        (COMPLETIONS, {"prompt": "a", "echo": True}, False),
        (COMPLETIONS, {"prompt": "a", "logprobs": 3}, False),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1}, True),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"prompt_logprobs": 1}}, True),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"skip_reading_prefix_cache": True}}, True),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"logprobs": 1}}, False),
    ],
)
def test_scores_of_the_prompts_own_tokens_need_its_whole_computation(
    path: str, fields: dict[str, Any], skips_cache: bool
) -> None:
    assert parse(path, model="m", **fields).skips_cache is skips_cache
