"""TCP ports on this machine: are the fixed ones free, and which one is free for what has no fixed port.

Called by `command` before anything starts, so that a taken port is one clear line and not a child's stack trace.
"""

import errno
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from extproc.local.errors import PortInUseError, UpError

ATTEMPTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PortUse:
    """A port that one of the children will listen on, and the flag that moves it."""

    port: int
    purpose: str
    flag: str


def require_free(uses: Sequence[PortUse], *, host: str) -> None:
    """Raise PortInUseError for the first port that is taken, or UpError for one that is asked for twice."""
    by_port: dict[int, PortUse] = {}
    for use in uses:
        other = by_port.setdefault(use.port, use)
        if other is not use:
            raise UpError(
                f"port {use.port} is asked for twice: {other.purpose} ({other.flag}) and {use.purpose} ({use.flag})"
            )
        _require_free(use, host=host)


def pick_free_port(*, host: str, avoid: Collection[int]) -> int:
    """A port that nobody listens on now and that is not in `avoid`."""
    for _ in range(ATTEMPTS):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            port: int = probe.getsockname()[1]
        if port not in avoid:
            return port
    raise UpError(f"no free port found on {host} in {ATTEMPTS} attempts")


def _require_free(use: PortUse, *, host: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # connections of a stack that has just ended (TIME_WAIT) do not make the port taken; a listener does
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, use.port))
        except OSError as error:
            why = "is already in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            raise PortInUseError(f"port {use.port} for {use.purpose} {why}; choose another with {use.flag}") from error
