"""What one child process wrote: bounded on disk, and its last lines in memory for the moment it fails.

Filled by `processes`; the files are for people who want to look while the stack runs.
"""

from collections import deque
from pathlib import Path

KEPT_LINES = 40
LINE_LIMIT_BYTES = 2000


class ChildLog:
    """Keeps the newest `limit_bytes` to twice that in `path` and `path.1`."""

    def __init__(self, path: Path, *, limit_bytes: int) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._file = path.open("wb", buffering=0)
        self._written_bytes = 0
        self._lines: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._unfinished = b""

    def write(self, data: bytes) -> None:
        """Append what the child wrote, which may end in the middle of a line."""
        if self._written_bytes + len(data) > self._limit_bytes:
            self._start_over()
        self._file.write(data)
        self._written_bytes += len(data)
        *lines, unfinished = (self._unfinished + data).split(b"\n")
        self._lines.extend(line[:LINE_LIMIT_BYTES] for line in lines if line.strip())
        self._unfinished = unfinished[:LINE_LIMIT_BYTES]

    def last_lines(self, count: int) -> list[str]:
        """The newest lines, oldest first."""
        lines = [*self._lines, self._unfinished] if self._unfinished.strip() else list(self._lines)
        return [line.decode("utf-8", "replace").rstrip() for line in lines[-count:]]

    def close(self) -> None:
        """Close the file; the lines stay readable."""
        self._file.close()

    def _start_over(self) -> None:
        self._file.close()
        self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        self._file = self._path.open("wb", buffering=0)
        self._written_bytes = 0
