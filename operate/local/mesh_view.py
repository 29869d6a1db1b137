"""The output of `kvmesh up`: progress of the start, greeting, ended and restarted processes, and the live view.

`kvmesh up` describes the running mesh in a ready file, for other commands of the same user.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

import msgspec
from rich.console import Console
from rich.text import Text

from extproc.errors import ConfigError
from extproc.settings.running_mesh import READY_NAME, running_meshes
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.output.standard_output import losing
from operate.local.errors import UpError
from operate.local.greeting import greeting, load_command, write_examples
from operate.local.live_view import local_zone
from operate.local.stack_settings import StackSettings, local
from operate.local.top_view import Look, show_live
from operate.local.unread_terminal import standard_output


class ReadyMesh(msgspec.Struct, frozen=True):
    """The fields of a ready file that commands need."""

    gateway: str
    model: str | None = None
    endpoints: tuple[str, ...] = ()


def running_mesh(gateway: str | None) -> ReadyMesh | None:
    """Return the running mesh with that gateway (or the only one if `gateway` is None), or None.

    Raise ConfigError if several match.
    """
    found = []
    for facts in running_meshes():
        with suppress(msgspec.ValidationError):  # written by another release
            found.append(msgspec.convert(facts, ReadyMesh))
    found = [mesh for mesh in found if gateway in (None, mesh.gateway)]
    if len(found) > 1:
        names = ", ".join(mesh.gateway for mesh in found)
        raise ConfigError(f"several meshes run on this machine: choose with --server: {names}")
    return found[0] if found else None


def temporary_path(path: Path) -> Path:
    """Return the temporary name under which the file is written before its rename."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def ready_facts(settings: StackSettings, *, redis: str, pids: Mapping[str, int]) -> dict[str, object]:
    """Return the content: URLs, but ip:port for `extproc` (gRPC) and `endpoints`; `redis` is without its password."""
    return {
        "gateway": f"http://{local(settings.ports.gateway)}",
        "admin": f"http://{local(settings.ports.admin)}",
        "extproc": str(local(settings.ports.grpc)),
        "indexer_admin": f"http://{local(settings.ports.indexer_admin)}",
        "redis": redis,
        "envoy_admin": f"http://{local(settings.ports.envoy_admin)}",
        "endpoints": [str(pod) for pod in settings.pods],
        "model": settings.model,
        "pids": dict(pids),
    }


def remove_stale(path: Path) -> None:
    """Remove an earlier run's file, because its presence means ready. Raise UpError if it cannot be written."""
    try:
        path.unlink(missing_ok=True)
        _new_file(temporary_path(path)).close()  # fail before the start, not after it, if the folder is not writable
    except OSError as error:
        raise UpError(f"the ready file {path} cannot be written: {error.strerror}") from error


def write_ready_file(path: Path, facts: Mapping[str, object]) -> None:
    """Write the file atomically (temporary name, then rename)."""
    temporary = temporary_path(path)
    with _new_file(temporary) as file:
        file.write(json.dumps(facts, indent=2) + "\n")
    temporary.replace(path)


def _new_file(path: Path) -> IO[str]:
    """Open a new file for writing; a link that somebody else has put there is not followed."""
    path.unlink(missing_ok=True)
    return path.open("x", encoding="utf-8")


class MeshView:
    """Prints the output and updates the ready files. `pids` returns the current pids, `redis` is its address."""

    def __init__(
        self,
        settings: StackSettings,
        *,
        folder: Path,
        redis: str,
        notes: Sequence[str],
        pids: Callable[[], Mapping[str, int]],
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._redis = redis
        self._notes = notes
        self._pids = pids
        self._console = Console(file=standard_output())
        self._status = self._console.status("")
        self._above: list[Text] = []

    @contextmanager
    def starting(self, names: Sequence[str]) -> Iterator[None]:
        """Show a progress line on a terminal until the greeting or the end."""
        self._status.update(f"starting {', '.join(names)}")
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._status.start()
        try:
            yield
        finally:
            self._status.stop()

    def greet(self) -> None:
        """Print the greeting and then write the ready file, once the mesh is healthy. Raise UpError."""
        self._status.stop()
        try:
            write_examples(self._folder, model=self._settings.model or "")
            self._above = greeting(
                self._write_facts(),
                log_directory=str(self._folder),
                notes=self._notes,
                load=load_command(self._settings, others_run=len(running_meshes()) > 1),
            )
            for line in self._above:
                self._console.print(line, soft_wrap=True)
            self._write_facts()
        except OSError as error:
            raise UpError(f"{error.filename or self._folder} cannot be written: {error.strerror}") from error
        if not self._console.is_terminal:  # a full disk or a closed pipe must not end the mesh
            self._console.file = losing(sys.stdout, name="kvmesh up")

    def tell(self, name: str, what: str) -> None:
        """Report a process' end or restart above the live view."""
        pods = {f"pod-{number}": str(pod) for number, pod in enumerate(self._settings.pods)}
        whose = f"{name} ({pods[name]})" if name in pods else name
        now = datetime.now(local_zone())
        self._console.print(Text(f"{now:%H:%M:%S} {whose} {what}", style="yellow"), soft_wrap=True)
        try:
            self._write_facts()  # its pid has changed
        except OSError as error:
            self._console.print(Text(f"the ready file cannot be written anew: {error.strerror}", style="red"))

    async def show(self) -> None:
        """Show the live view (or nothing with --no-live) until cancelled."""
        if self._settings.no_live:
            await asyncio.Event().wait()
        login = AdminLogin(token_file=self._settings.admin_token_file)
        admin = f"http://{local(self._settings.ports.admin)}"
        look = Look(title="", closing="Ctrl-C ends everything", above=self._above, is_full_screen=False)
        await show_live([admin], pool=None, login=login, console=self._console, look=look)

    def _write_facts(self) -> dict[str, object]:
        facts = ready_facts(self._settings, redis=self._redis, pids=self._pids())
        write_ready_file(self._folder / READY_NAME, facts)  # for `kvmesh load` and `kvmesh doctor`
        if self._settings.ready_file is not None and self._above:  # who waits for it may read the greeting
            write_ready_file(self._settings.ready_file, facts)
        return facts
