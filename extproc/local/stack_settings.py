"""The settings of `kvmesh up`: one declaration for its flags, and how names of pods become addresses."""

import functools
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from extproc.local.envoy_config import SocketAddress
from extproc.local.errors import BadEndpointError, BadSettingError
from extproc.settings.config import PolicyFlags
from kvmesh.admin.admin_access import AdminAccess
from kvmesh.pods.pod_access import PodAccess
from kvmesh.redis.address import RedisAccess
from kvmesh.settings import Setting, declared, group, options_of, setting, text_setting

HOST = "127.0.0.1"


class BodyDelivery(StrEnum):
    """How Envoy hands request bodies to the picker; each has its file in `envoy/`."""

    DUPLEX = "duplex"
    BUFFERED = "buffered"

    @property
    def envoy_file(self) -> str:
        """The file's name in `envoy/`."""
        return "local.yaml" if self is BodyDelivery.DUPLEX else "buffered.yaml"


def resolve(endpoints: str) -> tuple[SocketAddress, ...]:
    """Return the address of each entry of `HOST:PORT,…` in that order; IPv4 where a name has both kinds.

    The picker's pick must be the text that Envoy has in its cluster. Raise BadEndpointError.
    """
    entries = [entry.strip() for entry in endpoints.split(",") if entry.strip()]
    addresses = tuple(map(_resolve_one, entries))
    if len(set(addresses)) != len(entries):
        raise BadEndpointError(f"two of --endpoints {endpoints} are the same address")
    return addresses


def resolve_event_sources(text: str, *, endpoints: Sequence[SocketAddress]) -> str:
    """Return --event-sources with the pods' addresses for keys; JSON in and out.

    A key that names no pod stays as it is: a configuration may know more pods than this run uses. Raise
    BadSettingError for what is no JSON mapping, and for two keys of one pod.
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


@functools.cache  # a name with several addresses may give another one when it is asked again
def _resolve_one(entry: str) -> SocketAddress:
    host, _, port = entry.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or (":" in host and not bracketed):
        raise BadEndpointError(f"endpoint {entry!r} is not HOST:PORT (IPv6 as [::1]:8000)")
    written = SocketAddress.parse(entry)
    try:
        found = socket.getaddrinfo(written.host, written.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name that DNS could hold
        raise BadEndpointError(f"endpoint {entry}: {getattr(error, 'strerror', None) or error}") from error
    first = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return SocketAddress(host=str(first[4][0]), port=written.port)


def _port(default: int, text: str) -> int:
    return setting(default, text, least=1, most=65535)


OWN_REDIS = RedisAccess(url="")
REDIS = Setting(
    help="Redis to use: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://. "
    "Default: start one on a free port, without persistence.",
    flag="redis",
    given=str | None,
    shown=None,
    absent=OWN_REDIS.url,
    metavar="URL",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """What the user asked for; `endpoints` are real pods, without them `simulated_pods` are started."""

    simulated_pods: int = setting(4, "Simulated pods to start (without --endpoints).", "pods", least=1, most=64)
    endpoints: tuple[SocketAddress, ...] = text_setting(
        (), "Real vLLM pods to use instead of simulated ones, as HOST:PORT,HOST:PORT,…", read=resolve
    )
    model: str | None = setting(None, "Served model name. Default: the simulated one, or what the first pod says.")
    tokenizer_folder: Path | None = setting(
        None,
        "Folder with the model's tokenizer.json and chat template. Default: the simulated pods' own, or the "
        "folder that the first pod names if it is on this machine; else the pods are asked.",
        "tokenizer",
        must_exist=True,
        is_folder=True,
    )
    event_sources: str | None = setting(
        None,
        "Where real pods publish that have no GET /kv_event_sources (vLLM < 0.31): "
        '{"HOST:PORT": {"events": "tcp://…", "replay": "tcp://…"}}.',
        metavar="JSON",
    )
    redis: RedisAccess = group(OWN_REDIS, url=REDIS)
    pod_access: PodAccess = group(PodAccess())
    admin_token_file: Path | None = declared(AdminAccess, "token_file")
    sample_share: float | None = setting(
        None,
        "Share of the responses that the picker reads. Default: all of simulated pods, else the picker's.",
        least=0,
        most=1,
    )
    policy: str | None = declared(PolicyFlags, "policy")
    envoy_port: int = _port(10000, "Gateway port, where clients connect.")
    envoy_admin_port: int = _port(9901, "Envoy's admin port.")
    grpc_port: int = _port(9002, "Port of the picker for Envoy: ext_proc and gRPC health.")
    admin_port: int = _port(9090, "The picker's admin HTTP port.")
    indexer_admin_port: int = _port(9091, "The indexer's admin HTTP port.")
    sim_port: int = setting(8101, "Port of the first simulated pod; pod i listens on this + i.", least=1, most=65472)
    body_delivery: BodyDelivery = setting(
        BodyDelivery.DUPLEX, "How Envoy sends request bodies to the picker.", "body_mode"
    )
    ready_file: Path | None = setting(
        None, "JSON file with all addresses and pids, there while all is healthy.", is_folder=False
    )
    no_live: bool = setting(False, "No view: print the addresses, then only what becomes of pods.", switch="--no-live")
    chaos: bool = setting(
        False, "Kill a simulated pod now and then; it comes back, empty, a few seconds later.", switch="--chaos"
    )
    chaos_seconds: float = setting(20.0, "Time between two kills of --chaos, in seconds, on average.", least=1)
    log_flags: tuple[str, ...] = ()  # for the processes that are started

    def __post_init__(self) -> None:
        """Raise BadSettingError where options do not go together: those of a Redis that is none, chaos without pods."""
        if not self.redis.url and (flags := [f"--{name.replace('_', '-')}" for name, _ in _given(self.redis)]):
            raise BadSettingError(
                f"{', '.join(flags)} without --redis: the Redis that is started here needs none of it"
            )
        if self.chaos and (self.endpoints or self.simulated_pods < 2):
            raise BadSettingError(
                "--chaos kills simulated pods only, and needs two: leave --endpoints out, give --pods 2"
            )

    @property
    def pods(self) -> tuple[SocketAddress, ...]:
        """The pods' addresses, simulated or real."""
        if self.endpoints:
            return self.endpoints
        return tuple(local(self.sim_port + pod) for pod in range(self.simulated_pods))


def local(port: int) -> SocketAddress:
    """Return the address of a port on this machine."""
    return SocketAddress(host=HOST, port=port)


def completed(settings: StackSettings, *, simulated_tokenizer: Path, log_flags: tuple[str, ...]) -> StackSettings:
    """Fill in what depends on other settings. Raise BadSettingError."""
    sources = settings.event_sources
    if sources is not None:
        sources = resolve_event_sources(sources, endpoints=settings.endpoints)
    simulated = not settings.endpoints
    return replace(
        settings,
        model=settings.model or ("tiny" if simulated else None),
        tokenizer_folder=settings.tokenizer_folder or (simulated_tokenizer if simulated else None),
        event_sources=sources,
        # of few answers a small share would show nothing
        sample_share=1.0 if simulated and settings.sample_share is None else settings.sample_share,
        log_flags=log_flags,
    )


def redis_environment(access: RedisAccess) -> Mapping[str, str]:
    """Return the variables that tell a child how to reach Redis; files by their full path.

    Not its flags, which every user of the machine can read.
    """
    variables = {"redis": access.url, **dict(_given(access))}
    return {
        f"KVMESH_{name.upper()}": str(value.resolve() if isinstance(value, Path) else value)
        for name, value in variables.items()
    }


def _given(access: RedisAccess) -> list[tuple[str, str | Path]]:
    """Return what is given beside the address, by the names of the options."""
    given = {option.flag: getattr(access, name) for name, option in options_of(RedisAccess).items() if name != "url"}
    return [(flag, value) for flag, value in given.items() if value]
