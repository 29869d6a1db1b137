"""gRPC's framing: messages come out whole wherever the bytes are split; limits hold before anything is stored."""

from itertools import pairwise

import pytest
from hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from extproc.http2.grpc_messages import RESPONSE_HEADERS, GrpcError, GrpcStatus, MessageReader, trailers


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def taken(reader: MessageReader) -> list[bytes]:
    messages = []
    while (message := reader.next_message()) is not None:
        messages.append(message)
    return messages


@given(st.lists(st.binary(max_size=50)), st.lists(st.integers(min_value=0, max_value=400)))
def test_messages_come_out_whole_wherever_the_bytes_are_split(messages: list[bytes], cuts: list[int]) -> None:
    data = b"".join(map(framed, messages))
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    reader = MessageReader(max_message_bytes=50)
    got: list[bytes] = []
    for start, end in pairwise(edges):
        reader.feed(data[start:end])
        got += taken(reader)
    assert (got, reader.rest_bytes) == (messages, 0)


@given(st.lists(st.binary(max_size=50), min_size=1), st.data())
def test_messages_wait_in_the_reader_until_they_are_taken(messages: list[bytes], data: st.DataObject) -> None:
    reader = MessageReader(max_message_bytes=50)
    got: list[bytes] = []
    for message in messages:
        reader.feed(framed(message)[:3])
        if data.draw(st.booleans()):
            got += taken(reader)
        reader.feed(framed(message)[3:])
    assert got + taken(reader) == messages


def test_a_message_over_the_limit_is_refused_when_its_length_is_known() -> None:
    reader = MessageReader(max_message_bytes=10)
    reader.feed(framed(b"x" * 11)[:5])
    with pytest.raises(GrpcError, match="11 bytes is over the limit of 10 bytes") as refused:
        reader.next_message()
    assert refused.value.status is GrpcStatus.RESOURCE_EXHAUSTED


def test_a_compressed_message_is_refused() -> None:
    reader = MessageReader(max_message_bytes=10)
    reader.feed(b"\1\0\0\0\1x")
    with pytest.raises(GrpcError) as refused:
        reader.next_message()
    assert refused.value.status is GrpcStatus.UNIMPLEMENTED


def test_a_message_cut_short_is_a_rest() -> None:
    reader = MessageReader(max_message_bytes=10)
    reader.feed(framed(b"abc")[:-1])
    assert (reader.next_message(), reader.rest_bytes > 0) == (None, True)


def test_headers_and_trailers_decode_without_a_table() -> None:
    decoder = Decoder()
    assert list(decoder.decode(RESPONSE_HEADERS, raw=True)) == [
        (b":status", b"200"),
        (b"content-type", b"application/grpc"),
    ]
    block = trailers(GrpcStatus.INTERNAL, "ä 100%\n" + "x" * 2000)
    (_, status), (_, text) = decoder.decode(block, raw=True)
    assert status == b"13"
    assert text.startswith(b"%C3%A4 100%25%0Axx")
    assert len(text) < 600
    assert not decoder.header_table.dynamic_entries
