"""Plays a load for `kvmesh load`, and prints the report.

The targets are the running mesh or a given server, and the server to compare with.
"""

import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.status import Status

from extproc.errors import ConfigError
from kvmesh.output.forms import OutputForm, people_console, print_data
from kvmesh.pods.pod_access import PodAccess, read_pod_key
from operate.load.asking import Target
from operate.load.plan import Load
from operate.load.play import Arm, play, with_model
from operate.load.summary import LoadReport, shown
from operate.local.errors import BadEndpointError
from operate.local.mesh_view import ReadyMesh, running_mesh
from operate.local.stack_settings import resolve

INTERRUPTED = 130  # the shell's exit code for SIGINT
USUAL_GATEWAY = "http://127.0.0.1:10000"
ROUND_ROBIN = "round-robin"
OURS = "kvmesh"
REQUEST_SECONDS = 60.0  # for a whole answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The command line's choice of targets."""

    server: str | None = None
    beside: str | None = None
    endpoints: str | None = None
    model: str | None = None
    access: PodAccess = field(default_factory=PodAccess)


def run_load(
    load: Load,
    wanted: Wanted,
    *,
    headers: Mapping[str, str],
    salt: str,
    seed: int,
    output: OutputForm,
) -> int:
    """Play the load at the chosen targets and print the report. Return the exit code."""
    arms = choose_arms(wanted, headers=headers, salt=salt)
    played = asyncio.run(_play(load, arms))
    report = LoadReport(load=load.title, seed=seed, **played)
    if output is OutputForm.TABLE:
        people_console().print(shown(report))
    else:
        print_data(report, output)
    if report.is_all_answered:
        return 0
    return INTERRUPTED if report.interrupted else 1


def choose_arms(wanted: Wanted, *, headers: Mapping[str, str], salt: str) -> tuple[Arm, ...]:
    """Return the arms in playing order; the model is "" if still unknown.

    Each arm has its own salt, so that the first does not warm caches for the second. Raise ConfigError, or
    SettingError for an unusable key file.
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
    """Strip the /v1 that client SDKs have in their base URL."""
    named = url if "://" in url else f"http://{url}"
    return named.rstrip("/").removesuffix("/v1")


async def _play(load: Load, arms: Sequence[Arm]) -> dict[str, Any]:
    stop, console = asyncio.Event(), Console(stderr=True)
    arms = await with_model(arms)  # no results yet, so Ctrl-C may just end the command
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    status = Status("", console=console)
    if console.is_terminal:
        status.start()
    try:
        summaries = await play(load, arms, request_seconds=REQUEST_SECONDS, tell=status.update, stop=stop)
    finally:
        status.stop()
    return {"model": arms[0].target.model, "interrupted": stop.is_set(), "arms": summaries}
