"""Bounds of an answer of a Kubernetes API server: bytes and time of a whole answer, bytes of one event of a watch."""

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2

MOST_BYTES = 64 << 20  # a page of documents
MOST_SECONDS = 60.0


def bound(answer: httpx2.Response, *, is_watch: bool = False) -> httpx2.Response:
    """Return the answer; reading it raises an HTTPError beyond the bounds, or if it is packed against our wish."""
    answer.stream = _BoundedStream(answer, is_watch=is_watch)
    return answer


class _BoundedStream(httpx2.AsyncByteStream, httpx2.SyncByteStream):
    def __init__(self, answer: httpx2.Response, *, is_watch: bool) -> None:
        self._stream: Any = answer.stream  # of either kind
        self._encoding = answer.headers.get("content-encoding", "identity")
        self._is_watch = is_watch
        self._deadline = time.monotonic() + MOST_SECONDS
        self._bytes = 0

    def _checked(self, piece: bytes) -> bytes:
        if self._encoding != "identity":
            raise httpx2.DecodingError("its answer is packed, though this was not asked for")
        if not self._is_watch and time.monotonic() > self._deadline:
            raise httpx2.ReadTimeout(f"its answer takes more than {MOST_SECONDS:g} s")
        event = piece.rfind(b"\n") + 1 if self._is_watch else 0
        self._bytes = len(piece) - event + (0 if event else self._bytes)
        if self._bytes > MOST_BYTES:
            raise httpx2.ReadError(f"its answer is longer than {MOST_BYTES} bytes")
        return piece

    def __iter__(self) -> Iterator[bytes]:
        return map(self._checked, self._stream)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            yield self._checked(piece)

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()
