"""Connects the parts of `kvmesh up`: checks, prepares, starts, reports, waits for the end.

Called by `command` inside asyncio.run. Every decision is made elsewhere: `stack` plans, `processes` supervises.
"""

import asyncio
import importlib.util
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from extproc.local.envoy_config import fill_in, read_template
from extproc.local.greeting import greeting
from extproc.local.live_view import show_live
from extproc.local.ports import pick_free_port, require_free
from extproc.local.processes import Supervisor
from extproc.local.programs import find_envoy, find_redis_server
from extproc.local.readiness import RedisReady, wait_until_ready
from extproc.local.ready_file import ready_facts, remove_stale, temporary_path, write_ready_file
from extproc.local.redis_choice import redis_label, require_redis
from extproc.local.run_directory import run_directory
from extproc.local.served_model import fill_in_model, first_served_models
from extproc.local.stack import HOST, LocalParts, StackSettings, fixed_ports, plan
from extproc.local.unread_terminal import standard_output
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.redis.address import RedisAccess

EXTERNAL_REDIS_SECONDS = 10.0


async def run(settings: StackSettings, *, ready_path: Path | None, live: bool) -> None:
    """Run the mesh until SIGINT, SIGTERM or SIGHUP; raise UpError if it cannot start or a child ends.

    In every case all children have ended and all files are gone when this returns.
    """
    if settings.redis is not None:
        require_redis(settings.redis, flag="--redis")
    require_free(fixed_ports(settings), host=HOST)
    doomed: tuple[Path, ...] = ()
    if ready_path is not None:
        remove_stale(ready_path)
        doomed = (ready_path, temporary_path(ready_path))
    told_to_end = _cancel_on_signals()
    with run_directory(also_remove=doomed) as directory:
        try:
            parts = await _prepare(settings, directory)
            notes: tuple[str, ...] = ()
            if settings.endpoints and (settings.model is None or settings.tokenizer_folder is None):
                settings, notes = fill_in_model(settings, await first_served_models(settings.endpoints))
            await _supervise(settings, parts, notes=notes, ready_path=ready_path, live=live)
        except asyncio.CancelledError:
            if not told_to_end.is_set():
                raise


def simulated_tokenizer() -> Path:
    """The folder with the tokenizer that the simulated pods use."""
    # found by name: the picker's package must not import the simulator
    spec = importlib.util.find_spec("podsim")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "tiny_model"


async def _prepare(settings: StackSettings, directory: Path) -> LocalParts:
    """Find the programs, choose Redis, write Envoy's configuration."""
    envoy_program = find_envoy()
    redis_program = None if settings.redis else find_redis_server()
    taken = {use.port for use in fixed_ports(settings)}
    redis_port = pick_free_port(host=HOST, avoid=taken)
    redis = settings.redis or RedisAccess(url=f"redis://{HOST}:{redis_port}/0")
    if settings.redis:
        condition = RedisReady(access=redis)
        await wait_until_ready(condition, name="the Redis of --redis", within_seconds=EXTERNAL_REDIS_SECONDS)
    config = fill_in(
        read_template(settings.body_delivery.envoy_file),
        gateway=settings.gateway,
        admin=settings.envoy_admin,
        picker=settings.picker,
        pods=settings.pods,
    )
    envoy_config = directory / "envoy.json"
    envoy_config.write_text(json.dumps(config, indent=2), encoding="utf-8")
    return LocalParts(
        run_directory=directory,
        envoy_program=envoy_program,
        envoy_config=envoy_config,
        redis_program=redis_program,
        redis=redis,
        redis_port=redis_port,
    )


async def _supervise(
    settings: StackSettings, parts: LocalParts, *, notes: Sequence[str], ready_path: Path | None, live: bool
) -> None:
    supervisor = Supervisor(log_directory=parts.run_directory)
    console = Console(file=standard_output())

    async def when_ready() -> None:
        facts = ready_facts(settings, redis=redis_label(parts.redis), pids=supervisor.pids)
        if ready_path is not None:
            write_ready_file(ready_path, facts)
        lines = greeting(facts, log_directory=str(parts.run_directory), model=settings.model or "", notes=notes)
        for line in lines:
            console.print(line, soft_wrap=True)
        if live:
            login = AdminLogin(token_file=settings.admin_token_file)
            await show_live(str(facts["admin"]), console=console, above=lines, login=login)
        else:
            await asyncio.Event().wait()  # until a signal cancels this or a child ends

    await supervisor.run(plan(settings, parts), environment=os.environ, when_ready=when_ready)


def _cancel_on_signals() -> asyncio.Event:
    """Make the first signal cancel this task; later ones change nothing, the children's end has its own deadline."""
    task = asyncio.current_task()
    assert task is not None
    told_to_end = asyncio.Event()

    def end() -> None:
        if not told_to_end.is_set():
            told_to_end.set()
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, end)
    return told_to_end
