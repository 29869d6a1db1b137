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


class Listener:
    """The port on which one pod answers others, and their connections."""

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
        """Answer on a free port of `host`. PortInUseError if there is none."""
        try:
            self._server = await asyncio.start_server(self._accept, host, 0, limit=LONGEST_LINE_BYTES)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise PortInUseError(f"cannot bind a port of {host} for KV transfers: {reason}") from error
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Close the port and every connection, also one whose task never ran: who asks there waits for no end."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed:  # accepted before, and told of only now
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
    return str(error) or type(error).__name__  # a timeout has no words
