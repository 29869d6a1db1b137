"""What leaves for Envoy: the header and the metadata agree, errors are OpenAI error objects."""

import json

import pytest
from envoy.config.core.v3.base_pb2 import HeaderValueOption
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
)

from extproc.core.exchange import Answer, BodyChunk, BodyMode, BodyWithPick, HeadersWithPick, RequestFacts
from extproc.errors import MalformedRequestError, RequestShedError
from extproc.wire import ext_proc


def decoded(step: object) -> ProcessingResponse:
    return ProcessingResponse.FromString(ext_proc.encode_step(step))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step", "field"), [(HeadersWithPick, "request_headers"), (BodyWithPick, "request_body")], ids=["headers", "body"]
)
def test_header_and_metadata_name_the_same_endpoints(
    step: type[HeadersWithPick] | type[BodyWithPick], field: str
) -> None:
    response = decoded(step(("10.0.0.1:8000", "[::1]:8000")))
    (header,) = getattr(response, field).response.header_mutation.set_headers
    metadata = response.dynamic_metadata.fields["envoy.lb"].struct_value.fields["x-gateway-destination-endpoint"]
    assert (header.header.key, header.header.raw_value, header.append_action) == (
        "x-gateway-destination-endpoint",
        b"10.0.0.1:8000,[::1]:8000",
        HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )
    assert metadata.string_value == "10.0.0.1:8000,[::1]:8000"


def test_a_body_chunk_is_a_streamed_response() -> None:
    response = decoded(BodyChunk(b"abc", end_of_stream=True))
    streamed = response.request_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b"abc", True)


@pytest.mark.parametrize("response", [False, True])
@pytest.mark.parametrize("end_of_stream", [False, True])
@pytest.mark.parametrize("size", [0, 1, 115, 117, 119, 121, 123, 127, 128, 8000, 16_383, 16_384, 62_000, 3_000_000])
def test_a_body_chunk_is_encoded_as_protobuf_would(size: int, end_of_stream: bool, response: bool) -> None:
    body = BodyResponse(
        response=CommonResponse(
            body_mutation=BodyMutation(
                streamed_response=StreamedBodyResponse(body=b"x" * size, end_of_stream=end_of_stream)
            )
        )
    )
    expected = ProcessingResponse(response_body=body) if response else ProcessingResponse(request_body=body)
    chunk = BodyChunk(b"x" * size, end_of_stream=end_of_stream, response=response)
    assert ext_proc.encode_step(chunk) == expected.SerializeToString()


@pytest.mark.parametrize("answer", list(Answer))
def test_every_empty_answer_answers_its_own_message(answer: Answer) -> None:
    assert decoded(answer).WhichOneof("response") == answer.name.lower()


def test_a_refusal_is_an_openai_error_object() -> None:
    response = ProcessingResponse.FromString(ext_proc.encode_refusal(RequestShedError("busy", retry_after_seconds=3)))
    immediate = response.immediate_response
    headers = {option.header.key: option.header.raw_value for option in immediate.headers.set_headers}
    assert immediate.status.code == 503
    assert headers == {"content-type": b"application/json", "x-kvmesh-reason": b"shed", "retry-after": b"3"}
    assert json.loads(immediate.body) == {
        "error": {"message": "busy", "type": "server_error", "param": None, "code": "overloaded"}
    }


def test_only_refusals_with_a_time_carry_retry_after() -> None:
    response = ProcessingResponse.FromString(ext_proc.encode_refusal(MalformedRequestError("no")))
    headers = {option.header.key for option in response.immediate_response.headers.set_headers}
    assert headers == {"content-type", "x-kvmesh-reason"}


def test_request_facts_are_read_from_raw_or_plain_values() -> None:
    message = ProcessingRequest()
    for key, raw, plain in [
        (":method", b"POST", ""),
        (":path", b"/v1/completions?x=1", ""),
        ("x-request-id", b"", "r-1"),
        ("x-gateway-inference-objective", b"batch", ""),
        ("authorization", b"secret", ""),
    ]:
        message.request_headers.headers.headers.add(key=key, raw_value=raw, value=plain)
    assert ext_proc.request_facts(message.request_headers) == RequestFacts(
        method="POST", path="/v1/completions?x=1", objective="batch", request_id="r-1"
    )


def test_an_envoy_that_does_not_tell_its_mode_sends_buffered_bodies() -> None:
    assert ext_proc.request_body_mode(ProcessingRequest()) is BodyMode.BUFFERED


def test_a_mode_of_a_newer_envoy_is_treated_as_a_body_we_do_not_see() -> None:
    message = ProcessingRequest()
    message.protocol_config.request_body_mode = 5
    assert ext_proc.request_body_mode(message) is BodyMode.NONE


@pytest.mark.parametrize(("value", "expected"), [(b"200", 200), (b"", 0), (b"abc", 0)])
def test_the_pods_status_is_read_from_its_pseudo_header(value: bytes, expected: int) -> None:
    message = ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=value)
    assert ext_proc.response_status(message.response_headers) == expected
