"""A refusal has the form of the request's API."""

import json
from typing import Any

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from msgspec.structs import replace

from extproc.errors import (
    BodyTooLargeError,
    InternalPickError,
    MalformedRequestError,
    PickError,
    QuotaExceededError,
    RequestShedError,
)
from extproc.ext_proc.exchange import RequestFacts
from extproc.ext_proc.refusals import encode_refusal

FACTS = RequestFacts(method="POST", path="/v1/models", objective=None, request_id="")


def refused(error: PickError, path: str, *, request_id: str = "", **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    facts = RequestFacts(method="POST", path=path, objective=None, request_id=request_id, headers=named)
    return ProcessingResponse.FromString(encode_refusal(error, facts)).immediate_response


def content_type(answer: Any) -> str:
    (found,) = [each.header.raw_value for each in answer.headers.set_headers if each.header.key == "content-type"]
    return str(found.decode())


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/llm/v1/completions?a=b",
        "/v1/audio/transcriptions",
        "/v1/models",
        "/pooling",
        "/tokenize",
    ],
)
def test_openais_apis_get_its_error_object(path: str) -> None:
    answer = refused(RequestShedError("busy"), path)
    assert content_type(answer) == "application/json"
    assert json.loads(answer.body) == {
        "error": {"message": "busy", "type": "server_error", "param": None, "code": "overloaded"}
    }


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MalformedRequestError("m"), "invalid_request_error"),
        (BodyTooLargeError("m"), "request_too_large"),
        (QuotaExceededError("m"), "rate_limit_error"),
        (RequestShedError("m"), "overloaded_error"),
        (InternalPickError("m"), "api_error"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/claude/v1/messages?beta=true", "/v1/messages/count_tokens"])
def test_anthropics_api_gets_its_own(error: PickError, kind: str, path: str) -> None:
    answer = refused(error, path, request_id="r")
    assert json.loads(answer.body) == {"type": "error", "error": {"type": kind, "message": "m"}, "request_id": "r"}


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank", "/v2/embed"])
def test_coheres_apis_get_a_message(path: str) -> None:
    assert json.loads(refused(RequestShedError("busy"), path).body) == {"message": "busy"}


@pytest.mark.parametrize("path", ["/", "/health", "/admin/reload", "/messages", "/v1"])
def test_an_unknown_path_gets_plain_text(path: str) -> None:
    answer = refused(RequestShedError("busy"), path)
    expected = "application/json" if path == "/v1" else "text/plain; charset=utf-8"
    assert content_type(answer) == expected


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QuotaExceededError("no"), 8),
        (RequestShedError("no"), 14),
        (MalformedRequestError("no"), 3),
        (InternalPickError("no"), 13),
    ],
)
def test_grpc_gets_a_status(error: PickError, code: int) -> None:
    answer = refused(error, "/inference.GRPCInferenceService/ModelInfer", content_type="application/grpc+proto")
    assert (answer.grpc_status.status, answer.body) == (code, b"no")
    assert "content-type" not in [each.header.key for each in answer.headers.set_headers]


def test_a_refusal_tells_further_headers_and_has_the_policys_status() -> None:
    error = RequestShedError(
        "busy", headers={"x-kvmesh-priority": "batch\n1", "content-type": "text/html"}, http_status=429
    )
    immediate = ProcessingResponse.FromString(encode_refusal(error)).immediate_response
    headers = {option.header.key: option.header.raw_value for option in immediate.headers.set_headers}
    assert immediate.status.code == 429
    assert headers == {
        "x-kvmesh-priority": b"batch?1",
        "content-type": b"application/json",
        "x-kvmesh-reason": b"shed",
    }


def test_only_refusals_with_a_time_carry_retry_after() -> None:
    response = ProcessingResponse.FromString(encode_refusal(MalformedRequestError("no")))
    headers = {option.header.key for option in response.immediate_response.headers.set_headers}
    assert headers == {"content-type", "x-kvmesh-reason"}


def test_a_refusal_names_the_request_where_it_has_a_name() -> None:
    def names(request_id: str) -> dict[str, bytes]:
        answer = ProcessingResponse.FromString(
            encode_refusal(RequestShedError("why"), replace(FACTS, request_id=request_id))
        )
        return {each.header.key: each.header.raw_value for each in answer.immediate_response.headers.set_headers}

    assert names("r-1")["x-request-id"] == b"r-1"
    assert "x-request-id" not in names("")
