"""Makes lines of a target's records: plain JSON, or links of an audit chain with its head, signs of life and close.

Used by one writer, in whatever thread; knows no target. `write_records` drives it.
"""

import secrets
import time
from collections.abc import Callable, Sequence

import msgspec

from extproc.records.access_log import Record, RecordBuffer
from extproc.records.audit_chain import ALIVE, CLOSE, CONTINUED, FORMAT, HEAD, AuditChain, AuditKey, ChainEnd

HEARTBEAT_SECONDS = 60.0


def new_chain() -> str:
    """Return the id of a new chain."""
    return secrets.token_hex(8)


class _Mark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the chain that is no request's."""

    kind: str
    at: float
    format: int | None = None
    process: str | None = None
    kvmesh: str | None = None
    key_id: str | None = None
    heartbeat_seconds: float | None = None
    after: ChainEnd | None = None  # what the target ended with when this process came
    records: int | None = None  # of this chain so far, gaps among them


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
        """`chain` None: plain lines, without a head and all that belongs to it.

        `newest_key` is asked as often as there are signs of life: another key begins another chain.
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
        """Return the first line; `after`: how the target ends now."""
        return self._mark(HEAD, after=after, is_full=True)

    def continued(self) -> Sequence[bytes]:
        """Return the first line of the next file."""
        return self._mark(CONTINUED, is_full=True)

    def alive(self) -> Sequence[bytes]:
        """Return the sign of life, once it is time for one."""
        now = self._unix_seconds()
        if now < self._beat_at:
            return ()
        self._beat_at = now + HEARTBEAT_SECONDS
        key = self._newest_key() if self._newest_key is not None else self._key
        return self._mark(ALIVE) if key == self._key else self._with_key(key)

    def next(self, most: int) -> Sequence[bytes]:
        """Return the lines of the next records, none where nothing waits."""
        return self._lines(self.buffer.take(most))

    def last(self) -> Sequence[bytes]:
        """Return the lines of all that is left, and the close."""
        return (*self._lines(self.buffer.rest()), *self._mark(CLOSE))

    def _with_key(self, key: AuditKey | None) -> Sequence[bytes]:
        """Return the close of this chain and the head of the next one, which is there in its place from now on."""
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
        encode, chain = self._encode, self.chain
        if chain is None:
            return [encode(record) + b"\n" for record in records]
        return [chain.line(encode(record)) for record in records]

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
