"""A pytest plugin, the last resort against a test that hangs: shows all stacks, kills every child, ends the run.

The first resort is pytest-timeout's alarm: the test fails, its `finally` blocks end what it started, the run goes on.
An alarm can be swallowed, though (by a callback of an event loop, by uvloop while it waits, by other C code), and
nobody bounds what runs after it. `conftest` loads this; the limits are in `pyproject.toml` and in `timeout` marks.
"""

import faulthandler
import os
import signal
import threading
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

EXIT_CODE = 70
_timer = pytest.StashKey[threading.Timer]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the ini key."""
    parser.addini("hang_cleanup_seconds", "how long a test may clean up after its timeout", default="120")


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, object, object]:
    """Begin to wait where pytest-timeout does, for longer."""
    seconds = settings.timeout + float(item.config.getini("hang_cleanup_seconds"))
    timer = threading.Timer(seconds, end_run, (item, seconds))
    timer.daemon = True
    timer.name = "hang guard"
    item.stash[_timer] = timer
    timer.start()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait until all of the test is over; pytest-timeout does not guard the teardown of a failed one."""
    try:
        return (yield)
    finally:
        if (timer := item.stash.get(_timer, None)) is not None:
            timer.cancel()


def end_run(item: pytest.Item, seconds: float) -> None:
    """End it all, at once."""
    try:
        capture: Any = item.config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        os.write(
            2, f"\n{item.nodeid} has not ended within {seconds:g} s, its cleaning up included: the run ends\n".encode()
        )
        faulthandler.dump_traceback(file=2)
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)
    finally:  # whatever goes wrong here: nobody else would end the run
        os._exit(EXIT_CODE)


def descendants(ancestor: int) -> list[int]:
    """Return the processes that come from this one, as far as their parents live."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            facts = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        children.setdefault(int(facts[1]), []).append(int(stat.parent.name))
    found = children.get(ancestor, [])
    for pid in found:  # grows meanwhile
        found += children.get(pid, [])
    return found
