"""An answer of a Kubernetes API server is given up where it takes much memory or time."""

from collections.abc import AsyncIterator, Iterator, Mapping

import httpx2
import pytest

from kvmesh.documents import bounded_stream
from kvmesh.documents.bounded_stream import bound


class Body(httpx2.AsyncByteStream, httpx2.SyncByteStream):
    """Comes in these pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        yield from self.pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


NO_HEADERS: Mapping[str, str] = {}


def answer(body: Body, *, headers: Mapping[str, str] = NO_HEADERS, is_watch: bool = False) -> httpx2.Response:
    return bound(httpx2.Response(200, headers=headers, stream=body), is_watch=is_watch)


@pytest.fixture(autouse=True)
def _twenty_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_stream, "MOST_BYTES", 20)


async def test_an_answer_up_to_the_bound_is_read() -> None:
    body = Body(b"a" * 10, b"b" * 10)
    assert answer(body).read() == await answer(body).aread() == b"a" * 10 + b"b" * 10
    assert body.closed


async def test_a_longer_answer_is_given_up() -> None:
    body = Body(b"a" * 10, b"b" * 10, b"c")
    with pytest.raises(httpx2.ReadError, match="longer than 20 bytes"):
        answer(body).read()
    with pytest.raises(httpx2.ReadError, match="longer than 20 bytes"):
        await answer(body).aread()


async def test_a_watch_may_bring_any_number_of_events_but_none_beyond_the_bound() -> None:
    lines = answer(Body(*[b"a" * 9 + b"\n"] * 100), is_watch=True).aiter_lines()
    assert [line async for line in lines] == ["a" * 9] * 100
    lines = answer(Body(b"a\nb" * 3, *[b"c" * 10] * 2), is_watch=True).aiter_lines()
    with pytest.raises(httpx2.ReadError):
        [line async for line in lines]


def test_a_packed_answer_is_not_unpacked() -> None:
    with pytest.raises(httpx2.DecodingError, match="packed"):
        answer(Body(b"a"), headers={"content-encoding": "gzip"}).read()


def test_a_slow_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_stream, "MOST_SECONDS", -1.0)
    with pytest.raises(httpx2.ReadTimeout):
        answer(Body(b"a")).read()
    assert answer(Body(b"a"), is_watch=True).read() == b"a"
