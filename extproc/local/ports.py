"""TCP ports on this machine: are the fixed ones free, and which one is free for what has no fixed port.

Asked before anything starts, so that a taken port is one clear line and not a child's stack trace.
"""

import errno
import random
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def require_free(uses: Sequence[PortUse], *, host: str, meshes: Sequence[Mapping[str, Any]] = ()) -> None:
    """Raise PortInUseError for all ports that are taken, or UpError for one that is asked for twice.

    `meshes` are the ready files of those that run: one of them may be who has the ports.
    """
    by_port: dict[int, PortUse] = {}
    refused: list[tuple[PortUse, OSError]] = []
    for use in uses:
        other = by_port.setdefault(use.port, use)
        if other is not use:
            raise UpError(
                f"port {use.port} is asked for twice: {other.purpose} ({other.flag}) and {use.purpose} ({use.flag})"
            )
        if (error := _refused(use.port, host=host, after_others=True)) is not None:
            refused.append((use, error))
    if refused:
        raise PortInUseError(refusal_words(refused, meshes=meshes)) from refused[0][1]


def refusal_words(refused: Sequence[tuple[PortUse, OSError]], *, meshes: Sequence[Mapping[str, Any]]) -> str:
    """Name each port that cannot be used, why, the flag that moves it, and the other mesh that has it."""
    by_reason: dict[int | None, list[tuple[PortUse, OSError]]] = {}
    for use, error in refused:
        by_reason.setdefault(error.errno, []).append((use, error))
    each = [_of_one_reason(same) for same in by_reason.values()]
    flags = list(dict.fromkeys(use.flag for use, _ in refused))
    other = f"choose {'another' if len(flags) == 1 else 'others'} with {', '.join(flags)}"
    taken = {str(use.port) for use, _ in refused}
    gateways = [str(mesh.get("gateway")) for mesh in meshes if taken & _ports_of(mesh)]
    if not gateways:
        return f"{', '.join(each)}; {other}"
    return f"{', '.join(each)}; another `kvmesh up` seems to run ({', '.join(gateways)}): end it, or {other}"


def _of_one_reason(refused: Sequence[tuple[PortUse, OSError]]) -> str:
    uses, error = ", ".join(f"{use.port} for {use.purpose}" for use, _ in refused), refused[0][1]
    noun, verb = ("port", "is") if len(refused) == 1 else ("ports", "are")
    why = f"{verb} already in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
    return f"{noun} {uses} {why}"


def _ports_of(mesh: Mapping[str, Any]) -> set[str]:
    """The ports in a ready file: those of its URLs and of the pods, real ones too."""
    pods = mesh.get("endpoints")
    addresses = [*mesh.values(), *(pods if isinstance(pods, list) else ())]
    return {each.rpartition(":")[2] for each in addresses if isinstance(each, str)}


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
