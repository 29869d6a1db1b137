"""A terminal as a text file whose writes never block for long: one that is not read must not keep a view from ending.

A frozen ssh session or Ctrl-S leaves a terminal's buffer full. A write to it then waits for ever, and with it the event
loop and the signal that should end the program.
"""

import os
import select
import sys
import time
from io import TextIOBase
from typing import TextIO, cast

PATIENCE_SECONDS = 0.2  # for a terminal that is slow; what it has not taken by then is left out


class UnreadTerminal(TextIOBase):
    """Writes to the terminal behind a descriptor. The next page is drawn whole, so what is left out does no harm."""

    def __init__(self, opened: int) -> None:
        """Take a descriptor that does not block, and close it in the end."""
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
        """Return the descriptor that is written to."""
        return self._fd

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Keep the text until `flush`; signs that the encoding lacks become `?`."""
        self._pending += text.encode(self._encoding, "replace")
        return len(text)

    def flush(self) -> None:
        """Write what is kept, as much as the terminal takes within `PATIENCE_SECONDS`."""
        left, self._pending = memoryview(bytes(self._pending)), bytearray()
        give_up_at = time.monotonic() + PATIENCE_SECONDS
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:
                wait = give_up_at - time.monotonic()
                if wait <= 0 or not select.select((), (self._fd,), (), wait)[1]:
                    return
            except OSError:  # the terminal is gone; SIGHUP says so, too
                return

    def close(self) -> None:
        """Close the descriptor."""
        if not self.closed:
            os.close(self._fd)
        super().close()


def standard_output() -> TextIO:
    """Return standard output; where it is a terminal, one that does not block."""
    try:
        # a description of its own: O_NONBLOCK on the given one would be the shell's, too
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        opened = os.open(os.ttyname(sys.stdout.fileno()), flags)
    except (OSError, ValueError):  # no terminal, or none that may be opened again
        return sys.stdout
    return cast("TextIO", UnreadTerminal(opened))
