"""Runs `kvmesh up`: which processes make up the mesh, with which flags, in which order; and the run from check to end.

Everything that is written lies in one directory, which a guard removes: a shell that waits for the end of a pipe whose
only other end is in this process. When this process ends in any way, SIGKILL included, the guard removes the files and
ends too.
"""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from extproc.local.chaos import kill_now_and_then
from extproc.local.envoy_config import SocketAddress, fill_in, read_template
from extproc.local.errors import BadSettingError, UnnamedModelError
from extproc.local.mesh_view import MeshView
from extproc.local.ports import PortUse, pick_free_port, require_free
from extproc.local.processes import (
    GrpcReady,
    HttpReady,
    ProcessSpec,
    RedisReady,
    Supervisor,
    find_envoy,
    find_redis_server,
    wait_until_ready,
)
from extproc.local.ready_file import remove_stale, temporary_path
from extproc.local.stack_settings import HOST, StackSettings, local, redis_environment
from extproc.prompts.tokenizer_folder import has_tokenizer, why_not_readable
from extproc.settings.running_mesh import RUN_PREFIX, running_meshes
from kvmesh.errors import RedisUrlError
from kvmesh.plain_text import printable
from kvmesh.pods.http_response import HttpResponseError
from kvmesh.pods.pod_access import PodAccess, read_pod_key
from kvmesh.pods.pod_http import MAX_MODELS_BYTES, PodPages
from kvmesh.pods.pod_key import open_key
from kvmesh.redis.address import RedisAccess, read_address

EXTERNAL_REDIS_SECONDS = 10.0
ASK_SECONDS = 2.0
POD_RESTART_SECONDS = 5.0  # long enough to see what the others do meanwhile
KVMESH = (sys.executable, "-m", "extproc")
GUARD_SCRIPT = 'trap "" HUP INT TERM; cat >/dev/null; rm -rf -- "$@"'
GUARD_SECONDS = 10
PODS_ARE_ASKED = "the pods are asked for each prompt's tokens, which takes milliseconds; --tokenizer names a folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParts:
    """What was found or made on this machine for one run."""

    run_directory: Path
    envoy_program: Path
    envoy_config: Path
    redis_program: Path | None  # None: --redis names another one
    redis: RedisAccess
    redis_port: int


def fixed_ports(settings: StackSettings) -> tuple[PortUse, ...]:
    """The ports that the children will listen on, in the order in which a user would look at them."""
    uses = [
        (settings.envoy_port, "the gateway (Envoy)", "--envoy-port"),
        (settings.envoy_admin_port, "Envoy's admin page", "--envoy-admin-port"),
        (settings.grpc_port, "the picker's gRPC", "--grpc-port"),
        (settings.admin_port, "the picker's admin page", "--admin-port"),
        (settings.indexer_admin_port, "the indexer's admin page", "--indexer-admin-port"),
    ]
    if not settings.endpoints:
        uses += [(pod.port, f"simulated pod {number}", "--sim-port") for number, pod in enumerate(settings.pods)]
    return tuple(PortUse(port=port, purpose=purpose, flag=flag) for port, purpose, flag in uses)


def plan(settings: StackSettings, parts: LocalParts) -> tuple[tuple[ProcessSpec, ...], ...]:
    """The stages: first what others need to be there, then what uses it."""
    redis = (_redis(parts),) if parts.redis_program is not None else ()
    pods = () if settings.endpoints else tuple(_pod(settings, number) for number in range(settings.simulated_pods))
    return ((*redis, *pods), (_indexer(settings, parts), _picker(settings, parts), _envoy(settings, parts)))


def _redis(parts: LocalParts) -> ProcessSpec:
    return ProcessSpec(
        name="redis",
        # nothing is saved: the index is made again from the pods' events
        argv=(
            *(str(parts.redis_program), "--bind", HOST, "--port", str(parts.redis_port)),
            *("--save", "", "--appendonly", "no", "--dir", str(parts.run_directory), "--daemonize", "no"),
        ),
        ready=(RedisReady(access=parts.redis),),
    )


def _pod(settings: StackSettings, number: int) -> ProcessSpec:
    # one process each, so that one pod can be killed and the others live on
    address, key_file = settings.pods[number], settings.pod_access.key_file
    flags = _flags(
        host=address.host, sim_port=address.port, pods=1, model=settings.model, tokenizer=settings.tokenizer_folder
    )
    return ProcessSpec(
        name=f"pod-{number}",
        argv=(*KVMESH, "sim", *flags, *settings.log_flags),
        environment={} if key_file is None else {"KVMESH_API_KEY": read_pod_key(key_file)},
        ready=(HttpReady(url=f"http://{address}/health"),),
        restart_seconds=POD_RESTART_SECONDS,
    )


def _indexer(settings: StackSettings, parts: LocalParts) -> ProcessSpec:
    flags = _flags(
        host=HOST,
        indexer_admin_port=settings.indexer_admin_port,
        endpoints=",".join(map(str, settings.pods)),
        model=settings.model,
        event_sources=settings.event_sources,
        pod_key_file=settings.pod_access.key_file,
        admin_token_file=settings.admin_token_file,
    )
    return ProcessSpec(
        name="indexer",
        argv=(*KVMESH, "indexer", *flags, *settings.log_flags),
        environment=redis_environment(parts.redis),
        ready=(HttpReady(url=f"http://{local(settings.indexer_admin_port)}/readyz"),),
    )


def _picker(settings: StackSettings, parts: LocalParts) -> ProcessSpec:
    flags = _flags(
        host=HOST,
        grpc_port=settings.grpc_port,
        admin_port=settings.admin_port,
        endpoints=",".join(map(str, settings.pods)),
        model=settings.model,
        tokenizer=settings.tokenizer_folder,
        pod_key_file=settings.pod_access.key_file,
        admin_token_file=settings.admin_token_file,
        sample_share=settings.sample_share,
        policy=settings.policy,
        drain_seconds=0,  # Envoy ends at the same moment: no client is left
    )
    return ProcessSpec(
        name="extproc",
        argv=(*KVMESH, "extproc", *flags, *settings.log_flags),
        environment=redis_environment(parts.redis),
        ready=(
            HttpReady(url=f"http://{local(settings.admin_port)}/readyz"),
            GrpcReady(address=str(local(settings.grpc_port))),
        ),
    )


def _envoy(settings: StackSettings, parts: LocalParts) -> ProcessSpec:
    return ProcessSpec(
        name="envoy",
        argv=(
            *(str(parts.envoy_program), "-c", str(parts.envoy_config), "--log-level", "warning"),
            # shared memory for hot restarts would collide with any other Envoy on this machine
            *("--disable-hot-restart", "--concurrency", "2"),
        ),
        ready=(HttpReady(url=f"http://{local(settings.envoy_admin_port)}/ready"),),
    )


def _flags(**given: object) -> tuple[str, ...]:
    named = {f"--{name.replace('_', '-')}": str(value) for name, value in given.items() if value is not None}
    return tuple(word for flag in named.items() for word in flag)


async def run(settings: StackSettings) -> None:
    """Run the mesh until SIGINT, SIGTERM or SIGHUP; raise UpError if it cannot start or a child ends.

    In every case all children have ended and all files are gone when this returns.
    """
    if settings.redis.url:
        require_redis(settings.redis)
    require_free(fixed_ports(settings), host=HOST, meshes=running_meshes())
    doomed: tuple[Path, ...] = ()
    if settings.ready_file is not None:
        remove_stale(settings.ready_file)
        doomed = (settings.ready_file, temporary_path(settings.ready_file))
    told_to_end = _cancel_on_signals()
    with run_directory(also_remove=doomed) as directory:
        try:
            parts = await _prepare(settings, directory)
            notes: tuple[str, ...] = ()
            if settings.endpoints and (settings.model is None or settings.tokenizer_folder is None):
                served = await first_served_models(settings.endpoints, settings.pod_access)
                settings, notes = fill_in_model(settings, served)
            await _supervise(settings, parts, notes=notes)
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
    redis_port = pick_free_port(host=HOST, avoid={use.port for use in fixed_ports(settings)})
    if settings.redis.url:
        redis_program, redis = None, settings.redis
        condition = RedisReady(access=redis)
        await wait_until_ready(condition, name="the Redis of --redis", within_seconds=EXTERNAL_REDIS_SECONDS)
    else:
        redis_program, redis = find_redis_server(), RedisAccess(url=f"redis://{HOST}:{redis_port}/0")
    config = fill_in(
        read_template(settings.body_delivery.envoy_file),
        gateway=local(settings.envoy_port),
        admin=local(settings.envoy_admin_port),
        picker=local(settings.grpc_port),
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


async def _supervise(settings: StackSettings, parts: LocalParts, *, notes: Sequence[str]) -> None:
    view = MeshView(
        settings,
        folder=parts.run_directory,
        redis=read_address(parts.redis).label,
        notes=notes,
        pids=lambda: supervisor.pids,
    )
    supervisor: Supervisor = Supervisor(log_directory=parts.run_directory, tell=view.tell)
    stages = plan(settings, parts)

    async def when_ready() -> None:
        view.greet()
        async with asyncio.TaskGroup() as group:
            if settings.chaos:
                pods = [f"pod-{number}" for number in range(settings.simulated_pods)]
                killing = kill_now_and_then(supervisor, pods, every_seconds=settings.chaos_seconds)
                group.create_task(killing, name="chaos")
            await view.show()

    with view.starting([spec.name for stage in stages for spec in stage]):
        await supervisor.run(stages, environment=os.environ, when_ready=when_ready)


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


def require_redis(access: RedisAccess) -> None:
    """Raise BadSettingError for what no Redis client could use; nothing is connected, no password is shown."""
    try:
        read_address(access)
    except RedisUrlError as error:
        raise BadSettingError(f"--redis cannot be used: {printable(str(error))}") from None


class ModelCard(msgspec.Struct, frozen=True):
    """One entry of /v1/models; `root` is what vLLM was started with, a name or a folder on the pod's machine."""

    id: str
    root: str | None = None


class ServedModels(msgspec.Struct, frozen=True):
    """What a pod serves, the base model first."""

    data: tuple[ModelCard, ...]
    pod: str = ""  # its address


async def first_served_models(pods: Sequence[SocketAddress], access: PodAccess) -> ServedModels | None:
    """The answer of the first pod that serves a model, or None; takes no longer than ASK_SECONDS for all of them."""
    pages = PodPages(key=open_key(access))
    try:
        answers = await asyncio.gather(*(_ask(pages, str(pod)) for pod in pods))
    finally:
        pages.close()
    return next((answer for answer in answers if answer is not None and answer.data), None)


async def _ask(pages: PodPages, pod: str) -> ServedModels | None:
    try:
        page = await pages.get(pod, "/v1/models", timeout_seconds=ASK_SECONDS, max_body_bytes=MAX_MODELS_BYTES)
        answer = msgspec.json.decode(page.body, type=ServedModels)
    except (HttpResponseError, msgspec.MsgspecError, OSError):
        return None
    return msgspec.structs.replace(answer, pod=pod)


def fill_in_model(settings: StackSettings, served: ServedModels | None) -> tuple[StackSettings, tuple[str, ...]]:
    """Settings with a model, and with a tokenizer where the pod's model lies on this machine; and lines for the user.

    Raise UnnamedModelError if neither a flag nor a pod names the model.
    """
    if settings.model is None and served is None:
        pods = ", ".join(map(str, settings.pods))
        raise UnnamedModelError(
            f"no pod of --endpoints says which model it serves (GET /v1/models of {pods}); start one, give --model, or "
            "--pod-key-file where the pods run with --api-key"
        )
    model = settings.model or (served.data[0].id if served else "")
    notes = [] if settings.model or served is None else [f"model {model}, as {served.pod} says"]
    folder = settings.tokenizer_folder
    if folder is None and served is not None:
        folder = _tokenizer_folder(next((card.root for card in served.data if card.id == model), None))
        if folder is not None:
            lacking = why_not_readable(folder)
            notes.append(f"tokenizer {folder}, as {served.pod} says")
            if lacking is not None:  # it was not asked for, so it does not prevent the start
                notes[-1] += f"; it is not used, because {lacking}"
                folder = None
    if folder is None:
        notes.append(f"no tokenizer: {PODS_ARE_ASKED}")
    return replace(settings, model=model, tokenizer_folder=folder), tuple(notes)


def _tokenizer_folder(root: str | None) -> Path | None:
    try:
        # a name like org/model is no folder here, as a rule
        return Path(root).resolve() if root and has_tokenizer(Path(root)) else None
    except (OSError, ValueError):
        return None  # a text that cannot be a path


@contextmanager
def run_directory(*, also_remove: tuple[Path, ...] = ()) -> Iterator[Path]:
    """A new directory for the run; it and the files of `also_remove` are gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix=RUN_PREFIX))
    doomed = [str(entry.absolute()) for entry in (path, *also_remove)]
    guard = subprocess.Popen(
        ["/bin/sh", "-c", GUARD_SCRIPT, "kvmesh-guard", *doomed],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal must not reach it
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},  # where rm is, whatever the user's PATH says
    )
    try:
        yield path
    finally:
        # closes the pipe, which is the guard's sign to clear up
        guard.communicate(timeout=GUARD_SECONDS)
