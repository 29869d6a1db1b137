"""Both ends of the TCP connections over which pods transfer KV; `podsim.wire.side_channel` has the messages.

A pod's KV transfer listens here, and its loader connects.
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

ANSWER_SECONDS = 5.0  # for all messages except a read, which takes as long as its transfer


class Channel:
    """The asking end of a connection to another pod."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, message: Message, *, seconds: float | None = ANSWER_SECONDS) -> Reply:
        """Return the reply; raise PeerError if it is an error or does not come within `seconds`."""
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
    """Keep a connection open during the block; raise PeerError if it cannot be opened."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, limit=LONGEST_LINE_BYTES)
    except (OSError, OverflowError, UnicodeError) as error:
        raise PeerError(f"cannot connect to {host}:{port}: {_reason(error)}") from error
    try:
        yield Channel(reader, writer)
    finally:
        writer.close()


class Listener:
    """The port on which one pod answers others, and its open connections."""

    def __init__(
        self, answer: Callable[[Message], Awaitable[Reply]], *, spawn: Callable[[Coroutine[None, None, None]], object]
    ) -> None:
        self._answer = answer
        self._spawn = spawn
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._closed = False
        self.port = 0

    async def bind(self, host: str) -> None:
        """Listen on a free port of `host`; raise PortInUseError if there is none."""
        try:
            self._server = await asyncio.start_server(self._accept, host, 0, limit=LONGEST_LINE_BYTES)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise PortInUseError(f"cannot bind a port of {host} for KV transfers: {reason}") from error
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Close the port and all connections, even those whose task never ran, so that no peer waits forever."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed:  # it was accepted before the close but is only reported now
            writer.close()
            return
        self._open.add(writer)
        self._spawn(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(encode_line(await self._answer(decode_message(line))))
                await writer.drain()
        except (OSError, ValueError, msgspec.DecodeError) as error:
            log.warning("ended a connection for KV transfers: %s", _reason(error))
        finally:
            writer.close()
            self._open.discard(writer)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__  # a timeout has no text
