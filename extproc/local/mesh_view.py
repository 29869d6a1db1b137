"""What a person sees of one `kvmesh up`: the start, the greeting, what becomes of pods, and the live view."""

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from extproc.local.errors import UpError
from extproc.local.first_steps import load_command, write_examples
from extproc.local.greeting import greeting
from extproc.local.live_view import local_zone, show_live
from extproc.local.ready_file import ready_facts, write_ready_file
from extproc.local.stack_settings import StackSettings, local
from extproc.local.unread_terminal import standard_output
from extproc.settings.running_mesh import READY_NAME, running_meshes
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.output.standard_output import losing


class MeshView:
    """Prints it, and keeps the ready files. `pids` gives the processes of now, `redis` is Redis' address."""

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
        """Say on a terminal what starts, until the greeting or the end."""
        self._status.update(f"starting {', '.join(names)}")
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._status.start()
        try:
            yield
        finally:
            self._status.stop()

    def greet(self) -> None:
        """All is healthy: write the ready file, and say where everything is."""
        self._status.stop()
        try:
            write_examples(self._folder, model=self._settings.model or "")
            facts = self._write_facts()
        except OSError as error:
            raise UpError(f"{error.filename or self._folder} cannot be written: {error.strerror}") from error
        self._above = greeting(
            facts,
            log_directory=str(self._folder),
            notes=self._notes,
            load=load_command(self._settings, others_run=len(running_meshes()) > 1),
        )
        for line in self._above:
            self._console.print(line, soft_wrap=True)
        if not self._console.is_terminal:  # a full disk, or a reader that has gone, must not end what serves
            self._console.file = losing(sys.stdout, name="kvmesh up")

    def tell(self, name: str, what: str) -> None:
        """Say what has become of a process, above the live view."""
        pods = {f"pod-{number}": str(pod) for number, pod in enumerate(self._settings.pods)}
        whose = f"{name} ({pods[name]})" if name in pods else name
        now = datetime.now(local_zone())
        self._console.print(Text(f"{now:%H:%M:%S} {whose} {what}", style="yellow"), soft_wrap=True)
        try:
            self._write_facts()  # its process is another one now
        except OSError as error:
            self._console.print(Text(f"the ready file cannot be written anew: {error.strerror}", style="red"))

    async def show(self) -> None:
        """Show the mesh live, or nothing, until cancelled."""
        if self._settings.no_live:
            await asyncio.Event().wait()
        login = AdminLogin(token_file=self._settings.admin_token_file)
        admin = f"http://{local(self._settings.admin_port)}"
        await show_live(admin, console=self._console, above=self._above, login=login)

    def _write_facts(self) -> dict[str, object]:
        facts = ready_facts(self._settings, redis=self._redis, pids=self._pids())
        write_ready_file(self._folder / READY_NAME, facts)  # where other commands look
        if self._settings.ready_file is not None:
            write_ready_file(self._settings.ready_file, facts)
        return facts
