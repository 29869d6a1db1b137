"""The settings of `kvmesh up` (declared once, as flags), and readers of durations and pod names."""

import functools
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from extproc.errors import ConfigError
from extproc.settings.config import PolicyFlags
from kvmesh.admin.admin_access import AdminAccess
from kvmesh.pods.pod_access import PodAccess
from kvmesh.settings import declared, group, setting, text_setting
from operate.local.envoy_config import SocketAddress
from operate.local.errors import BadEndpointError, BadSettingError
from operate.local.ports import MeshPorts

HOST = "127.0.0.1"
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
MOST_SECONDS = 7 * 86_400.0


class BodyDelivery(StrEnum):
    """How Envoy sends request bodies to the picker; each mode has a file in `envoy/`."""

    DUPLEX = "duplex"
    BUFFERED = "buffered"

    @property
    def envoy_file(self) -> str:
        """The mode's file name in `envoy/`."""
        return "local.yaml" if self is BodyDelivery.DUPLEX else "buffered.yaml"


def seconds_of(text: str, *, flag: str) -> float:
    """Parse a duration like 90s, 15m, 1h, 2d, or a number of seconds. Raise ConfigError."""
    unit = UNITS.get(text[-1:])
    try:
        seconds = float(text[:-1]) * unit if unit is not None else float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 < seconds <= MOST_SECONDS:
        raise ConfigError(f"{flag} {text!r}: a duration up to 7d is needed, like 90s, 15m or 1h")
    return seconds


def resolve(endpoints: str) -> tuple[SocketAddress, ...]:
    """Resolve the entries of `HOST:PORT,…` in order; IPv4 is preferred.

    Envoy and the picker need the same text for a pod, so both get the resolved address. Raise BadEndpointError.
    """
    entries = [entry.strip() for entry in endpoints.split(",") if entry.strip()]
    addresses = tuple(map(_resolve_one, entries))
    if len(set(addresses)) != len(entries):
        raise BadEndpointError(f"two of --endpoints {endpoints} are the same address")
    return addresses


def resolve_event_sources(text: str, *, endpoints: Sequence[SocketAddress]) -> str:
    """Return --event-sources (JSON) with its keys resolved to the pods' addresses.

    Keys of unknown pods are kept: the configuration may list more pods than this run uses. Raise BadSettingError
    unless it is a JSON mapping with at most one key per pod.
    """
    try:
        sources = json.loads(text or "{}")
    except ValueError as error:
        raise BadSettingError(f"--event-sources is not JSON: {error}") from None
    if not isinstance(sources, Mapping):
        raise BadSettingError(f"--event-sources must map HOST:PORT to addresses, not be {text}")
    resolved = {_pod_key(key, endpoints=endpoints): entry for key, entry in sources.items()}
    if len(resolved) != len(sources):
        raise BadSettingError(f"two keys of --event-sources are the same pod: {', '.join(sources)}")
    return json.dumps(resolved)


def _pod_key(written: str, *, endpoints: Sequence[SocketAddress]) -> str:
    if not endpoints:
        return written
    try:
        address = _resolve_one(written)
    except BadEndpointError:
        return written
    return str(address) if address in endpoints else written


@functools.cache  # repeated resolution of a name with several addresses may return a different one
def _resolve_one(entry: str) -> SocketAddress:
    host, _, port = entry.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or (":" in host and not bracketed):
        raise BadEndpointError(f"endpoint {entry!r} is not HOST:PORT (IPv6 as [::1]:8000)")
    written = SocketAddress.parse(entry)
    try:
        found = socket.getaddrinfo(written.host, written.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid DNS name
        raise BadEndpointError(f"endpoint {entry}: {getattr(error, 'strerror', None) or error}") from error
    first = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return SocketAddress(host=str(first[4][0]), port=written.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """The user's choices; without `endpoints` (real pods), `simulated_pods` are started."""

    simulated_pods: int = setting(4, "Simulated pods to start (without --endpoints).", "pods", least=1, most=64)
    endpoints: tuple[SocketAddress, ...] = text_setting(
        (), "Real vLLM pods instead of simulated ones, as HOST:PORT,HOST:PORT,…", read=resolve
    )
    model: str | None = setting(None, "Served model name. Default: the simulated or the first pod's.")
    tokenizer_folder: Path | None = setting(
        None,
        "Folder with the model's tokenizer.json and chat template. Default: that of the simulated pods, or "
        "the first pod's if it is on this machine; else the pods tokenize.",
        "tokenizer",
        must_exist=True,
        is_folder=True,
    )
    event_sources: str | None = setting(
        None,
        'Event addresses of pods without GET /kv_event_sources (vLLM < 0.31): {"HOST:PORT": {"events": '
        '"tcp://…", "replay": "tcp://…"}}.',
        metavar="JSON",
    )
    redis: str = text_setting(
        "",
        "Redis to use: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://. "
        "Default: start one on a free port, without persistence.",
        read=str,
        secret=True,
        metavar="URL",
    )
    pod_access: PodAccess = group(PodAccess())
    admin_token_file: Path | None = declared(AdminAccess, "token_file")
    sample_share: float | None = setting(
        None,
        "Share of responses that the picker reads. Default: all with simulated pods, else the picker's.",
        least=0,
        most=1,
    )
    policy: str | None = declared(PolicyFlags, "policy")
    ports: MeshPorts = setting(
        MeshPorts(),
        "First of neighbouring ports: gateway, Envoy's admin page, picker (gRPC), picker's and indexer's admin pages, "
        "simulated pods. Default: 10000, 9901, 9002, 9090, 9091, 8101.",
        "port_base",
        given=int | None,
        shown=None,
        read=MeshPorts.starting_at,
        least=1,
        most=65467,
    )
    body_delivery: BodyDelivery = setting(
        BodyDelivery.DUPLEX, "Transfer of request bodies from Envoy to the picker.", "body_mode"
    )
    ready_file: Path | None = setting(
        None, "JSON file with all addresses and pids; exists while all is healthy.", is_folder=False
    )
    no_live: bool = setting(False, "Print addresses and changes of pods instead of the live view.", switch="--no-live")
    chaos: float | None = setting(
        None,
        "Mean seconds between two kills of a simulated pod; it returns empty after 5 s. Default: none.",
        least=1,
        metavar="SECONDS",
    )
    shared_flags: tuple[str, ...] = ()  # passed to the child processes

    def __post_init__(self) -> None:
        if self.chaos and (self.endpoints or self.simulated_pods < 2):
            raise BadSettingError(
                "--chaos kills simulated pods only, and needs two: leave --endpoints out, give --pods 2"
            )

    @property
    def pods(self) -> tuple[SocketAddress, ...]:
        """The pods' addresses, simulated or real."""
        if self.endpoints:
            return self.endpoints
        return tuple(local(self.ports.pods + pod) for pod in range(self.simulated_pods))


def local(port: int) -> SocketAddress:
    """Return the loopback address with this port."""
    return SocketAddress(host=HOST, port=port)


def completed(settings: StackSettings, *, simulated_tokenizer: Path, shared_flags: tuple[str, ...]) -> StackSettings:
    """Fill in the defaults that depend on other settings. Raise BadSettingError."""
    sources = settings.event_sources
    if sources is not None:
        sources = resolve_event_sources(sources, endpoints=settings.endpoints)
    simulated = not settings.endpoints
    return replace(
        settings,
        model=settings.model or ("tiny" if simulated else None),
        tokenizer_folder=settings.tokenizer_folder or (simulated_tokenizer if simulated else None),
        event_sources=sources,
        # a demo has few responses: a small sample would be empty
        sample_share=1.0 if simulated and settings.sample_share is None else settings.sample_share,
        shared_flags=shared_flags,
    )
