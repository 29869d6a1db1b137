"""One HTTP/1.1 response, however its bytes are cut, and what is no response."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.pods.http_response import MAX_CHUNKS, HttpResponse, HttpResponseError, ResponseReader

LIMIT_BYTES = 1000
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + PLAIN
UNTIL_END = b"HTTP/1.1 200 OK\r\n\r\nhello"
HELLO = HttpResponse(status=200, body=b"hello", keep_alive=True)


def read(*parts: bytes, ended: bool = False) -> HttpResponse | None:
    reader = ResponseReader(max_body_bytes=LIMIT_BYTES)
    for at, part in enumerate(parts):
        response = reader.feed(part)
        if response is not None:
            assert not any(parts[at + 1 :]), "the response was whole before its last byte"
            return response
    return reader.end() if ended else None


@given(st.sampled_from((PLAIN, CHUNKED, INTERIM)), st.lists(st.integers(0, 100), max_size=6))
def test_wherever_the_bytes_are_cut_the_response_is_the_same(whole: bytes, cuts: list[int]) -> None:
    marks = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    assert read(*(whole[a:b] for a, b in pairwise(marks))) == HELLO


@given(st.binary(max_size=300) | st.binary(max_size=60).map(lambda more: CHUNKED[:60] + more), st.booleans())
def test_no_bytes_raise_anything_else_than_that_they_cannot_be_read(data: bytes, ended: bool) -> None:
    try:
        response = read(data, ended=ended)
    except HttpResponseError:
        return
    assert response is None or len(response.body) <= LIMIT_BYTES


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    assert read(UNTIL_END) is None
    assert read(UNTIL_END, ended=True) == HttpResponse(status=200, body=b"hello", keep_alive=False)


@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1 200 OK\r\nConnection: close", b"HTTP/1.0 200 OK"],
    ids=["close", "http-1.0"],
)
def test_a_connection_that_is_not_kept_is_not_used_again(head: bytes) -> None:
    response = read(head + b"\r\nContent-Length: 5\r\n\r\nhello")
    assert response == HttpResponse(status=200, body=b"hello", keep_alive=False)


@pytest.mark.parametrize(
    "whole",
    [PLAIN + b"HTTP/1.1 200 OK\r\n", CHUNKED[:-2] + b"Trailer: x\r\n\r\n"],
    ids=["another-response", "trailers"],
)
def test_what_follows_the_response_ends_the_use_of_the_connection(whole: bytes) -> None:
    assert read(whole) == HttpResponse(status=200, body=b"hello", keep_alive=False)


def test_a_status_that_has_no_body_waits_for_none() -> None:
    assert read(b"HTTP/1.1 304 Not Modified\r\n\r\n") == HttpResponse(status=304, body=b"", keep_alive=True)


@pytest.mark.parametrize(
    "whole",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello",
        CHUNKED.replace(b"3\r\n", b"-3\r\n"),
        CHUNKED.replace(b"3\r\n", b"2\r\n"),
        CHUNKED.replace(b"3\r\n", b"ffffff\r\n"),
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 40_000,
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001,
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 9 + PLAIN,
        b"HTTP/1.1 200 OK\r\n" + b"a:\r\n" * 200 + b"\r\n",
    ],
    ids=[
        *("another-protocol", "http-2", "no-number", "two-lengths", "too-long", "compressed-transfer", "compressed"),
        *("negative-chunk", "longer-than-its-size", "chunk-too-long", "endless-head", "endless-body"),
        *("interim-after-interim", "many-headers"),
    ],
)
def test_what_is_no_response_or_too_large_is_refused(whole: bytes) -> None:
    with pytest.raises(HttpResponseError):
        read(whole)


def test_a_page_in_crumbs_is_refused_and_one_in_lines_is_read() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    line = b"40\r\n" + b"x" * 64 + b"\r\n"
    reader = ResponseReader(max_body_bytes=1 << 20)
    response = reader.feed(head + line * MAX_CHUNKS + b"0\r\n\r\n")
    assert response is not None
    assert len(response.body) == 64 * MAX_CHUNKS

    large = b"1000\r\n" + b"x" * 4096 + b"\r\n"
    reader = ResponseReader(max_body_bytes=1 << 30)
    assert reader.feed(head + large * (MAX_CHUNKS + 100)) is None
    with pytest.raises(HttpResponseError, match="chunks of much less than"):
        ResponseReader(max_body_bytes=1 << 20).feed(head + b"1\r\nx\r\n" * (MAX_CHUNKS + 10))


def test_the_date_of_an_answer_is_kept() -> None:
    response = read(PLAIN.replace(b"Content", b"Date: Tue, 15 Nov 1994 08:12:31 GMT\r\nContent"))
    assert response is not None
    assert response.date == b"tue, 15 nov 1994 08:12:31 gmt"


@pytest.mark.parametrize("whole", [PLAIN, CHUNKED], ids=["plain", "chunked"])
def test_a_connection_that_ends_early_has_cut_the_response(whole: bytes) -> None:
    with pytest.raises(HttpResponseError, match="ended before"):
        read(whole[:-1], ended=True)
