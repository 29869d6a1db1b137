"""TCP ports on this machine: checks that the fixed ones are free, and picks free ones.

Ports are checked before the start, so that a taken port is one clear message and not a child's traceback.
"""

import errno
import random
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from operate.local.errors import PortInUseError, UpError

ATTEMPTS = 100
LOWEST_FREE_PORT = 10240
OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUAL_FIRST_OUTGOING_PORT = 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPorts:
    """The fixed ports of a mesh."""

    gateway: int = 10000
    envoy_admin: int = 9901
    grpc: int = 9002
    admin: int = 9090
    indexer_admin: int = 9091
    pods: int = 8101  # of the first simulated pod; pod i listens on this + i

    @classmethod
    def starting_at(cls, base: int) -> Self:
        """Return neighbouring ports from `base` on."""
        return cls(**{each.name: base + offset for offset, each in enumerate(fields(cls))})


@dataclass(frozen=True, slots=True, kw_only=True)
class PortUse:
    """A child's port."""

    port: int
    purpose: str


def require_free(uses: Sequence[PortUse], *, host: str, meshes: Sequence[Mapping[str, Any]] = ()) -> None:
    """Raise PortInUseError if ports are taken.

    `meshes` are the ready files of the running meshes, one of which may hold the ports.
    """
    asked = ((use, _refused(use.port, host=host, after_others=True)) for use in uses)
    refused = [(use, error) for use, error in asked if error is not None]
    if refused:
        raise PortInUseError(refusal_words(refused, meshes=meshes)) from refused[0][1]


def refusal_words(refused: Sequence[tuple[PortUse, OSError]], *, meshes: Sequence[Mapping[str, Any]]) -> str:
    """Name each unusable port, the reason, and the mesh that holds it."""
    by_reason: dict[int | None, list[tuple[PortUse, OSError]]] = {}
    for use, error in refused:
        by_reason.setdefault(error.errno, []).append((use, error))
    each = [_of_one_reason(same) for same in by_reason.values()]
    other = "choose others with --port-base"
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
    """Return the ports in a ready file: of its URLs and of its pods, simulated or real."""
    pods = mesh.get("endpoints")
    addresses = [*mesh.values(), *(pods if isinstance(pods, list) else ())]
    return {each.rpartition(":")[2] for each in addresses if isinstance(each, str)}


def pick_free_port(*, host: str, avoid: Collection[int], count: int = 1) -> int:
    """Return a free port that is not in `avoid`: the first of `count` neighbours.

    They lie below the ephemeral port range, because an outgoing connection could take one before the listener does.
    """
    pickable = pickable_ports()
    for _ in range(ATTEMPTS):
        first = random.choice(pickable)  # noqa: S311
        row = range(first, first + count)
        if row[-1] in pickable and not any(port in avoid or _refused(port, host=host) for port in row):
            return first
    raise UpError(f"no free port found on {host} in {ATTEMPTS} attempts")


def pickable_ports() -> Sequence[int]:
    """Return the ports below the kernel's ephemeral range."""
    try:
        first_outgoing = int(OUTGOING_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        first_outgoing = USUAL_FIRST_OUTGOING_PORT
    # if nearly all ports are ephemeral, any port has to do
    return range(LOWEST_FREE_PORT, first_outgoing if first_outgoing > LOWEST_FREE_PORT + ATTEMPTS else 1 << 16)


def _refused(port: int, *, host: str, after_others: bool = False) -> OSError | None:
    """Return why the port cannot be bound; `after_others`: ignore an ended program's connections in TIME_WAIT."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if after_others:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None
