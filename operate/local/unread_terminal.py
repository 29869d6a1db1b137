"""A standard output that nobody reads must not keep a view from ending.

A frozen ssh session or Ctrl-S leaves a terminal's buffer full. A blocking write would then hang the event loop, and
with it the signal handling: `UnreadTerminal` does not block.
"""

import asyncio
import os
import select
import signal
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from io import TextIOBase
from typing import IO, Any, TextIO, cast

from kvmesh.output.standard_output import CLOSED_PIPE, reader_missed

PATIENCE_SECONDS = 0.2  # for a slow terminal; the rest of the page is dropped


class UnreadTerminal(TextIOBase):
    """Writes to a terminal's descriptor. Dropped output does no harm, because every page is drawn whole."""

    def __init__(self, opened: int) -> None:
        """Take ownership of a non-blocking descriptor."""
        self._fd = opened
        self._encoding = sys.stdout.encoding or "utf-8"
        self._pending = bytearray()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a class attribute there
        """Return the encoding of standard output."""
        return self._encoding

    def isatty(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the terminal's descriptor."""
        return self._fd

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Buffer the text until `flush`; characters outside the encoding become `?`."""
        self._pending += text.encode(self._encoding, "replace")
        return len(text)

    def flush(self) -> None:
        """Write the buffer; drop what the terminal does not accept within `PATIENCE_SECONDS`."""
        left, self._pending = memoryview(bytes(self._pending)), bytearray()
        give_up_at = time.monotonic() + PATIENCE_SECONDS
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:
                wait = give_up_at - time.monotonic()
                if wait <= 0 or not select.select((), (self._fd,), (), wait)[1]:
                    return
            except OSError:  # the terminal is gone; SIGHUP ends the program
                return

    def close(self) -> None:
        """Close the descriptor."""
        if not self.closed:
            os.close(self._fd)
        super().close()


def standard_output() -> TextIO:
    """Return standard output, wrapped without blocking if it is a terminal."""
    try:
        # opened again: O_NONBLOCK on the inherited description would affect the shell, too
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        opened = os.open(os.ttyname(sys.stdout.fileno()), flags)
    except (OSError, ValueError):  # no terminal, or it cannot be opened
        return sys.stdout
    return cast("TextIO", UnreadTerminal(opened))


class UntilEnded:
    """Ends the view quietly, and restores the terminal, at SIGINT, SIGTERM or a closed pipe, whenever they come.

    `asyncio.run` handles SIGINT only once its loop runs; an earlier one ends in a traceback or is lost.
    """

    def __init__(self) -> None:
        self._has_come: int | None = None
        self._is_unread = False
        self._task: asyncio.Task[None] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def run(self, work: Coroutine[Any, Any, None], *, to: IO[str]) -> None:
        """Run `work` until it ends, a signal comes, or the reader of `to` is gone."""
        asyncio.run(self._run(work, to))

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def exit_code(self) -> int | None:
        """Return the code of a closed pipe, or None; die of SIGTERM, as its sender may check the status."""
        if self._is_unread:
            return CLOSED_PIPE
        if self._has_come == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        return None

    def _note(self, number: int, *_: object) -> None:
        self._has_come = number
        self._end()

    def _miss_reader(self) -> None:
        self._is_unread = True
        self._end()

    async def _run(self, work: Coroutine[Any, Any, None], to: IO[str]) -> None:
        self._task = asyncio.create_task(work, name="follow the replicas")
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._note, number)
        if self._has_come is not None:
            self._task.cancel()
        with suppress(asyncio.CancelledError), reader_missed(to, self._miss_reader):
            await self._task
