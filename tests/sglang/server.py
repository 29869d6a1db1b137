"""A real SGLang server on this machine's CPU, for tests: start, wait until ready, end for sure."""

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.stack import free_ports
from tests.sglang.environment import without_gpu

MODEL_NAME = "tiny"
PAGE = 16  # tokens
START_SECONDS = 360.0  # 40 s on an idle machine
END_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class SglangServer:
    """One running server. `address` is HOST:PORT; `log` is the file with everything it printed."""

    address: str
    log: Path


@contextlib.contextmanager
def sglang_server(python: Path, model: Path, folder: Path) -> Iterator[SglangServer]:
    """Start a server, yield it when it is ready, and end it and its children whatever happens."""
    port, events, replay = free_ports(3)
    publisher = {"publisher": "zmq", "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
    command = [
        *(str(python), "-m", "sglang.launch_server", "--model-path", str(model), "--served-model-name", MODEL_NAME),
        *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--attention-backend", "torch_native"),
        *("--disable-cuda-graph", "--dtype", "float32", "--page-size", str(PAGE), "--max-total-tokens", "20000"),
        *("--enable-metrics", "--enable-cache-report", "--kv-events-config", json.dumps(publisher)),
    ]
    server = SglangServer(f"127.0.0.1:{port}", folder / "sglang.log")
    with server.log.open("wb") as log:
        process = subprocess.Popen(
            command, env=without_gpu(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_until_ready(server, process)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(END_SECONDS)


def _wait_until_ready(server: SglangServer, process: subprocess.Popen[bytes]) -> None:
    give_up_at = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{server.address}/health", timeout=5):
            return
        assert process.poll() is None, f"SGLang has ended:\n{server.log.read_text()[-4000:]}"
        assert time.monotonic() < give_up_at, f"SGLang is not ready:\n{server.log.read_text()[-4000:]}"
        time.sleep(0.25)
