"""A Redis Stream of records: lines are added in order, a batch at once or not at all, over a connection of its own.

A batch whose answer was lost is sent again: a line may be there twice, and its chain and number tell.
"""

import asyncio
from collections.abc import Sequence

from kvmesh.errors import IndexUnavailableError
from kvmesh.redis.address import RedisAccess
from kvmesh.redis.keys import PICKERS
from kvmesh.redis.link import RedisLink, pack

WRITE_SECONDS = 5.0
FIELD = b"line"


def stream_key(name: str) -> bytes:
    """Return the stream's key: in the hash slot of all our keys, so that it is where the connection leads."""
    return PICKERS + b"log:" + name.encode()


class RecordStream:
    """Adds lines to one stream, of which about `length` are kept."""

    def __init__(self, url: RedisAccess | str, *, name: str, length: int) -> None:
        """Raise RedisUrlError for an address that cannot be read."""
        self.key = stream_key(name)
        self._length = str(length).encode()
        self._link = RedisLink(url)

    async def write(self, lines: Sequence[bytes]) -> None:
        """Add the lines. Raise IndexUnavailableError, and then none is there, or nobody knows."""
        commands = [
            pack(b"MULTI"),
            *(pack(b"XADD", self.key, b"MAXLEN", b"~", self._length, b"*", FIELD, line.rstrip()) for line in lines),
            pack(b"EXEC"),
        ]
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                replies = await self._link.request(b"".join(commands), replies=len(commands))
        except TimeoutError:
            raise IndexUnavailableError(f"Redis did not take records within {WRITE_SECONDS:g} s") from None
        done = replies[-1]
        answers = (*replies, *(done if isinstance(done, list) else ()))
        refusals = [answer for answer in answers if isinstance(answer, Exception)]
        if refusals or not isinstance(done, list):
            raise IndexUnavailableError(f"Redis does not take records: {refusals[0] if refusals else done}")

    async def close(self) -> None:
        """Let go of the connection."""
        await self._link.close()
