"""`kvmesh extproc`: the role, with heavy imports late for a fast start, and its restart after a crash.

With --respawn a dead picker is restarted at once, from a process that has already loaded its modules. The command forks
before it opens anything: the child serves, the parent waits. After a crash the parent forks again, which takes
milliseconds; a new process would have to load the modules, and the container's supervisor waits longer after each
crash. The parent holds no thread, connection or port, so that a fork copies nothing that could be broken.
"""

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

import typer

from extproc.errors import ConfigError
from extproc.settings.config import PickerSettings, PolicyFlags
from kvmesh.heap import collector_at_rest
from kvmesh.options import takes_settings

app = typer.Typer(add_completion=False)
log = logging.getLogger(__name__)

# More than MOST_DEATHS within DEATHS_SECONDS are left to the container's supervisor: a restart does not fix the cause,
# and operators must see it.
MOST_DEATHS = 5
DEATHS_SECONDS = 60.0
PAUSES = (0.0, 0.0, 0.5, 1.0, 2.0)  # seconds before a start, by recent deaths: a port may still be taken
FORWARDED = (signal.SIGTERM, signal.SIGINT)
ENDS_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
WRONG_USAGE = 2  # unusable settings: the next start would end the same way
SIGNALLED = 128  # plus the signal's number: the exit code of a process that a signal has ended


@app.callback()
def _group() -> None:
    """Make `extproc` a subcommand, though it is alone."""


@app.command("extproc")
@takes_settings
def run_picker(settings: PickerSettings, policy: PolicyFlags) -> None:
    """Run the endpoint picker: Envoy's ext_proc service."""
    with collector_at_rest():
        from extproc.service import load_ahead, serve

    if not settings.endpoints and not settings.follows_mesh:
        raise ConfigError("no pods: give --endpoints, --kubernetes, or --policies with a folder of documents")
    declared = policy.added_to(settings)
    if settings.respawn:
        with collector_at_rest():
            load_ahead(declared)
        fork_until_it_ends()
    import uvloop

    async def until_stopped() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve(declared, stop=stop)

    uvloop.run(until_stopped())


def fork_until_it_ends() -> None:
    """Return in a child process, and again in a new one whenever one has died; the parent ends as the last one ended.

    A child has died if a signal ended it, or its exit code means neither success nor wrong usage. SIGTERM and SIGINT
    are forwarded to the child, and then nothing is restarted.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
    gc.collect()
    gc.freeze()  # existing objects are shared with the children: the collector must not touch them
    deaths: deque[float] = deque()
    while True:
        parent, child = os.getpid(), os.fork()
        if child == 0:
            _begin(parent)
            return
        code, is_stopping = _ended(child)
        if is_stopping or code in (0, WRONG_USAGE):
            sys.exit(code)
        deaths.append(time.monotonic())
        while deaths[0] < deaths[-1] - DEATHS_SECONDS:
            deaths.popleft()
        if len(deaths) > MOST_DEATHS:
            log.error("the process has died %d times in a minute: it is not started again", len(deaths))
            sys.exit(code)
        log.error("the process has died: it is started again", extra={"exit_code": code})
        time.sleep(PAUSES[len(deaths) - 1])


def _begin(parent: int) -> None:
    """Become an ordinary process that ends with its parent, as all of a container ends with its first process."""
    ctypes.CDLL(None).prctl(ENDS_WITH_PARENT, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*FORWARDED, signal.SIGCHLD})
    if os.getppid() != parent:  # the parent ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def _ended(child: int) -> tuple[int, bool]:
    """Wait for the child. Return its exit code, in the shell's convention, and whether it was asked to stop."""
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
    """Yield the ended processes and their statuses: as a container's first process we also inherit orphans."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found
