"""A standard output whose failure ends the command without a traceback, as in other programs.

`kvmesh … | head -1` closes the pipe, which is no mistake; a full disk is one, and is reported. Both end the command as
SystemExit does, with all cleanup. A command that serves while it prints, as `kvmesh up` does, only loses its lines.

A closed pipe shows at the next write. A view writes only once there are news: `kvmesh top | head -1` would run on
without traffic, so `reader_missed` notices it.
"""

import asyncio
import errno
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import IO, Any, TextIO

CLOSED_PIPE = 128 + 13  # a shell's exit code for a program that SIGPIPE has ended
FAILURE = 1


class EndingFile(FileIO):
    """A descriptor whose failed write ends the command; later output is dropped."""

    def __init__(self, descriptor: int, *, tell: Callable[[str], None]) -> None:
        """`tell` reports the fault to a person."""
        super().__init__(descriptor, "wb", closefd=False)
        self._tell = tell
        self._has_failed = False

    def write(self, content: Any, /) -> int:
        """Write some of a buffer. Raise SystemExit if that fails."""
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
    """A descriptor whose failed writes are lost: the command goes on, and its output appears again once writes work."""

    def __init__(self, descriptor: int, *, tell: Callable[[str], None]) -> None:
        """`tell` reports the fault to a person, once."""
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
    """Return a stream over the same descriptor that ends the command; the given one if it has no descriptor."""
    return _over(stream, lambda descriptor: EndingFile(descriptor, tell=tell))


def losing(stream: TextIO, *, name: str) -> TextIO:
    """Return a stream over the same descriptor whose failure the command `name` survives; the given one without one."""
    return _over(stream, lambda descriptor: LosingFile(descriptor, tell=lambda words: _say(f"{name}: {words}\n")))


def _over(stream: TextIO, opened: Callable[[int], FileIO]) -> TextIO:
    try:
        descriptor, is_terminal = stream.fileno(), stream.isatty()
    except (AttributeError, OSError, ValueError):  # no descriptor is open, or the stream is a test's
        return stream
    return TextIOWrapper(
        BufferedWriter(opened(descriptor)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=is_terminal,
    )


def guard_standard_output(name: str) -> None:
    """Make a failed write to standard output end the command `name` from now on."""
    sys.stdout = ending(sys.stdout, tell=lambda words: _say(f"{name}: {words}\n"))


def _say(line: str) -> None:
    """Write the line past all buffers, which may be unwritable as well."""
    try:
        os.write(2, line.encode())
    except OSError:
        return  # no one is left to tell


@contextmanager
def reader_missed(stream: IO[str], tell: Callable[[], None]) -> Iterator[None]:
    """Make the running loop call `tell` once the stream's pipe has no reader; never if it is not a pipe."""
    loop = asyncio.get_running_loop()
    descriptor = _pipe_of(stream)

    def look() -> None:
        loop.remove_reader(descriptor)  # the error stays, and would wake the loop for ever
        if _is_unread(descriptor):
            tell()

    try:
        loop.add_reader(descriptor, look)  # only an error makes a write-only descriptor wake the loop
    except (OSError, ValueError):  # a file, or no descriptor at all
        yield
        return
    try:
        yield
    finally:
        loop.remove_reader(descriptor)


def _pipe_of(stream: IO[str]) -> int:
    """Return the descriptor; -1 without one and for a terminal: its end is SIGHUP, and typing would wake the loop."""
    try:
        return -1 if stream.isatty() else stream.fileno()
    except (AttributeError, OSError, ValueError):
        return -1


def _is_unread(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
