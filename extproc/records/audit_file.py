"""Files of records: appended to by one process, rotated by size; and standard output in a file's place.

`write_records` calls them in its thread; what goes wrong is an OSError, after which nothing of the lines is there.
"""

import fcntl
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from extproc.errors import ConfigError
from extproc.records.audit_chain import ChainEnd

MODE = 0o640
LAST_BYTES = 1 << 16  # of a file that are looked at for its last line


class RecordFile:
    """`PATH`, and what was written before it as `PATH.1` (the newest) to `PATH.N`. Raise ConfigError."""

    def __init__(self, path: Path, *, max_bytes: int, files: int) -> None:
        """`files` are kept, the current one among them."""
        self.path = path
        self._max_bytes = max_bytes
        self._files = files
        try:
            self._descriptor = _opened(path)
        except BlockingIOError:
            raise ConfigError(
                f"--access-log-file: another process writes to {path}; every picker needs a file of its own"
            ) from None
        except OSError as error:
            raise ConfigError(f"--access-log-file: cannot write to {path}: {error.strerror}") from error
        self._size = os.fstat(self._descriptor).st_size

    def last_end(self) -> ChainEnd | None:
        """Return the chain's end that the file has now; a line that was not finished is ended, and stays."""
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
        """Whether it is time for the next file, or somebody has taken this one away."""
        return self._size >= self._max_bytes or not self._is_there()

    def write(self, lines: Sequence[bytes]) -> None:
        """Append. Raise OSError, and then take back what of it is there."""
        content = memoryview(b"".join(lines))
        try:
            while content:
                content = content[os.write(self._descriptor, content) :]
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size = os.fstat(self._descriptor).st_size

    def rotate(self) -> None:
        """Begin the next file; the oldest one goes. Raise OSError, and then nothing of what was written is gone.

        A file that somebody else has moved or removed is let go of.
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
        with suppress(OSError):  # it has all of it; whether the disk is well shows with the next line
            os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor, self._size = descriptor, os.fstat(descriptor).st_size
        with suppress(OSError):
            self._numbered(self._files).unlink(missing_ok=True)

    def close(self) -> None:
        """Have it on the disk."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False
        except OSError:  # nobody knows
            return True

    def _make_way(self) -> None:
        """Give each file the next number, up to the first one that is free: a failed attempt has left one."""
        free = 1
        while free < self._files and self._numbered(free).exists():
            free += 1
        for number in range(free - 1, 0, -1):
            self._numbered(number).rename(self._numbered(number + 1))
        self.path.rename(self._numbered(1))

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


class StandardOutput:
    """Standard output in a file's place: nothing is known of what was there before, and it is never full."""

    is_full = False

    def last_end(self) -> ChainEnd | None:
        """Return none."""
        return None

    def write(self, lines: Sequence[bytes]) -> None:
        """Write all of it; this may block for as long as nobody reads."""
        sys.stdout.buffer.write(b"".join(lines))
        sys.stdout.buffer.flush()

    def rotate(self) -> None:
        """Never called."""

    def close(self) -> None:
        """Leave it open: it is not ours."""


def _opened(path: Path) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
