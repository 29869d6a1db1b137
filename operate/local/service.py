"""Runs `kvmesh up`: its processes, their flags and their order, from the first check to the end.

All files lie in one directory. A guard removes it: a shell that reads a pipe whose only writer is this process. When
this process ends in any way, SIGKILL included, the guard sees the end of the pipe, removes the files and exits.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

import msgspec

from extproc.prompts.tokenizer_folder import has_tokenizer, why_not_readable
from extproc.settings.running_mesh import RUN_PREFIX, running_meshes
from kvmesh.errors import RedisUrlError
from kvmesh.plain_text import printable
from kvmesh.pods.http_response import HttpResponseError
from kvmesh.pods.pod_access import PodAccess, read_pod_key
from kvmesh.pods.pod_http import MAX_MODELS_BYTES, PodPages
from kvmesh.pods.pod_key import open_key
from kvmesh.redis.address import read_address
from operate.local.envoy_config import SocketAddress, fill_in, read_template
from operate.local.errors import BadSettingError, UnnamedModelError
from operate.local.mesh_view import MeshView, remove_stale, temporary_path
from operate.local.ports import PortUse, require_free
from operate.local.processes import (
    GrpcReady,
    HttpReady,
    ProcessSpec,
    RedisReady,
    Supervisor,
    find_envoy,
    find_redis_server,
    kill_now_and_then,
    wait_until_ready,
)
from operate.local.stack_settings import HOST, StackSettings, local

REDIS_SOCKET = "redis"
MOST_SOCKET_BYTES = 107  # of its path (Linux, unix(7))
EXTERNAL_REDIS_SECONDS = 10.0
ASK_SECONDS = 2.0
POD_RESTART_SECONDS = 5.0  # long enough to watch the other pods take over
KVMESH = (sys.executable, "-m", "operate")
GUARD_SCRIPT = 'trap "" HUP INT TERM; cat >/dev/null; rm -rf -- "$@"'
GUARD_SECONDS = 10
PODS_ARE_ASKED = "the pods are asked for each prompt's tokens, which takes milliseconds; --tokenizer names a folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParts:
    """Programs and files of one run."""

    run_directory: Path
    envoy_program: Path
    envoy_config: Path
    redis_program: Path | None  # None if --redis names a server
    redis: str = field(repr=False)


def fixed_ports(settings: StackSettings) -> tuple[PortUse, ...]:
    """Return the children's fixed ports, the most interesting for users first."""
    ports = settings.ports
    uses = {
        ports.gateway: "the gateway (Envoy)",
        ports.envoy_admin: "Envoy's admin page",
        ports.grpc: "the picker's gRPC",
        ports.admin: "the picker's admin page",
        ports.indexer_admin: "the indexer's admin page",
    }
    if not settings.endpoints:
        uses |= {pod.port: f"simulated pod {number}" for number, pod in enumerate(settings.pods)}
    return tuple(PortUse(port=port, purpose=purpose) for port, purpose in uses.items())


def plan(settings: StackSettings, parts: LocalParts) -> tuple[tuple[ProcessSpec, ...], ...]:
    """Return the stages: first Redis and the pods, then the processes that use them."""
    redis = (_redis(parts),) if parts.redis_program is not None else ()
    pods = () if settings.endpoints else tuple(_pod(settings, number) for number in range(settings.simulated_pods))
    return ((*redis, *pods), (_indexer(settings, parts), _picker(settings, parts), _envoy(settings, parts)))


def _redis(parts: LocalParts) -> ProcessSpec:
    return ProcessSpec(
        name="redis",
        # no persistence: the index is rebuilt from the pods' events
        argv=(
            # a socket in our folder: a port would be open to every user of the machine
            *(str(parts.redis_program), "--port", "0", "--unixsocket", str(parts.run_directory / REDIS_SOCKET)),
            *("--save", "", "--appendonly", "no", "--dir", str(parts.run_directory), "--daemonize", "no"),
        ),
        ready=(RedisReady(url=parts.redis),),
    )


def _pod(settings: StackSettings, number: int) -> ProcessSpec:
    # one process per pod, so that each can be killed alone
    address, key_file = settings.pods[number], settings.pod_access.key_file
    flags = _flags(
        host=address.host, sim_port=address.port, pods=1, model=settings.model, tokenizer=settings.tokenizer_folder
    )
    return ProcessSpec(
        name=f"pod-{number}",
        argv=(*KVMESH, "sim", *flags, *settings.shared_flags),
        environment={} if key_file is None else {"KVMESH_API_KEY": read_pod_key(key_file)},
        ready=(HttpReady(url=f"http://{address}/health"),),
        restart_seconds=POD_RESTART_SECONDS,
    )


def _indexer(settings: StackSettings, parts: LocalParts) -> ProcessSpec:
    flags = _flags(
        host=HOST,
        indexer_admin_port=settings.ports.indexer_admin,
        endpoints=",".join(map(str, settings.pods)),
        model=settings.model,
        event_sources=settings.event_sources,
        pod_key_file=settings.pod_access.key_file,
        admin_token_file=settings.admin_token_file,
    )
    return ProcessSpec(
        name="indexer",
        argv=(*KVMESH, "indexer", *flags, *settings.shared_flags),
        environment={"KVMESH_REDIS": parts.redis},  # no flag: every user can read those,
        ready=(HttpReady(url=f"http://{local(settings.ports.indexer_admin)}/readyz"),),
    )


def _picker(settings: StackSettings, parts: LocalParts) -> ProcessSpec:
    flags = _flags(
        host=HOST,
        grpc_port=settings.ports.grpc,
        admin_port=settings.ports.admin,
        endpoints=",".join(map(str, settings.pods)),
        model=settings.model,
        tokenizer=settings.tokenizer_folder,
        pod_key_file=settings.pod_access.key_file,
        admin_token_file=settings.admin_token_file,
        sample_share=settings.sample_share,
        policy=settings.policy,
        drain_seconds=0,  # Envoy ends at the same time, so no client is left to drain
    )
    return ProcessSpec(
        name="extproc",
        argv=(*KVMESH, "extproc", "--respawn", *flags, *settings.shared_flags),
        environment={"KVMESH_REDIS": parts.redis},  # no flag: every user can read those,
        ready=(
            HttpReady(url=f"http://{local(settings.ports.admin)}/readyz"),
            GrpcReady(address=str(local(settings.ports.grpc))),
        ),
    )


def _envoy(settings: StackSettings, parts: LocalParts) -> ProcessSpec:
    return ProcessSpec(
        name="envoy",
        argv=(
            *(str(parts.envoy_program), "-c", str(parts.envoy_config), "--log-level", "warning"),
            # its shared memory would collide with another Envoy on this machine
            *("--disable-hot-restart", "--concurrency", "2"),
        ),
        ready=(HttpReady(url=f"http://{local(settings.ports.envoy_admin)}/ready"),),
    )


def _flags(**given: object) -> tuple[str, ...]:
    named = {f"--{name.replace('_', '-')}": str(value) for name, value in given.items() if value is not None}
    return tuple(word for flag in named.items() for word in flag)


async def run(settings: StackSettings) -> None:
    """Run the mesh until SIGINT, SIGTERM or SIGHUP. Raise UpError if it cannot start or a child ends.

    In any case, all children have ended and all files are removed when this returns.
    """
    if settings.redis:
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
    """Return the tokenizer folder of the simulated pods."""
    # located by name: the commands must not import the simulator
    spec = importlib.util.find_spec("podsim")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "tiny_model"


async def _prepare(settings: StackSettings, directory: Path) -> LocalParts:
    envoy_program = find_envoy()
    if settings.redis:
        redis_program, redis = None, settings.redis
        condition = RedisReady(url=redis)
        await wait_until_ready(condition, name="the Redis of --redis", within_seconds=EXTERNAL_REDIS_SECONDS)
    else:
        socket = str(directory / REDIS_SOCKET)
        if len(os.fsencode(socket)) > MOST_SOCKET_BYTES:
            raise BadSettingError(f"{socket} is too long for a socket: set TMPDIR to a shorter folder")
        redis_program, redis = find_redis_server(), f"unix://{quote(socket)}?db=0"
    config = fill_in(
        read_template(settings.body_delivery.envoy_file),
        gateway=local(settings.ports.gateway),
        admin=local(settings.ports.envoy_admin),
        picker=local(settings.ports.grpc),
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
            if settings.chaos is not None:
                pods = [f"pod-{number}" for number in range(settings.simulated_pods)]
                killing = kill_now_and_then(supervisor, pods, every_seconds=settings.chaos)
                group.create_task(killing, name="chaos")
            await view.show()

    with view.starting([spec.name for stage in stages for spec in stage]):
        await supervisor.run(stages, environment=os.environ, when_ready=when_ready)


def _cancel_on_signals() -> asyncio.Event:
    """Cancel this task at the first signal. Later signals are ignored: the shutdown has its own deadline."""
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


def require_redis(url: str) -> None:
    """Raise BadSettingError for an invalid Redis URL, without its password in the message. Does not connect."""
    try:
        read_address(url)
    except RedisUrlError as error:
        raise BadSettingError(f"--redis cannot be used: {printable(str(error))}") from None


class ModelCard(msgspec.Struct, frozen=True):
    """An entry of /v1/models; `root` is vLLM's --model: a name, or a folder on the pod's machine."""

    id: str
    root: str | None = None


class ServedModels(msgspec.Struct, frozen=True):
    """A pod's models, the base model first."""

    data: tuple[ModelCard, ...]
    pod: str = ""  # its address


async def first_served_models(pods: Sequence[SocketAddress], access: PodAccess) -> ServedModels | None:
    """Return the answer of the first pod that serves a model, or None. Asks all at once, within ASK_SECONDS."""
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
    """Return the settings with a model (and a tokenizer if the pod's model folder is on this machine), and notes.

    The notes are for the user. Raise UnnamedModelError if neither a flag nor a pod names the model.
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
            if lacking is not None:  # not requested by a flag, so no error
                notes[-1] += f"; it is not used, because {lacking}"
                folder = None
    if folder is None:
        notes.append(f"no tokenizer: {PODS_ARE_ASKED}")
    return replace(settings, model=model, tokenizer_folder=folder), tuple(notes)


def _tokenizer_folder(root: str | None) -> Path | None:
    try:
        # a name like org/model is normally no folder here
        return Path(root).resolve() if root and has_tokenizer(Path(root)) else None
    except (OSError, ValueError):
        return None  # not a valid path


@contextmanager
def run_directory(*, also_remove: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Create a directory for the run; remove it and the files of `also_remove` afterwards."""
    path = Path(tempfile.mkdtemp(prefix=RUN_PREFIX))
    doomed = [str(entry.absolute()) for entry in (path, *also_remove)]
    guard = subprocess.Popen(
        ["/bin/sh", "-c", GUARD_SCRIPT, "kvmesh-guard", *doomed],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal must not reach it
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},  # for `rm`, independent of the user's PATH
    )
    try:
        yield path
    finally:
        # closes the pipe: the guard cleans up
        guard.communicate(timeout=GUARD_SECONDS)
