"""Targets of records: a file of one process, rotated by size; standard output; a Redis Stream.

`RecordLines` makes the lines. A failed write leaves none of its lines in the file. If Redis' reply is lost the batch is
sent again, so a line may appear twice: its chain and number show the duplicate.
"""

import asyncio
import fcntl
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from extproc.errors import ConfigError
from extproc.ledger.access_log import Record, RecordBuffer
from extproc.ledger.audit_chain import ALIVE, CLOSE, CONTINUED, FORMAT, HEAD, AuditChain, AuditKey, ChainEnd
from kvmesh.errors import IndexUnavailableError
from kvmesh.plain_text import plain_json
from kvmesh.redis.keys import PICKERS
from kvmesh.redis.link import RedisLink, pack

HEARTBEAT_SECONDS = 60.0
LARGEST_NUMBER = (1 << 63) - 1  # larger numbers are clamped to this in a record


def new_chain() -> str:
    """Return the id of a new chain."""
    return secrets.token_hex(8)


class _Mark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    kind: str
    at: float
    format: int | None = None
    process: str | None = None
    kvmesh: str | None = None
    key_id: str | None = None
    heartbeat_seconds: float | None = None
    after: ChainEnd | None = None  # the target's last line before this process
    records: int | None = None  # written to this chain so far, gaps included


class RecordLines:
    """The lines of one target."""

    def __init__(
        self,
        buffer: RecordBuffer,
        *,
        chain: AuditChain | None,
        key: AuditKey | None,
        process: str,
        version: str,
        newest_key: Callable[[], AuditKey | None] | None = None,
        unix_seconds: Callable[[], float] = time.time,
    ) -> None:
        """Without a `chain` the lines are plain, with no head, heartbeat or close.

        `newest_key` is called at each heartbeat: a changed key begins a new chain.
        """
        self.buffer = buffer
        self.chain = chain
        self._key = key
        self._newest_key = newest_key
        self._process, self._version = process, version
        self._unix_seconds = unix_seconds
        self._encode = msgspec.json.Encoder().encode
        self._records = 0
        self._beat_at = unix_seconds() + HEARTBEAT_SECONDS

    def head(self, after: ChainEnd | None) -> Sequence[bytes]:
        """Return the first line; `after` is the target's present last line."""
        return self._mark(HEAD, after=after, is_full=True)

    def continued(self) -> Sequence[bytes]:
        """Return the first line of the next file."""
        return self._mark(CONTINUED, is_full=True)

    def alive(self) -> Sequence[bytes]:
        """Return the heartbeat if it is due."""
        now = self._unix_seconds()
        if now < self._beat_at:
            return ()
        self._beat_at = now + HEARTBEAT_SECONDS
        key = self._newest_key() if self._newest_key is not None else self._key
        return self._mark(ALIVE) if key == self._key else self._with_key(key)

    def next(self, most: int) -> Sequence[bytes]:
        """Return the lines of at most `most` waiting records."""
        return self._lines(self.buffer.take(most))

    def last(self) -> Sequence[bytes]:
        """Return the lines of all remaining records, and the close."""
        return (*self._lines(self.buffer.rest()), *self._mark(CLOSE))

    def _with_key(self, key: AuditKey | None) -> Sequence[bytes]:
        self._key = key
        if self.chain is None:
            return ()
        close = self._mark(CLOSE)
        end = self.chain.end
        self.chain = AuditChain(new_chain(), key=key)
        self._records = 0
        return (*close, *self.head(end))

    def _lines(self, records: Sequence[Record]) -> Sequence[bytes]:
        self._records += len(records)
        encode, chain = self._encoded, self.chain
        if chain is None:
            return [encode(record) + b"\n" for record in records]
        return [chain.line(encode(record)) for record in records]

    def _encoded(self, record: Record) -> bytes:
        """Return a record as JSON, whatever it holds: a bad record must not cost the others of its batch."""
        try:
            return plain_json(self._encode(record))
        except (OverflowError, ValueError):  # a number of thousands of digits; half of a surrogate pair
            fields = msgspec.structs.asdict(record)
            return plain_json(self._encode(type(record)(**{name: _writable(value) for name, value in fields.items()})))

    def _mark(self, kind: str, *, after: ChainEnd | None = None, is_full: bool = False) -> Sequence[bytes]:
        if self.chain is None:
            return ()
        now = self._unix_seconds()
        self._beat_at = now + HEARTBEAT_SECONDS
        mark = _Mark(kind=kind, at=round(now, 6), records=self._records)
        if is_full:
            mark = msgspec.structs.replace(
                mark,
                format=FORMAT,
                process=self._process,
                kvmesh=self._version,
                key_id=self._key.id if self._key is not None else None,
                heartbeat_seconds=HEARTBEAT_SECONDS,
                after=after,
            )
        return (self.chain.line(self._encode(mark)),)


def _writable(value: Any) -> Any:
    if type(value) is int:
        return min(max(value, -LARGEST_NUMBER), LARGEST_NUMBER)
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, tuple):
        return tuple(map(_writable, value))
    return value


MODE = 0o640
LAST_BYTES = 1 << 16  # of a file, searched for its last line


class RecordFile:
    """The current file `PATH`, and the older ones `PATH.1` (the newest) to `PATH.N`. Raise ConfigError."""

    def __init__(self, path: Path, *, max_bytes: int, files: int) -> None:
        """`files` is the number of kept files, including the current one."""
        self.path = path
        self._max_bytes = max_bytes
        self._files = files
        try:
            self._descriptor = _opened(path)
        except BlockingIOError:
            raise ConfigError(
                f"--access-log: another process writes to {path}; every picker needs a file of its own"
            ) from None
        except OSError as error:
            raise ConfigError(f"--access-log: cannot write to {path}: {error.strerror}") from error
        self._size = os.fstat(self._descriptor).st_size

    def last_end(self) -> ChainEnd | None:
        """Return the end of the file's chain; an unfinished last line stays, and gets a newline."""
        end = None
        with self.path.open("rb") as file:
            file.seek(max(self._size - LAST_BYTES, 0))
            tail = file.read(LAST_BYTES)
        if tail and not tail.endswith(b"\n"):
            self.write((b"\n",))
        for line in tail.split(b"\n"):
            try:
                end = msgspec.json.decode(line, type=ChainEnd)
            except msgspec.DecodeError:
                continue
        return end

    @property
    def is_full(self) -> bool:
        """Whether to begin the next file: this one is too large, or was moved away."""
        return self._size >= self._max_bytes or not self._is_there()

    def write(self, lines: Sequence[bytes]) -> None:
        """Append all lines, or none of them and raise OSError."""
        content = memoryview(b"".join(lines))
        try:
            while content:
                content = content[os.write(self._descriptor, content) :]
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size = os.fstat(self._descriptor).st_size

    def rotate(self) -> None:
        """Begin the next file and delete the oldest. Raise OSError, without losing any written line.

        A file that was moved or removed is left alone.
        """
        is_ours = self._is_there()
        if is_ours:
            self._make_way()
        try:
            descriptor = _opened(self.path)
        except OSError:
            if is_ours:
                self._numbered(1).rename(self.path)
            raise
        with suppress(OSError):  # a failing disk shows at the next write
            os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor, self._size = descriptor, os.fstat(descriptor).st_size
        with suppress(OSError):
            self._numbered(self._files).unlink(missing_ok=True)

    def close(self) -> None:
        """Flush the file to disk and close it."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False
        except OSError:  # unknown: assume that it is there
            return True

    def _make_way(self) -> None:
        """Increment the numbers of the files below the first free one, which a failed attempt may have left."""
        free = 1
        while free < self._files and self._numbered(free).exists():
            free += 1
        for number in range(free - 1, 0, -1):
            self._numbered(number).rename(self._numbered(number + 1))
        self.path.rename(self._numbered(1))

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


class StandardOutput:
    """Standard output as a target: its earlier content is unknown, and it is never full."""

    is_full = False

    def last_end(self) -> ChainEnd | None:
        """Return None: the earlier content is unknown."""
        return None

    def write(self, lines: Sequence[bytes]) -> None:
        """Write all lines; blocks until its reader takes them."""
        sys.stdout.buffer.write(b"".join(lines))
        sys.stdout.buffer.flush()

    def rotate(self) -> None:
        """Never called."""

    def close(self) -> None:
        """Leave standard output open: it is not ours."""


def _opened(path: Path) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


Target = RecordFile | StandardOutput

WRITE_SECONDS = 5.0
FIELD = b"line"  # the field of each entry


def stream_key(name: str) -> bytes:
    """Return the stream's key, in the hash slot of all our keys, so that our connection leads to its server."""
    return PICKERS + b"log:" + name.encode()


class RecordStream:
    """Adds lines to one stream, which keeps about the last `length`."""

    def __init__(self, url: str, *, name: str, length: int) -> None:
        """Raise RedisUrlError for an invalid address."""
        self.key = stream_key(name)
        self._length = str(length).encode()
        self._link = RedisLink(url)

    async def write(self, lines: Sequence[bytes]) -> None:
        """Add all lines. Raise IndexUnavailableError if none was added, or if that is unknown."""
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
        """Close the connection."""
        await self._link.close()
