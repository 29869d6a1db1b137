"""Which requests need a response that a pod keeps, and the id that names this pod."""

import json
from typing import Any

import pytest

from extproc.requests.openai import parse_request
from extproc.requests.request import ApiKind, InferenceRequest
from extproc.requests.responses_api import UNOWNED_ID, is_owned, owned_id, owner_in, response_in_path, with_response_id

KEY = b"the deployment's"


def parse(**body: Any) -> InferenceRequest:
    return parse_request(path="/v1/responses", body=json.dumps({"model": "m", "input": "Hi", **body}).encode())


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/v1/responses", None),
        ("/v1/responses/", None),
        ("/v1/responses/render", None),
        ("/v1/responses/resp_1", "resp_1"),
        ("/team/v1/responses/resp_1/cancel", "resp_1"),
        ("/v1/responses/resp_1/input_items", "resp_1"),
        ("/v1/responses/resp_1/more/of/it", None),
        ("/v1/chat/completions", None),
    ],
)
def test_a_path_may_name_a_response(path: str, found: str | None) -> None:
    assert response_in_path(path) == found


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_who_asks_for_a_response_by_its_path_needs_it_whatever_the_method(method: str) -> None:
    request = parse_request(path="/v1/responses/resp_1?stream=true", method=method, body=b"")
    assert (request.api, request.kept_response) == (ApiKind.OTHER, "resp_1")


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ({}, (None, None, True)),
        ({"store": False}, (None, None, False)),
        ({"store": None}, (None, None, False)),
        ({"store": "false"}, (None, None, False)),
        ({"previous_response_id": "resp_1"}, ("resp_1", None, True)),
        ({"previous_response_id": "resp_1", "store": False}, ("resp_1", None, False)),
        ({"previous_response_id": 5}, (None, None, True)),
        ({"request_id": "mine"}, (None, "mine", False)),
        ({"request_id": "mine", "store": False}, (None, None, False)),
        ({"request_id": None}, (None, None, False)),
    ],
)
def test_a_response_is_kept_unless_the_client_says_no(
    body: dict[str, Any], kept: tuple[str | None, str | None, bool]
) -> None:
    request = parse(**body)
    assert (request.kept_response, request.response_id, request.wants_response_id) == kept


@pytest.mark.parametrize(
    ("body", "session"),
    [
        ({}, None),
        ({"session_id": "s", "conversation": "c", "prompt_cache_key": "k"}, "s"),
        ({"conversation": "c", "prompt_cache_key": "k"}, "c"),
        ({"conversation": {"id": "c"}}, "c"),
        ({"conversation": {"id": 7}, "prompt_cache_key": "k"}, "k"),
        ({"prompt_cache_key": ["k"]}, None),
    ],
)
def test_the_body_names_the_session(body: dict[str, Any], session: str | None) -> None:
    assert parse(**body).session == session


def test_other_apis_have_a_cache_key_too_and_keep_nothing() -> None:
    request = parse_request(path="/v1/chat/completions", body=b'{"messages": [], "prompt_cache_key": "k"}')
    assert (request.session, request.wants_response_id) == ("k", False)


def test_an_id_names_its_pod_to_every_picker_with_the_key_and_to_nobody_else() -> None:
    pods = [f"10.0.0.{number}:8000" for number in range(1, 9)]
    made = owned_id(pods[3], b"0123456789", key=KEY)
    assert (len(made), made[18:]) == (len(UNOWNED_ID), b"0123456789".hex())
    assert owner_in(made, pods, key=KEY) == pods[3]
    assert owner_in(made, pods[4:], key=KEY) is None
    assert owner_in(made, pods, key=b"another") is None
    # the part that names the pod is good for this id alone
    assert owner_in(made[:18] + b"9876543210".hex(), pods, key=KEY) is None


@pytest.mark.parametrize("other", ["resp_0123456789abcdef", "resp_k", UNOWNED_ID + "0", "mine", ""])
def test_ids_of_other_makers_name_no_pod(other: str) -> None:
    assert is_owned(other) is False
    assert owner_in(other, ["10.0.0.1:8000"], key=KEY) is None


def test_the_id_takes_the_place_at_the_end_though_the_prompt_repeats_it() -> None:
    body = json.dumps({"input": UNOWNED_ID, "request_id": UNOWNED_ID}).encode()
    made = owned_id("a:1", b"0123456789", key=KEY)
    assert json.loads(with_response_id(body, made)) == {"input": UNOWNED_ID, "request_id": made}
