"""Header blocks: bounded, remembered only where that is safe, and malformed requests are found."""

import contextlib

import pytest
from hpack import Decoder, Encoder, HPACKError
from hypothesis import assume, given
from hypothesis import strategies as st

from extproc.http2 import frames as http2
from extproc.http2.frames import ErrorCode, Http2ConnectionError, Http2StreamError
from extproc.http2.grpc_messages import RESPONSE_HEADERS, GrpcStatus, trailers
from extproc.http2.headers import (
    REMEMBERED_BLOCKS,
    Fields,
    GrpcRequest,
    HeaderBlocks,
    check_request,
    grpc_request,
    keeps_table,
    parse_timeout,
)

REQUEST = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b":authority", b"picker"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
]


def blocks(max_list_bytes: int = 16_384) -> HeaderBlocks:
    return HeaderBlocks(max_list_bytes=max_list_bytes)


def request(*changes: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    return [*(field for field in REQUEST if field[0] not in dict(changes)), *changes]


def test_a_repeated_block_is_interpreted_once_and_means_the_same() -> None:
    encoder, decoder = Encoder(), blocks()
    first, second, third = (encoder.encode(REQUEST) for _ in range(3))
    assert (keeps_table(first), second, keeps_table(second)) == (False, third, True)
    requests = [decoder.request(block) for block in (first, second, third)]
    assert requests == [GrpcRequest(path=b"/a.B/C", timeout_seconds=None, authority="picker")] * 3
    assert (requests[0] is requests[1], requests[1] is requests[2]) == (False, True)


def test_a_remembered_block_is_forgotten_when_the_table_changes() -> None:
    encoder, decoder = Encoder(), blocks()
    decoder.request(encoder.encode(REQUEST))
    block = encoder.encode(REQUEST)
    assert decoder.request(block).path == b"/a.B/C"
    # the same indices now mean other fields
    decoder.fields(Encoder().encode([(b"x-new", b"1")]))
    with pytest.raises(Http2StreamError):
        decoder.request(block)


def test_trailers_that_change_the_table_count_as_well() -> None:
    encoder, decoder = Encoder(), blocks()
    decoder.request(encoder.encode(REQUEST))
    decoder.fields(encoder.encode([(b"x-trailer", b"1")]))
    assert decoder.request(encoder.encode(REQUEST)).path == b"/a.B/C"


# what an Envoy 1.40 sends for an ext_proc stream, but the first one on a connection
ENVOY_BLOCK = (
    b"\x83\x04\xa5`\xb5w?\xa5\xd0[;\x98\x85\\\xbeS\x15v\x1c\x8b\xf7e|\x1eR[*\x1d\x1a\xec9\n\x84\x1e\xc65\xd8r\x15\x08"
    b"\xc2\x86\xc1\xc0\xbf\xbe"
)


def test_an_envoy_s_block_is_remembered_though_it_never_indexes_the_path() -> None:
    decoder = blocks()
    decoder.fields(
        Encoder().encode(
            [
                (b":authority", b"picker"),
                (b"te", b"trailers"),
                (b"content-type", b"application/grpc"),
                (b"x-envoy-internal", b"true"),
                (b"x-forwarded-for", b"192.0.2.2"),
            ]
        )
    )
    first, *others = (decoder.request(ENVOY_BLOCK) for _ in range(3))
    assert all(other is first for other in others)
    assert first.path == b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"


def test_no_more_blocks_are_remembered_than_a_peer_can_need() -> None:
    decoder = blocks()
    for number in range(REMEMBERED_BLOCKS + 10):
        decoder.request(b"".join(http2.literal(*part) for part in request((b"x", b"%d" % number))))
    assert len(decoder._seen) == 10


@pytest.mark.parametrize(
    ("block", "keeps"),
    [
        (b"", True),
        (b"\x82\xbe", True),
        (b"\x04\x01a", True),
        (b"\x10\x01a\x01b\x82", True),
        (b"\xff\x80\x01", False),
        (b"\x82\x40\x01a\x01b", False),
        (b"\x44\x01b", False),
        (b"\x20", False),
        (b"\x0f\x01\x01a", False),
        (b"\x04\x7f\x01" + bytes(128), False),
        (b"\x04\x02a", False),
        (b"\x00\x01a", False),
    ],
)
def test_blocks_that_keep_the_table_are_known_by_their_bytes(block: bytes, keeps: bool) -> None:
    assert keeps_table(block) is keeps


FIELDS = st.one_of(
    st.integers(0x81, 0xFE).map(lambda index: bytes([index])),
    st.builds(lambda index, value: bytes([index, len(value)]) + value, st.integers(1, 14), st.binary(max_size=4)),
    st.builds(http2.literal, st.binary(max_size=4), st.binary(max_size=4)),
)


@given(
    st.builds(lambda fields, more: b"".join(fields) + more, st.lists(FIELDS), st.sampled_from([b"", b"\x84", b"\x7f"]))
)
def test_a_block_that_is_said_to_keep_the_table_keeps_it(block: bytes) -> None:
    assume(keeps_table(block))
    decoder = Decoder()
    decoder.decode(Encoder().encode([(b"x-a", b"1"), (b"x-b", b"2"), (b"x-c", b"3")]))
    before = list(decoder.header_table.dynamic_entries)
    with contextlib.suppress(HPACKError):
        decoder.decode(block, raw=True)
    assert (list(decoder.header_table.dynamic_entries), decoder.header_table_size) == (before, 4096)


def test_a_header_list_over_the_limit_ends_the_connection() -> None:
    with pytest.raises(Http2ConnectionError) as refused:
        blocks().request(Encoder().encode(request((b"x", b"y" * 17_000))))
    assert refused.value.code is ErrorCode.ENHANCE_YOUR_CALM


def test_a_small_block_that_unfolds_to_a_large_list_is_a_bomb() -> None:
    decoder = blocks()
    decoder.fields(b"\x40" + http2.literal(b"x", b"y" * 4000)[1:])  # into the table
    with pytest.raises(Http2ConnectionError) as refused:
        decoder.fields(b"\xbe" * 10_000)
    assert refused.value.code is ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    "block",
    [
        b"\xc0",
        b"\x80",
        b"\x40\x05ab",
        b"\x00\x83\xff\xff\xff\x00",
        b"\x20" * 3,
        b"\x3f\xe2\x1f",
        b"\xff\xff\xff\xff\xff\xff",
    ],
    ids=["no such index", "index 0", "cut short", "huffman", "size updates", "table too large", "huge index"],
)
def test_a_block_that_cannot_be_decoded_ends_the_connection(block: bytes) -> None:
    with pytest.raises(Http2ConnectionError) as refused:
        blocks().fields(block)
    assert refused.value.code is ErrorCode.COMPRESSION_ERROR


@pytest.mark.parametrize(
    "fields",
    [
        request((b":path", b"/"))[1:],
        [*REQUEST, (b":path", b"/late")],
        [(b":method", b"POST"), *REQUEST],
        [(b":status", b"200"), *REQUEST],
        request((b"X-Upper", b"1")),
        request((b"", b"1")),
        request((b"connection", b"close")),
        request((b"transfer-encoding", b"chunked")),
        request((b"te", b"gzip")),
    ],
    ids=["missing", "late", "doubled", "response's", "upper case", "empty", "connection", "chunked", "te"],
)
def test_malformed_requests_are_refused(fields: Fields) -> None:
    with pytest.raises(Http2StreamError) as refused:
        check_request(fields)
    assert refused.value.code is ErrorCode.PROTOCOL_ERROR


def test_a_grpc_request_names_its_method_and_its_time() -> None:
    assert grpc_request(
        request((b"grpc-timeout", b"1500m"), (b"content-type", b"application/grpc+proto"))
    ) == GrpcRequest(path=b"/a.B/C", timeout_seconds=1.5, authority="picker")


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ((b"content-type", b"application/json"), b"415"),
        ((b"content-type", b"application/grpcx"), b"415"),
        ((b":method", b"GET"), b"405"),
    ],
)
def test_what_is_not_grpc_gets_an_http_status(change: tuple[bytes, bytes], status: bytes) -> None:
    refusal = grpc_request(sorted(request(change))).refusal
    assert refusal == http2.literal(b":status", status)


def test_a_timeout_that_cannot_be_read_is_refused_by_a_grpc_status() -> None:
    assert grpc_request(request((b"grpc-timeout", b"soon"))).refusal == RESPONSE_HEADERS + trailers(
        GrpcStatus.INTERNAL, "grpc-timeout cannot be read"
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (b"1H", 3600.0),
        (b"2M", 120.0),
        (b"3S", 3.0),
        (b"4m", 0.004),
        (b"5u", 5e-6),
        (b"6n", 6e-9),
        (b"99999999S", 99_999_999),
    ],
)
def test_timeouts_are_read_in_every_unit(text: bytes, seconds: float) -> None:
    assert parse_timeout(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", [b"", b"S", b"1", b"1x", b"123456789S", b"-1S", b"1.5S", "٣S".encode()])
def test_timeouts_of_another_form_are_none(text: bytes) -> None:
    assert parse_timeout(text) is None
