"""What Envoy sends is read by hand as the library reads it, and by the library where it has another form."""

from contextlib import suppress
from typing import Any

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, HttpHeaders, HttpTrailers, ProcessingRequest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from extproc.ext_proc import answers as ext_proc
from extproc.ext_proc import messages as ext_proc_messages
from extproc.ext_proc.exchange import BodyMode
from extproc.ext_proc.messages import BodyPart, HeadersMessage, TrailersMessage, read_message

WANTED = frozenset({":path", ":method", "x-request-id"})
FILTER = "envoy.filters.http.ext_proc"


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the library fail, so that a test shows that it was not needed."""

    def never(*_: object) -> None:
        raise AssertionError("left to the library")

    monkeypatch.setattr(ext_proc_messages, "_by_library", never)


def by_library(message: bytes) -> Any:
    return ext_proc_messages._by_library(message, WANTED)


def headers_message(kind: str = "request_headers") -> ProcessingRequest:
    """Return what a real Envoy 1.40 sends."""
    message = ProcessingRequest()
    part = getattr(message, kind)
    for key, value in [
        (":authority", b"127.0.0.1:10000"),
        (":path", b"/v1/chat/completions"),
        (":method", b"POST"),
        (":status", b"200"),
        ("content-type", b"application/json"),
        ("authorization", b"x" * 3000),
        ("x-request-id", b""),
    ]:
        part.headers.headers.add(key=key, raw_value=value)
    message.protocol_config.request_body_mode = BodyMode.FULL_DUPLEX_STREAMED.value
    return message


@pytest.mark.usefixtures("by_hand")
def test_a_request_s_headers_are_read_by_hand() -> None:
    message = headers_message()
    message.attributes[FILTER].update({"xds.cluster_name": "pool-a", "count": 3, "list": ["x"], "upstream.address": ""})
    message.metadata_context.filter_metadata["a"].update({"b": "c"})
    assert read_message(message.SerializeToString(deterministic=True), WANTED) == HeadersMessage(
        is_response=False,
        headers={":path": "/v1/chat/completions", ":method": "POST", "x-request-id": ""},
        end_of_stream=False,
        attributes={"xds.cluster_name": "pool-a", "count": "", "list": "", "upstream.address": ""},
        metadata=message.metadata_context.SerializeToString(),
        request_mode=BodyMode.FULL_DUPLEX_STREAMED,
    )


@pytest.mark.usefixtures("by_hand")
def test_a_response_s_headers_are_read_by_hand_and_need_not_be_wanted() -> None:
    message = headers_message("response_headers")
    message.response_headers.end_of_stream = True
    assert read_message(message.SerializeToString(), frozenset()) == HeadersMessage(
        is_response=True,
        headers={":status": "200", "content-type": "application/json"},
        end_of_stream=True,
        request_mode=BodyMode.FULL_DUPLEX_STREAMED,
    )


@pytest.mark.usefixtures("by_hand")
def test_an_envoy_that_does_not_tell_how_bodies_come_buffers_them() -> None:
    read = read_message(ProcessingRequest(request_headers=HttpHeaders()).SerializeToString(), WANTED)
    assert read == HeadersMessage(is_response=False, headers={}, end_of_stream=False)


def test_an_answer_whose_details_are_no_text_is_not_a_pod_s() -> None:
    message = headers_message("response_headers")
    message.attributes[FILTER].update({"response.code_details": None, "upstream.address": "10.0.0.1:8000"})
    read = read_message(message.SerializeToString(), WANTED)
    assert isinstance(read, HeadersMessage)
    assert ext_proc.response_origin(read) == ("10.0.0.1:8000", False)


def test_attributes_that_clients_fill_are_read_and_not_kept() -> None:
    ext_proc_messages._cached_about.cache_clear()
    for number in range(3):
        message = headers_message()
        message.attributes[FILTER].update({"request.path": f"/{number}" + "x" * 1000})
        read = read_message(message.SerializeToString(), WANTED)
        assert isinstance(read, HeadersMessage)
        assert read.attributes == {"request.path": f"/{number}" + "x" * 1000}
    assert ext_proc_messages._cached_about.cache_info().currsize == 0
    for _ in range(2):
        read_message(headers_message().SerializeToString(), WANTED)
    assert ext_proc_messages._cached_about.cache_info().currsize == 1


def test_few_and_only_short_headers_are_remembered() -> None:
    known = ext_proc_messages._names(WANTED).known
    known.clear()
    for number in range(3_000):
        message = ProcessingRequest()
        for key, value in ((":path", f"/{number}"), ("cookie", f"{number}"), ("authorization", f"{number:064}")):
            message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
        for _ in range(2):
            read = read_message(message.SerializeToString(), WANTED)
            assert isinstance(read, HeadersMessage)
            assert read.headers == {":path": f"/{number}"}
    assert 0 < len(known) <= 1024
    assert not any(b"authorization" in entry for entry in known)


def test_a_wanted_name_that_no_header_can_have_is_never_found() -> None:
    read = read_message(headers_message().SerializeToString(), frozenset({":path", "\ud800"}))
    assert isinstance(read, HeadersMessage)
    assert read.headers == {":path": "/v1/chat/completions"}


def test_values_of_other_data_planes_are_read() -> None:
    message = ProcessingRequest()
    message.request_headers.headers.headers.add(key=":path", value="/v1/models")
    read = read_message(message.SerializeToString(), WANTED)
    assert read == HeadersMessage(is_response=False, headers={":path": "/v1/models"}, end_of_stream=False)


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("is_response", [False, True])
def test_trailers_are_told_apart(is_response: bool) -> None:
    message = ProcessingRequest(**{"response_trailers" if is_response else "request_trailers": HttpTrailers()})
    message.metadata_context.SetInParent()
    assert read_message(message.SerializeToString(), WANTED) == TrailersMessage(is_response)


@pytest.mark.parametrize("message", [b"\xff", b"\x12\x05\x0a", b"\x22\x01\x0a"])
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(DecodeError):
        read_message(message, WANTED)


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("part", ["request_body", "response_body"])
@pytest.mark.parametrize("end_of_stream", [False, True])
@pytest.mark.parametrize("size", [0, 1, 117, 123, 127, 128, 16_383, 16_384, 3_000_000])
def test_a_part_of_a_body_is_read_by_hand(size: int, end_of_stream: bool, part: str) -> None:
    message = ProcessingRequest(**{part: HttpBody(body=b"x" * size, end_of_stream=end_of_stream)})
    message.metadata_context.SetInParent()  # as Envoy 1.40 sends it, empty or not
    expected = BodyPart(b"x" * size, end_of_stream, part == "response_body")
    assert read_message(message.SerializeToString(), WANTED) == expected
    message.metadata_context.filter_metadata["kvmesh"].update({"response": "x" * 300})
    message.attributes[FILTER].update({"upstream.address": "10.0.0.1:8000"})
    message.protocol_config.SetInParent()
    assert read_message(message.SerializeToString(), WANTED) == expected


@pytest.mark.parametrize(
    "message",
    [
        ProcessingRequest(request_body=HttpBody(body=b"x"), observability_mode=True),
        ProcessingRequest(request_body=HttpBody(body=b"x", end_of_stream_without_message=True)),
    ],
    ids=["further field", "further field of the body"],
)
def test_a_part_of_a_body_with_more_is_left_to_the_library(message: ProcessingRequest) -> None:
    assert read_message(message.SerializeToString(), WANTED) == BodyPart(b"x", False, False)


TEXTS = st.text("aé\0€", max_size=200)
NAMES = st.sampled_from([*sorted(WANTED), ":status", "content-type", "cookie", "é", ""])
FLAT = st.none() | st.booleans() | st.floats(allow_nan=False) | TEXTS | st.lists(TEXTS, max_size=2)


@st.composite
def messages(draw: st.DrawFn) -> ProcessingRequest:
    message = ProcessingRequest()
    part = getattr(message, draw(st.sampled_from(["request_headers", "response_headers"])))
    part.SetInParent()
    for name in draw(st.lists(NAMES, max_size=6)):
        if draw(st.integers(0, 9)):
            part.headers.headers.add(key=name, raw_value=draw(st.binary(max_size=200)))
        else:
            part.headers.headers.add(key=name, value=draw(TEXTS))
    part.end_of_stream = draw(st.booleans())
    if draw(st.booleans()):
        message.protocol_config.request_body_mode = draw(st.integers(0, 200))
        message.protocol_config.response_body_mode = draw(st.integers(0, 5))
        message.protocol_config.send_body_without_waiting_for_header_response = draw(st.booleans())
    for name in draw(st.lists(st.sampled_from([FILTER, "other"]), max_size=2, unique=True)):
        message.attributes[name].update({f"{name} {key}": draw(FLAT) for key in draw(st.lists(TEXTS, max_size=3))})
    if draw(st.booleans()):
        message.metadata_context.filter_metadata["a"].update({"b": draw(TEXTS)})
    message.observability_mode = draw(st.integers(0, 9)) == 0
    return message


@given(messages())
def test_headers_are_read_as_the_library_reads_them(message: ProcessingRequest) -> None:
    encoded = message.SerializeToString(deterministic=True)
    assert read_message(encoded, WANTED) == by_library(encoded)


@given(messages(), st.data())
def test_what_is_damaged_is_read_as_the_library_reads_it_or_refused(
    message: ProcessingRequest, data: st.DataObject
) -> None:
    encoded = bytearray(message.SerializeToString(deterministic=True))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(encoded[: data.draw(st.integers(1, len(encoded)))])
    try:
        expected = by_library(damaged)
    except DecodeError:
        return  # the hand may have read on where the library is stricter; what it may not do is to raise another error
    finally:
        with suppress(DecodeError):
            read_message(damaged, WANTED)
    if isinstance(expected, BodyPart | TrailersMessage):
        assert read_message(damaged, WANTED) == expected


BY_LIBRARY = (ext_proc_messages._UnusualError, IndexError)  # then the library reads the message


@given(st.binary(max_size=300))
def test_whatever_is_read_as_a_part_of_a_body_the_library_reads_alike(message: bytes) -> None:
    with suppress(*BY_LIBRARY):
        assert ext_proc_messages._body(b"\x22" + message) == by_library(b"\x22" + message)


@given(st.binary(max_size=300), st.booleans(), st.data())
def test_a_part_of_a_body_that_is_cut_off_is_not_read_by_hand(body: bytes, end: bool, data: st.DataObject) -> None:
    message = ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=end)).SerializeToString()
    with pytest.raises(BY_LIBRARY):
        ext_proc_messages._body(message[: data.draw(st.integers(1, len(message) - 1))])
