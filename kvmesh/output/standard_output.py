"""A standard output that ends the command where it cannot be written to, as other programs end: without a traceback.

`kvmesh … | head -1` closes the pipe, which is no mistake; a full disk is one, and is told. Both end the command as
SystemExit does: what it began is cleared up. What serves while it prints, as `kvmesh up` does, only loses its lines.
"""

import errno
import os
import sys
from collections.abc import Callable
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any, TextIO

CLOSED_PIPE = 128 + 13  # what a shell shows of a program that SIGPIPE has ended
FAILURE = 1


class EndingFile(FileIO):
    """A descriptor whose failed write ends the command; what comes after that is dropped."""

    def __init__(self, descriptor: int, *, tell: Callable[[str], None]) -> None:
        """`tell` says to a person what is wrong."""
        super().__init__(descriptor, "wb", closefd=False)
        self._tell = tell
        self._has_failed = False

    def write(self, content: Any, /) -> int:
        """Write some of a buffer. Raise SystemExit where that fails."""
        if self._has_failed:
            return len(content)
        try:
            return super().write(content)
        except OSError as error:
            self._has_failed = True
            if error.errno in (errno.EPIPE, errno.ECONNRESET):
                raise SystemExit(CLOSED_PIPE) from None
            self._tell(f"standard output cannot be written: {error.strerror}")
            raise SystemExit(FAILURE) from None


class LosingFile(FileIO):
    """A descriptor whose failed writes are lost: what prints to it goes on, and is read again once they work."""

    def __init__(self, descriptor: int, *, tell: Callable[[str], None]) -> None:
        """`tell` says to a person what is wrong, once."""
        super().__init__(descriptor, "wb", closefd=False)
        self._tell = tell
        self._has_told = False

    def write(self, content: Any, /) -> int:
        """Write some of a buffer, or lose it."""
        try:
            return super().write(content)
        except OSError as error:
            if not self._has_told:
                self._has_told = True
                self._tell(f"standard output cannot be written, and is lost: {error.strerror}")
            return len(content)


def ending(stream: TextIO, *, tell: Callable[[str], None]) -> TextIO:
    """Return a stream over the same descriptor that ends the command; the given one where it has none."""
    return _over(stream, lambda descriptor: EndingFile(descriptor, tell=tell))


def losing(stream: TextIO, *, name: str) -> TextIO:
    """Return a stream over the same descriptor that the command `name` outlives; the given one where it has none."""
    return _over(stream, lambda descriptor: LosingFile(descriptor, tell=lambda words: _say(f"{name}: {words}\n")))


def _over(stream: TextIO, opened: Callable[[int], FileIO]) -> TextIO:
    try:
        descriptor, is_terminal = stream.fileno(), stream.isatty()
    except (AttributeError, OSError, ValueError):  # none is open, or it is one of a test
        return stream
    return TextIOWrapper(
        BufferedWriter(opened(descriptor)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=is_terminal,
    )


def guard_standard_output(name: str) -> None:
    """Have what is printed from now on end the command `name` where it cannot be written."""
    sys.stdout = ending(sys.stdout, tell=lambda words: _say(f"{name}: {words}\n"))


def _say(line: str) -> None:
    """Write it past all buffers, which may be as unwritable."""
    try:
        os.write(2, line.encode())
    except OSError:
        return  # nobody is there to be told
