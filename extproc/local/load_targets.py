"""Whom `kvmesh load` asks: the running demo or a given server, and what its load is compared with."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from extproc.errors import ConfigError
from extproc.load.asking import Target
from extproc.load.play import Arm
from extproc.local.errors import BadEndpointError
from extproc.local.ready_file import ReadyMesh, running_mesh
from extproc.local.stack_settings import resolve
from kvmesh.pods.pod_access import PodAccess, read_pod_key

USUAL_GATEWAY = "http://127.0.0.1:10000"
ROUND_ROBIN = "round-robin"
OURS = "kvmesh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the command line says of it."""

    server: str | None = None
    beside: str | None = None
    endpoints: str | None = None
    model: str | None = None
    access: PodAccess = field(default_factory=PodAccess)


def choose_arms(wanted: Wanted, *, headers: Mapping[str, str], salt: str) -> tuple[Arm, ...]:
    """Return the arms in the order in which they are played; a model that nobody has named yet is "".

    Each has a salt of its own, so that the first one warms no cache up for the second. Raise ConfigError, or
    SettingError for a key file that cannot be used.
    """
    asked = _base(wanted.server) if wanted.server else None
    mesh = running_mesh(asked)
    key = wanted.access.key_file
    sent = {**headers, **({} if key is None else {"authorization": f"Bearer {read_pod_key(key)}"})}
    model = wanted.model or (mesh.model if mesh else None) or ""
    gateway = asked or (mesh.gateway if mesh else USUAL_GATEWAY)
    first = Arm(
        name=OURS if mesh or asked is None else gateway.partition("://")[2],
        target=Target(urls=(gateway,), model=model, headers=sent),
        salt=f"{salt} 1",
    )
    if wanted.beside is None:
        return (first,)
    is_in_turn = wanted.beside == ROUND_ROBIN
    if not is_in_turn and "://" not in wanted.beside:
        raise ConfigError(f"--beside {wanted.beside}: {ROUND_ROBIN}, or a URL like http://127.0.0.1:10001")
    urls = _pods(wanted, mesh) if is_in_turn else (_base(wanted.beside),)
    name = ROUND_ROBIN if is_in_turn else urls[0].partition("://")[2]
    return (first, Arm(name=name, target=Target(urls=urls, model=model, headers=sent), salt=f"{salt} 2"))


def _pods(wanted: Wanted, mesh: ReadyMesh | None) -> tuple[str, ...]:
    try:
        given = tuple(map(str, resolve(wanted.endpoints or "")))
    except BadEndpointError as error:
        raise ConfigError(f"--endpoints: {error}") from error
    pods = given or (mesh.endpoints if mesh else ())
    if not pods:
        raise ConfigError(
            f"--beside {ROUND_ROBIN}: no `kvmesh up` with this gateway runs here; name the pods with --endpoints"
        )
    return tuple(f"http://{pod}" for pod in pods)


def _base(url: str) -> str:
    """A URL without a path; clients' SDKs are given one with /v1."""
    named = url if "://" in url else f"http://{url}"
    return named.rstrip("/").removesuffix("/v1")
