"""`kvmesh top` in a real terminal: how it ends, and that the terminal is as before afterwards."""

import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import pytest

from operate.local.ports import pick_free_port
from tests.integration.live_picker import DEADLINE_SECONDS, HOST

# a shell would give it the terminal
IN_FOREGROUND = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
COMMAND = "from operate.cli import main; main()"


class Terminal:
    """A terminal with the command in its foreground."""

    def __init__(self, leader: int, follower: int) -> None:
        self.leader = leader
        self.follower = follower
        self.modes = termios.tcgetattr(follower)
        url = f"http://{HOST}:{pick_free_port(host=HOST, avoid=())}"
        inner = [sys.executable, "-c", COMMAND, "top", "--picker", url]
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_FOREGROUND, *inner],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        )

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self.leader, keys.encode())

    def shows(self, text: str) -> None:
        """Read until the text is there."""
        seen, give_up_at = "", monotonic() + DEADLINE_SECONDS
        while text not in seen:
            assert monotonic() < give_up_at, seen[-2000:]
            assert self.process.poll() is None, seen[-2000:]
            if select.select([self.leader], [], [], 0.1)[0]:
                seen += os.read(self.leader, 65536).decode(errors="replace")

    def ends(self) -> int:
        """Wait for the end, reading nothing, and return its code."""
        return self.process.wait(DEADLINE_SECONDS)


@contextmanager
def terminal() -> Iterator[Terminal]:
    """Open a terminal and run the command in it."""
    leader, follower = pty.openpty()
    opened = Terminal(leader, follower)
    try:
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait()
        os.close(leader)
        os.close(follower)


@pytest.mark.parametrize("ending", ["\x03", signal.SIGINT, signal.SIGTERM])
def test_a_terminal_that_nobody_reads_is_left_as_it_was(ending: str | signal.Signals) -> None:
    with terminal() as screen:
        screen.shows("replicas connected")
        fill = os.open(os.ttyname(screen.follower), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            while True:
                os.write(fill, b"x" * 4096)
        except BlockingIOError:
            pass  # nothing that it draws from now on fits in
        finally:
            os.close(fill)
        if isinstance(ending, str):
            screen.press(ending)  # Ctrl-C, typed
        else:
            screen.process.send_signal(ending)
        assert screen.ends() == (-signal.SIGTERM if ending is signal.SIGTERM else 0)
        assert termios.tcgetattr(screen.follower) == screen.modes
