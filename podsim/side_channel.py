"""The TCP connections over which pods hand over KV, both ends. See `podsim.wire.side_channel` for what is said.

The KV transfer of a pod listens here, its loader connects.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager

import msgspec

from podsim.errors import PeerError, PortInUseError
from podsim.wire.side_channel import LONGEST_LINE_BYTES, Message, Reply, decode_message, decode_reply, encode_line

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0  # for all messages but a read, which takes as long as its bytes do


class Channel:
    """One connection to another pod, of the end that asks."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, message: Message, *, seconds: float | None = ANSWER_SECONDS) -> Reply:
        """The reply; PeerError if there is none within `seconds`, or if it is an error."""
        try:
            async with asyncio.timeout(seconds):
                self._writer.write(encode_line(message))
                await self._writer.drain()
                line = await self._reader.readline()
            reply = decode_reply(line)
        except (OSError, ValueError, msgspec.DecodeError) as error:
            raise PeerError(f"no answer: {_reason(error)}") from error
        if reply.error is not None:
            raise PeerError(reply.error)
        return reply


@asynccontextmanager
async def connected(host: str, port: int) -> AsyncIterator[Channel]:
    """A connection for as long as the block runs; PeerError if nobody listens there."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, limit=LONGEST_LINE_BYTES)
    except (OSError, OverflowError, UnicodeError) as error:
        raise PeerError(f"cannot connect to {host}:{port}: {_reason(error)}") from error
    try:
        yield Channel(reader, writer)
    finally:
        writer.close()


async def listen(
    host: str, answer: Callable[[Message], Awaitable[Reply]], *, spawn: Callable[[Coroutine[None, None, None]], object]
) -> asyncio.Server:
    """Answer on a free port of `host`; `spawn` runs each connection as a task. PortInUseError if there is none."""

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        spawn(_serve(reader, writer, answer))

    try:
        return await asyncio.start_server(accept, host, 0, limit=LONGEST_LINE_BYTES)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise PortInUseError(f"cannot bind a port of {host} for KV transfers: {reason}") from error


async def _serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Callable[[Message], Awaitable[Reply]]
) -> None:
    try:
        while line := await reader.readline():
            writer.write(encode_line(await answer(decode_message(line))))
            await writer.drain()
    except (OSError, ValueError, msgspec.DecodeError) as error:
        log.warning("ended a connection for KV transfers: %s", _reason(error))
    finally:
        writer.close()


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__  # a timeout has no words
