"""The tests' side of `fork_server`: one fork server for each PYTHONPATH, kept until the test run ends."""

import atexit
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

SCRIPT = Path(__file__).with_name("fork_server.py")
START_SECONDS = 240.0  # an import takes 12 s on an idle machine
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LIBC = ctypes.CDLL(None)
SERVERS: "dict[str, ForkServer]" = {}  # by PYTHONPATH


class ForkedProcess:
    """A process that is not our child: its exit status belongs to the fork server."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._descriptor: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._descriptor = None

    def has_ended(self, *, wait_seconds: float = 0.0) -> bool:
        """Whether it has ended, after at most this time."""
        if self._descriptor is not None and select.select([self._descriptor], [], [], wait_seconds)[0]:
            os.close(self._descriptor)
            self._descriptor = None
        return self._descriptor is None


class ForkServer:
    """Starts servers from one process that has imported vLLM; it ends with this one, and its servers with it."""

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.settimeout(START_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [python, str(SCRIPT)],
                env=dict(environment),
                stdin=theirs.fileno(),
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one call into a library that is already loaded
            )
        atexit.register(self.stop)

    def start(self, arguments: Sequence[str], *, environment: Mapping[str, str], log: int) -> ForkedProcess:
        """Start one server in a session of its own and return at once. `log` is a file's descriptor."""
        message = json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode()
        with self._lock:
            socket.send_fds(self._requests, [message], [log])
            answer = self._requests.recv(64)
        assert answer, f"the fork server has ended with {self._process.wait()}"
        return ForkedProcess(json.loads(answer))

    def stop(self) -> None:
        self._requests.close()
        self._process.kill()
        self._process.wait()


def fork_server(python: Path, environment: Mapping[str, str]) -> ForkServer:
    """Return the fork server that imports from the same folders as a server with this environment would."""
    path = environment["PYTHONPATH"]
    if path not in SERVERS:
        SERVERS[path] = ForkServer(str(python), environment)
    return SERVERS[path]


def die_with_parent() -> None:
    """Ask the kernel to end the process when the test run is killed and cannot clean up."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
