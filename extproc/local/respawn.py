"""A role that dies is started again at once, by a process that has loaded its modules already.

The command forks before it opens anything: the child serves, the parent waits. After a crash the parent forks again,
which takes milliseconds, while a new process has to load the modules, and whoever supervises containers waits longer
after each crash. The parent holds no thread, connection or port, so that a fork copies nothing that could be broken.
"""

import ctypes
import gc
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

log = logging.getLogger(__name__)

# More than MOST_DEATHS within so many seconds are left to whoever supervises the container: something is wrong that a
# new start does not mend, and it has to be seen.
MOST_DEATHS = 5
DEATHS_SECONDS = 60.0
PAUSES = (0.0, 0.0, 0.5, 1.0, 2.0)  # seconds before a start, by the deaths within that time: a port may be taken yet
FORWARDED = (signal.SIGTERM, signal.SIGINT)
ENDS_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
WRONG_USAGE = 2  # settings that cannot be used: the next start would end the same
SIGNALLED = 128  # and the signal's number: the exit code of what a signal has ended


def fork_until_it_ends(*, clock: Callable[[], float] = time.monotonic) -> None:
    """Return in a child process, and again in a new one whenever one has died; the parent ends as the last one ended.

    A child has died if a signal ended it, or its exit code says neither that all is well nor wrong usage. SIGTERM and
    SIGINT are handed on, and then nothing is started again.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
    gc.collect()
    gc.freeze()  # what is there is shared with the children: the collector must not touch it
    deaths: deque[float] = deque()
    while True:
        parent, child = os.getpid(), os.fork()
        if child == 0:
            _begin(parent)
            return
        code, is_stopping = _ended(child)
        if is_stopping or code in (0, WRONG_USAGE):
            sys.exit(code)
        deaths.append(clock())
        while deaths[0] < deaths[-1] - DEATHS_SECONDS:
            deaths.popleft()
        if len(deaths) > MOST_DEATHS:
            log.error("the process has died %d times in a minute: it is not started again", len(deaths))
            sys.exit(code)
        log.error("the process has died: it is started again", extra={"exit_code": code})
        time.sleep(PAUSES[len(deaths) - 1])


def _begin(parent: int) -> None:
    """Be an ordinary process that ends when its parent does, as all of a container ends with its first one."""
    ctypes.CDLL(None).prctl(ENDS_WITH_PARENT, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*FORWARDED, signal.SIGCHLD})
    if os.getppid() != parent:  # it ended before it was asked for that
        os.kill(os.getpid(), signal.SIGKILL)


def _ended(child: int) -> tuple[int, bool]:
    """Wait for the child. Return its exit code, as a shell has it, and whether it was told to stop."""
    is_stopping = False
    while True:
        received = signal.sigwait({*FORWARDED, signal.SIGCHLD})
        if received in FORWARDED:
            is_stopping = True
            os.kill(child, received)
            continue
        for ended, status in _all_ended():
            if ended == child:
                code = os.waitstatus_to_exitcode(status)
                return (code if code >= 0 else SIGNALLED - code), is_stopping


def _all_ended() -> Iterator[tuple[int, int]]:
    """Yield what has ended, with its status: as a container's first process we inherit what others leave behind."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found
