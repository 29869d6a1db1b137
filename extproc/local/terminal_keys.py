"""Reads single keys from the terminal, without Enter and without showing them; it is as before afterwards."""

import asyncio
import codecs
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST_BYTES = 1024
SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|O[A-Z])")  # what arrow and function keys send


def can_read_keys() -> bool:
    """Tell whether somebody may type: standard input is a terminal, and this process is in its foreground."""
    try:
        descriptor = sys.stdin.fileno()
        return os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp()
    except (AttributeError, OSError, ValueError):
        return False


@contextmanager
def single_keys() -> Iterator[None]:
    """Have keys come one by one. Ctrl-C stays a signal."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor, termios.TCSANOW)
    try:
        yield
    finally:
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it may be in the background by now
        termios.tcsetattr(descriptor, termios.TCSANOW, before)  # not TCSADRAIN: output may never be read


@contextmanager
def keys_heard(press: Callable[[str], None]) -> Iterator[None]:
    """Call `press` for each key, in the running loop. Arrow keys and the like are passed over."""
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def read() -> None:
        try:
            content = os.read(descriptor, MOST_BYTES)
        except OSError:  # the terminal is gone
            content = b""
        if not content:
            loop.remove_reader(descriptor)
            return
        for key in SEQUENCE.sub("", decoder.decode(content)):
            press(key)

    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
