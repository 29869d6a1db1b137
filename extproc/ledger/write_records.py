"""Writes the access log: to standard output and to a file in threads, to a Redis Stream in a task.

A failed write is repeated until it works; meanwhile the target's buffer fills, and drops and reports the rest. No
request waits for any of this.
"""

import asyncio
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from extproc.errors import ConfigError
from extproc.ledger.access_log import AccessLog, RecordBuffer
from extproc.ledger.audit_chain import AuditChain, AuditKey, ChainEnd, parse_keys
from extproc.ledger.ledger import Throttle
from extproc.ledger.record_targets import RecordFile, RecordLines, RecordStream, StandardOutput, Target, new_chain
from extproc.settings.observation_settings import ObservationSettings
from kvmesh.errors import IndexUnavailableError

log = logging.getLogger(__name__)

STDOUT, FILE, STREAM = "stdout", "file", "stream"  # targets, as in a metric's label
PAUSE_SECONDS = 0.25  # between two polls of the buffer
RETRY_SECONDS = 1.0
BATCH = 256  # records
END_SECONDS = 5.0  # to write the rest when the picker stops


class RequestRecords:
    """The access log of one picker, and its writers."""

    def __init__(self, settings: ObservationSettings, *, redis_url: str) -> None:
        """Start the writers. Raise ConfigError for an unusable key or file."""
        self._keys = KeyFile(settings.audit_key_file, changed=lambda key: self.log.use_names_key(key.for_names))
        key = self._keys.key
        names_key = key.for_names if key is not None else secrets.token_bytes(32)  # for this process only
        targets: list[tuple[str, Target]] = []
        wanted = settings.access_log
        if wanted.file is not None:
            targets.append((FILE, RecordFile(wanted.file, max_bytes=wanted.max_bytes, files=wanted.files)))
        if wanted.stdout:
            targets.append((STDOUT, StandardOutput()))
        # before the threads start: they may find a new key
        self.log = AccessLog(names_key=names_key)
        self._threads = [WriterThread(self._lines(name, settings), target) for name, target in targets]
        self._stream: StreamWriter | None = None
        if wanted.stream is not None:
            stream = RecordStream(redis_url, name=wanted.stream, length=wanted.stream_length)
            self._stream = StreamWriter(self._lines(STREAM, settings), stream)

    def _lines(self, target: str, settings: ObservationSettings) -> RecordLines:
        key, buffer = self._keys.key, RecordBuffer(target)
        self.log.buffers.append(buffer)
        return RecordLines(
            buffer,
            chain=AuditChain(new_chain(), key=key) if settings.audit else None,
            key=key,
            process=f"{socket.gethostname()}/{os.getpid()}",
            version=version("kvmesh"),
            newest_key=self._keys.newest,
        )

    async def run(self) -> None:
        """Write to the stream, if any, until cancelled."""
        if self._stream is not None:
            await self._stream.run()

    async def close(self) -> None:
        """Write the rest, within seconds."""
        self.log.close()
        for thread in self._threads:
            thread.end()
        if self._stream is not None:
            await self._stream.close()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)


class _Complaint:
    def __init__(self, buffer: RecordBuffer) -> None:
        self._buffer = buffer
        self._throttle = Throttle()

    def say(self, error: Exception) -> None:
        if self._throttle.passes():
            facts = {"target": self._buffer.target, "why": f"{type(error).__name__}: {error}"}
            log.error("the access log cannot be written", extra=facts)


class WriterThread:
    """Writes one target's lines, in a daemon thread: standard output may block for ever."""

    def __init__(self, lines: RecordLines, target: Target, *, pause_seconds: float = PAUSE_SECONDS) -> None:
        self._lines = lines
        self._target = target
        self._pause_seconds = pause_seconds
        self._complaint = _Complaint(lines.buffer)
        self._ending = threading.Event()
        self._give_up_at = float("inf")
        self._thread = threading.Thread(target=self._run, name=f"access log {lines.buffer.target}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ask the thread to write the rest and stop."""
        self._give_up_at = time.monotonic() + END_SECONDS
        self._ending.set()

    def join(self) -> None:
        """Wait for the thread's end, a few seconds at most."""
        self._thread.join(END_SECONDS + RETRY_SECONDS)

    def _run(self) -> None:
        lines = self._lines
        if not self._written(lines.head(self._last_end())):
            return
        while not self._ending.wait(self._pause_seconds):
            while self._has_room() and (batch := lines.next(BATCH) or lines.alive()):
                if not self._written(batch):
                    return
        if self._has_room() and self._written(lines.last()):
            try:
                self._target.close()
            except OSError as error:
                self._complaint.say(error)

    def _last_end(self) -> ChainEnd | None:
        try:
            return self._target.last_end()
        except OSError as error:
            self._complaint.say(error)
            return None

    def _has_room(self) -> bool:
        if not self._target.is_full:
            return True
        try:
            self._target.rotate()
        except OSError as error:
            self._complaint.say(error)
            return True
        return self._written(self._lines.continued())

    def _written(self, lines: Sequence[bytes]) -> bool:
        while lines:
            try:
                self._target.write(lines)
            except (OSError, ValueError) as error:  # ValueError: standard output was closed
                self._complaint.say(error)
                if time.monotonic() >= self._give_up_at:
                    self._lines.buffer.lose(len(lines))
                    return False
                if self._ending.wait(RETRY_SECONDS):
                    time.sleep(self._pause_seconds)
            else:
                self._lines.buffer.written += len(lines)
                return True
        return True


class StreamWriter:
    """Writes the lines of a stream, as a task of the event loop."""

    def __init__(self, lines: RecordLines, stream: RecordStream, *, pause_seconds: float = PAUSE_SECONDS) -> None:
        self._lines = lines
        self._stream = stream
        self._pause_seconds = pause_seconds
        self._complaint = _Complaint(lines.buffer)
        self._pending: Sequence[bytes] = lines.head(None)  # already chained, so written in order

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            while self._pending or self._next():
                if not await self._is_written():
                    await asyncio.sleep(RETRY_SECONDS)
            await asyncio.sleep(self._pause_seconds)

    async def close(self) -> None:
        """Try once to write the rest: Redis may be gone."""
        if not self._pending or await self._is_written():
            self._pending = self._lines.last()
            await self._is_written()
        if self._pending:
            self._lines.buffer.lose(len(self._pending))
        await self._stream.close()

    def _next(self) -> bool:
        self._pending = self._lines.next(BATCH) or self._lines.alive()
        return bool(self._pending)

    async def _is_written(self) -> bool:
        pending = self._pending
        if not pending:
            return True
        try:
            await self._stream.write(pending)
        except IndexUnavailableError as error:
            self._complaint.say(error)
            return False
        self._lines.buffer.written += len(pending)
        self._pending = ()
        return True


def read_key(path: Path | None) -> AuditKey | None:
    """Return the key in use: the last one of the file. Raise ConfigError."""
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--audit-key-file: cannot read {path}: {why}") from None
    return list(parse_keys(text, where=f"--audit-key-file {path}").values())[-1]


class KeyFile:
    """The key file, read again at each heartbeat. An unreadable or invalid file leaves the key unchanged."""

    def __init__(self, path: Path | None, *, changed: Callable[[AuditKey], None]) -> None:
        """Raise ConfigError. `changed` is called with a new key, in the thread that has found it."""
        self.key = read_key(path)
        self._path = path
        self._changed = changed
        self._refused = ""

    def newest(self) -> AuditKey | None:
        """Return the key in use now."""
        try:
            key = read_key(self._path)
        except ConfigError as error:
            if str(error) != self._refused:
                self._refused = str(error)
                log.error("the audit key stays as it was: %s", error)
            return self.key
        self._refused = ""
        if key is not None and key != self.key:
            self.key = key
            self._changed(key)
            log.info("another audit key is in use", extra={"key_id": key.id})
        return self.key
