"""The one directory that holds everything `kvmesh up` writes, and the guard that removes it whatever happens.

Used by `command` around the whole run. The guard is a shell that waits for the end of a pipe whose only other end is
in this process: when this process ends in any way, SIGKILL included, the guard removes the files and ends too.
"""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GUARD_SCRIPT = 'trap "" HUP INT TERM; cat >/dev/null; rm -rf -- "$@"'
GUARD_SECONDS = 10


@contextmanager
def run_directory(*, also_remove: tuple[Path, ...] = ()) -> Iterator[Path]:
    """A new directory for the run; it and the files of `also_remove` are gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="kvmesh-up-"))
    doomed = [str(entry.absolute()) for entry in (path, *also_remove)]
    guard = subprocess.Popen(
        ["/bin/sh", "-c", GUARD_SCRIPT, "kvmesh-guard", *doomed],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal must not reach it
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},  # where rm is, whatever the user's PATH says
    )
    try:
        yield path
    finally:
        # closes the pipe, which is the guard's sign to clear up
        guard.communicate(timeout=GUARD_SECONDS)
