"""TCP ports on this machine: are the fixed ones free, and which one is free for what has no fixed port.

Asked before anything starts, so that a taken port is one clear line and not a child's stack trace.
"""

import errno
import random
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from extproc.local.errors import PortInUseError, UpError

ATTEMPTS = 100
LOWEST_FREE_PORT = 10240
OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUAL_FIRST_OUTGOING_PORT = 32768


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
        if (error := _refused(use.port, host=host, after_others=True)) is not None:
            why = "is already in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            raise PortInUseError(f"port {use.port} for {use.purpose} {why}; choose another with {use.flag}") from error


def pick_free_port(*, host: str, avoid: Collection[int]) -> int:
    """A port that no program listens on now and that is not in `avoid`.

    It lies below the ports that the kernel gives to outgoing connections: one of those could take it before its
    listener does.
    """
    for _ in range(ATTEMPTS):
        port = random.choice(pickable_ports())  # noqa: S311
        if port not in avoid and _refused(port, host=host) is None:
            return port
    raise UpError(f"no free port found on {host} in {ATTEMPTS} attempts")


def pickable_ports() -> Sequence[int]:
    """The ports below those that the kernel gives to outgoing connections."""
    try:
        first_outgoing = int(OUTGOING_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        first_outgoing = USUAL_FIRST_OUTGOING_PORT
    # a machine that gives away nearly all ports leaves no range of our own
    return range(LOWEST_FREE_PORT, first_outgoing if first_outgoing > LOWEST_FREE_PORT + ATTEMPTS else 1 << 16)


def _refused(port: int, *, host: str, after_others: bool = False) -> OSError | None:
    """Return why the port cannot be listened on; `after_others`: connections of an ended program do not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if after_others:  # they are in TIME_WAIT
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None
