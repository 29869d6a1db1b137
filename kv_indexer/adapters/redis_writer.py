"""The index in Redis, written: implements `ports.IndexWriter` with one script a change. Used by the indexer alone.

Atomicity, order and slots live in the Lua files beside this module; what they store is in `docs/redis.md`.
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from kv_indexer.adapters.redis_link import Argument, RedisLink, Script, checked, pack
from kv_indexer.adapters.redis_scripts import (
    APPLY,
    BEGIN_EPOCH,
    DROP_STREAM,
    HEARTBEAT,
    OPEN_STREAM,
    SET_STATE,
    SNAPSHOT,
    SWEEP,
)
from kv_indexer.core.block_keys import KEY_BYTES
from kv_indexer.core.index_changes import IndexChange
from kv_indexer.core.source import Registry, SourceState, Stream, StreamPosition
from kv_indexer.errors import IndexUnavailableError, StreamForgottenError
from kv_indexer.ports import Applied
from kv_indexer.wire.redis_keys import PREFIX, change_arguments, engine_field, parse_position, parse_registry

HEARTBEAT_SECONDS = 5  # without one for so long, readers take the indexer for dead


class RedisIndexWriter:
    """Writes the index; one instance serves all streams of a process. Raise RedisUrlError."""

    def __init__(self, *, url: str, timeout_seconds: float = 5.0) -> None:
        self._link = RedisLink(url)
        self._timeout = timeout_seconds
        self._sweep_cursor: Argument = "0"

    async def open_stream(self, stream: Stream) -> StreamPosition:
        """See `ports.IndexWriter`."""
        nonce = secrets.token_hex(8)
        reply = await self._run(OPEN_STREAM, stream.name, stream.endpoint, stream.dp_rank, nonce)
        position = _position(stream, reply)
        if position is None:
            raise StreamForgottenError(f"{stream.name} vanished while it was registered")
        return position

    async def read_position(self, stream: Stream) -> StreamPosition | None:
        """See `ports.IndexWriter`."""
        return _position(stream, await self._call(pack("HGETALL", _stream_key(stream))))

    async def find_block_keys(self, stream: Stream, hashes: AbstractSet[tuple[int, int]]) -> Mapping[int, bytes]:
        """See `ports.IndexWriter`; a parent may be held in any tier."""
        wanted = sorted(hashes)
        fields = await self._call(pack("HGETALL", _stream_key(stream)))
        slots = [slot for name, slot in zip(fields[::2], fields[1::2], strict=True) if name.startswith(b"slot:")]
        names = [engine_field(engine_hash, group) for engine_hash, group in wanted]
        found: dict[int, bytes] = {}
        for slot in slots:
            values = await self._call(pack("HMGET", PREFIX + b"h:" + slot, *names))
            for (engine_hash, _), value in zip(wanted, values, strict=True):
                if value is not None and len(value) >= KEY_BYTES:
                    found.setdefault(engine_hash, value[:KEY_BYTES])
        return found

    async def apply(self, stream: Stream, change: IndexChange) -> Applied | None:
        """See `ports.IndexWriter`."""
        reply = await self._run(APPLY, stream.name, *change_arguments(change))
        return Applied(epoch=reply[1], left_out=reply[2]) if reply[0] == 1 else None

    async def begin_epoch(
        self, stream: Stream, *, expected_epoch: int, last_seq: int, degraded: str
    ) -> StreamPosition | None:
        """See `ports.IndexWriter`."""
        return _position(stream, await self._run(BEGIN_EPOCH, stream.name, expected_epoch, last_seq, degraded))

    async def set_state(
        self, stream: Stream, *, epoch: int, state: SourceState, reason: str = "", degraded: str = ""
    ) -> None:
        """See `ports.IndexWriter`."""
        await self._run(SET_STATE, stream.name, epoch, state.value, reason, degraded)

    async def drop_stream(self, stream: Stream) -> None:
        """See `ports.IndexWriter`."""
        await self._run(DROP_STREAM, stream.name)

    async def sweep(self, *, fields: int) -> bool:
        """See `ports.IndexWriter`."""
        reply = await self._run(SWEEP, self._sweep_cursor, fields)
        self._sweep_cursor = reply[1] if reply else "0"
        return bool(reply)

    async def read_registry(self) -> Registry:
        """See `ports.IndexWriter`."""
        return parse_registry(await self._run(SNAPSHOT))

    async def heartbeat(self) -> None:
        """Say that an indexer is alive and can write. Raise IndexUnavailableError."""
        await self._run(HEARTBEAT, HEARTBEAT_SECONDS)

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()

    async def _run(self, script: Script, *arguments: Argument) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                return await self._link.run(script, keys=[PREFIX], arguments=arguments)
        except TimeoutError:
            raise IndexUnavailableError(f"Redis did not answer within {self._timeout:g} s") from None

    async def _call(self, command: bytes) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                replies: Sequence[Any] = await self._link.request(command, replies=1)
        except TimeoutError:
            raise IndexUnavailableError(f"Redis did not answer within {self._timeout:g} s") from None
        return checked(replies[0])


def _stream_key(stream: Stream) -> bytes:
    return PREFIX + b"stream:" + stream.name.encode()


def _position(stream: Stream, reply: Sequence[Any]) -> StreamPosition | None:
    try:
        return parse_position(reply)
    except ValueError as error:
        # perhaps a newer version's: nothing that we may overwrite
        raise IndexUnavailableError(f"Redis has a record of {stream.name} that cannot be read: {error}") from error
