"""Reads an HTTP answer within a bound of unpacked bytes, so that a packed or endless one takes little memory.

The caller sets the deadline.
"""

from collections.abc import AsyncIterator

import aiohttp

MOST_BYTES = 64 << 20  # Envoy's config dump in a large mesh


class AnswerTooLongError(aiohttp.ClientError):
    """An answer is beyond its bound."""


async def pieces_within(response: aiohttp.ClientResponse, most_bytes: int = MOST_BYTES) -> AsyncIterator[bytes]:
    """Yield the body as it comes. Raise AnswerTooLongError beyond the bound.

    aiohttp unpacks it in pieces of some 100 KiB, each after the one before was read.
    """
    read = 0
    async for piece in response.content.iter_any():
        read += len(piece)
        if read > most_bytes:
            raise AnswerTooLongError(f"its answer is longer than {most_bytes} bytes")
        yield piece


async def read_within(response: aiohttp.ClientResponse, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the body. Raise AnswerTooLongError beyond the bound."""
    return b"".join([piece async for piece in pieces_within(response, most_bytes)])
