"""What leaves for Envoy: the header and the metadata agree, errors are OpenAI error objects."""

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

from extproc.answers.response_plan import Prediction, ResponsePlan
from extproc.ext_proc import answers as ext_proc
from extproc.ext_proc.exchange import (
    Answer,
    AskForResponse,
    BodyChunk,
    BodyMode,
    BodyWithPick,
    ChangedResponse,
    HeadersWithPick,
    RequestFacts,
    SetResponseHeaders,
    Step,
)
from tests.unit.extproc_ext_proc.envoy_message import read_headers, read_response


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
def test_a_body_chunk_is_read_as_what_protobuf_would_have_written(
    size: int, end_of_stream: bool, response: bool
) -> None:
    body = BodyResponse(
        response=CommonResponse(
            body_mutation=BodyMutation(
                streamed_response=StreamedBodyResponse(body=b"x" * size, end_of_stream=end_of_stream)
            )
        )
    )
    expected = ProcessingResponse(response_body=body) if response else ProcessingResponse(request_body=body)
    chunk = BodyChunk(b"x" * size, end_of_stream=end_of_stream, response=response)
    encoded = ext_proc.encode_step(chunk)
    assert ProcessingResponse.FromString(encoded) == expected
    assert len(encoded) == expected.ByteSize()


@pytest.mark.parametrize("answer", list(Answer))
def test_every_empty_answer_answers_its_own_message(answer: Answer) -> None:
    assert decoded(answer).WhichOneof("response") == answer.name.lower()


TOLD = {"x-kvmesh-degraded": "cap-output, smaller-model", "x-kvmesh-priority": "gr\u00f6\u00dfe\r\n"}


@pytest.mark.parametrize(
    "step",
    [SetResponseHeaders(TOLD), AskForResponse(changes=False, headers=TOLD), AskForResponse(changes=True, headers=TOLD)],
)
def test_what_the_client_is_told_is_set_on_the_response_beside_all_else(step: Step) -> None:
    answer = decoded(step)
    mutation = answer.response_headers.response.header_mutation
    assert {option.header.key: (option.header.raw_value, option.append_action) for option in mutation.set_headers} == {
        "x-kvmesh-degraded": (b"cap-output, smaller-model", HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD),
        "x-kvmesh-priority": ("gr\u00f6\u00dfe??".encode(), HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD),
    }
    mutation.ClearField("set_headers")
    without = decoded(
        AskForResponse(changes=step.changes) if isinstance(step, AskForResponse) else Answer.RESPONSE_HEADERS
    )
    without.response_headers.response.header_mutation.SetInParent()
    assert answer == without


@pytest.mark.parametrize("size", [0, 1, 90, *range(105, 135), 300, 20_000])
def test_headers_of_any_length_arrive_whole(size: int) -> None:
    told = {"x-request-id": "a" * size, "x-kvmesh-decision-id": "0123456789abcdef"}
    mutation = decoded(SetResponseHeaders(told)).response_headers.response.header_mutation
    found = {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}
    assert found == told
    assert {option.append_action for option in mutation.set_headers} == {HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD}


@pytest.mark.parametrize("changes", [False, True])
def test_an_empty_set_of_headers_costs_no_byte(changes: bool) -> None:
    plain, told = AskForResponse(changes=changes), AskForResponse(changes=changes, headers={})
    assert ext_proc.encode_step(told) is ext_proc.encode_step(plain)


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
    assert ext_proc.request_facts(read_headers(message)) == RequestFacts(
        method="POST", path="/v1/completions?x=1", objective="batch", request_id="r-1"
    )


@pytest.mark.parametrize(
    ("sent", "path"),
    [
        ("/v1/%63hat/completions", "/v1/chat/completions"),
        ("/v1/chat%2Fcompletions?q=%63", "/v1/chat/completions?q=%63"),
        ("/a%3f/v1/%63ompletions", "/a%3F/v1/completions"),
        ("/%2563", "/%63"),
        ("/v1/%C3%A9%ff%zz", "/v1/é\ufffd%zz"),
        ("/v1/completions?x=%41", "/v1/completions?x=%41"),
    ],
)
def test_the_path_is_unquoted_once_as_the_pod_does_it_and_the_query_is_not(sent: str, path: str) -> None:
    message = ProcessingRequest()
    message.request_headers.headers.headers.add(key=":path", raw_value=sent.encode())
    assert ext_proc.request_facts(read_headers(message)).path == path


def test_an_envoy_that_does_not_tell_its_mode_sends_buffered_bodies() -> None:
    assert read_headers(ProcessingRequest()).request_mode is BodyMode.BUFFERED


def test_a_mode_of_a_newer_envoy_is_treated_as_a_body_we_do_not_see() -> None:
    message = ProcessingRequest()
    message.protocol_config.request_body_mode = 5
    assert read_headers(message).request_mode is BodyMode.NONE


@pytest.mark.parametrize(("value", "expected"), [(b"200", 200), (b"", 0), (b"abc", 0)])
def test_the_pods_status_is_read_from_its_pseudo_header(value: bytes, expected: int) -> None:
    message = ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=value)
    assert ext_proc.response_status(read_response(message)) == expected


def test_further_headers_are_those_that_were_asked_for() -> None:
    message = ProcessingRequest()
    for key in ("content-type", "x-session-id", "x-tenant", "cookie"):
        message.request_headers.headers.headers.add(key=key, raw_value=key.encode())
    usual = ext_proc.request_facts(read_headers(message)).headers
    further = ext_proc.request_facts(read_headers(message, further=ext_proc.FURTHER_HEADERS | {"x-tenant"})).headers
    assert usual == {"content-type": "content-type", "x-session-id": "x-session-id"}
    assert further == {**usual, "x-tenant": "x-tenant"}


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (["10.0.0.1:80", " 10.0.0.2:80 "], {"10.0.0.1:80", "10.0.0.2:80"}),
        ("10.0.0.1:80, 10.0.0.2:80,", {"10.0.0.1:80", "10.0.0.2:80"}),
        ([], set()),
        ("", set()),
    ],
)
def test_the_routes_candidates_are_a_list_or_a_text_and_may_be_none(hint: object, expected: object) -> None:
    message = ProcessingRequest()
    metadata = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    metadata.update({"x-gateway-destination-endpoint-subset": hint})
    assert ext_proc.request_facts(read_headers(message)).subset == expected


def test_a_route_that_says_nothing_allows_all_candidates() -> None:
    message = ProcessingRequest()
    message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({"other": "x"})
    assert (
        ext_proc.request_facts(read_headers(message)).subset,
        ext_proc.request_facts(read_headers(ProcessingRequest())).subset,
    ) == (None, None)


# --- bodies and responses that change --------------------------------------------------------------------------------


def test_a_changed_buffered_body_comes_with_its_length_beside_the_pick() -> None:
    common = decoded(BodyWithPick(("a:1",), ("content-encoding",), b"changed")).request_body.response
    headers = {option.header.key: option.header.raw_value for option in common.header_mutation.set_headers}
    assert headers == {"x-gateway-destination-endpoint": b"a:1", "content-length": b"7"}
    assert list(common.header_mutation.remove_headers) == ["content-encoding"]
    assert common.body_mutation.body == b"changed"


def test_a_body_that_is_not_changed_is_not_sent_back() -> None:
    common = decoded(BodyWithPick(("a:1",))).request_body.response
    assert (common.HasField("body_mutation"), len(common.header_mutation.set_headers)) == (False, 1)


def test_the_headers_carry_pick_note_and_removed_headers_together() -> None:
    plan = ResponsePlan(
        requested_model="gpt-\u00e9",
        prediction=Prediction(
            model="m", arm="a", endpoint="a:1", prompt_tokens=9, matched_tokens=4, best_matched_tokens=8
        ),
        sampled=True,
        read_below_bytes=7,
    )
    answer = decoded(HeadersWithPick(("a:1",), ("content-encoding",), plan))
    mutation = answer.request_headers.response.header_mutation
    assert [option.header.raw_value for option in mutation.set_headers] == [b"a:1"]
    assert list(mutation.remove_headers) == ["content-encoding"]
    assert answer.dynamic_metadata.fields["envoy.lb"].struct_value["x-gateway-destination-endpoint"] == "a:1"
    # what Envoy hands to the filter that sees responses
    message = ProcessingRequest()
    message.metadata_context.filter_metadata["kvmesh"].CopyFrom(answer.dynamic_metadata.fields["kvmesh"].struct_value)
    assert ext_proc.response_plan(read_response(message)) == plan


@pytest.mark.parametrize("note", ["", "{", '{"sampled": 3}', "[]"])
def test_a_note_that_cannot_be_read_is_no_plan(note: str) -> None:
    message = ProcessingRequest()
    message.metadata_context.filter_metadata["kvmesh"].update({"response": note})
    assert ext_proc.response_plan(read_response(message)) is None
    assert ext_proc.response_plan(read_response(ProcessingRequest())) is None


@pytest.mark.parametrize(("changes", "removed"), [(True, ["content-length"]), (False, [])])
def test_asking_for_a_response_keeps_its_length_unless_it_will_change(changes: bool, removed: list[str]) -> None:
    answer = decoded(AskForResponse(changes=changes))
    assert list(answer.response_headers.response.header_mutation.remove_headers) == removed
    modes = answer.mode_override
    assert (modes.response_header_mode, modes.response_body_mode, modes.response_trailer_mode) == (1, 1, 1)


def test_a_changed_part_of_a_response_replaces_it_and_an_empty_one_clears_it() -> None:
    replaced, cleared = (decoded(ChangedResponse(body)).response_body.response.body_mutation for body in (b"x", b""))
    assert (replaced.body, cleared.clear_body) == (b"x", True)


def test_the_response_head_is_read() -> None:
    message = ProcessingRequest()
    for key, value in [
        (":status", b"200"),
        ("content-type", b"application/json"),
        ("content-encoding", b"br"),
        ("content-length", b"17"),
    ]:
        message.response_headers.headers.headers.add(key=key, raw_value=value)
    assert ext_proc.response_head(read_response(message)) == ext_proc.ResponseHead(
        status=200, content_type="application/json", content_encoding="br", content_length=17
    )
    assert ext_proc.response_head(read_response(ProcessingRequest())) == ext_proc.ResponseHead(
        status=0, content_type="", content_encoding="", content_length=None
    )


@pytest.mark.parametrize(
    ("details", "expected"),
    [("via_upstream", True), ("upstream_reset_before_response_started{x}", False), (None, True)],
)
def test_envoy_tells_whether_a_pod_answered(details: str | None, expected: bool) -> None:
    message = ProcessingRequest()
    if details is not None:
        message.attributes["envoy.filters.http.ext_proc"].update({"response.code_details": details})
    assert ext_proc.response_origin(read_response(message)) == (None, expected)


@pytest.mark.parametrize(("address", "expected"), [("10.0.0.1:8000", "10.0.0.1:8000"), ("", None)])
def test_envoy_tells_which_pod_answered(address: str, expected: str | None) -> None:
    message = ProcessingRequest()
    message.attributes["envoy.filters.http.ext_proc"].update(
        {"upstream.address": address, "response.code_details": "via_upstream"}
    )
    assert ext_proc.response_origin(read_response(message)) == (expected, True)


@pytest.mark.parametrize(
    ("namespace", "value", "expected"),
    [
        ("envoy.lb", "10.0.0.2:8000", "10.0.0.2:8000"),
        ("envoy.lb", "", None),
        ("envoy.lb", ["10.0.0.2:8000"], None),
        ("other", "10.0.0.2:8000", None),
    ],
)
def test_without_the_attribute_the_metadata_tells_which_pod_answered(
    namespace: str, value: object, expected: str | None
) -> None:
    message = ProcessingRequest()
    message.metadata_context.filter_metadata[namespace].update({"x-gateway-destination-endpoint-served": value})
    assert ext_proc.response_origin(read_response(message)) == (expected, True)
    message.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": "10.0.0.1:8000"})
    assert ext_proc.response_origin(read_response(message)) == ("10.0.0.1:8000", True)
