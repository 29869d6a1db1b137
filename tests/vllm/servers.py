"""Real vLLM servers on this machine's CPU, for tests: start, wait until healthy, end for sure.

Used by `conftest.py` and by anything else that needs real pods. Two servers take about 20 s and 3 GB; they fit into
2 cores. Every port is chosen by the operating system, and nothing outlives `stop`.
"""

import contextlib
import json
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from operate.local.ports import pick_free_port
from tests.vllm.environment import VllmEnvironment, offline
from tests.vllm.forked import ForkedProcess, fork_server

MODEL_NAME = "tiny"
BLOCK_SIZE = 32  # tokens; the CPU attention needs a multiple of 32
MAX_MODEL_LEN = 4096  # tokens
START_DEADLINE_SECONDS = 360.0  # 20 s on an idle machine, several times that beside other work
STOP_DEADLINE_SECONDS = 20.0


class ServerStartError(Exception):
    """A server ended or did not become healthy in time; the message has the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPod:
    """One running server. `address` is HOST:PORT; `log` is the file with everything it printed."""

    address: str
    model: str
    model_folder: Path
    log: Path
    process: ForkedProcess

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def get(self, path: str, *, timeout_seconds: float = 30.0) -> Any:
        """GET a JSON document."""
        with urllib.request.urlopen(self.url + path, timeout=timeout_seconds) as answer:
            return json.load(answer)

    def get_text(self, path: str, *, timeout_seconds: float = 30.0) -> str:
        """GET a text, for /metrics."""
        with urllib.request.urlopen(self.url + path, timeout=timeout_seconds) as answer:
            return bytes(answer.read()).decode()

    def post(self, path: str, body: Mapping[str, Any], *, timeout_seconds: float = 60.0) -> tuple[int, Any]:
        """POST JSON and return status and decoded answer, also for 4xx and 5xx."""
        request = urllib.request.Request(
            self.url + path, data=json.dumps(body).encode(), headers={"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_seconds) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"null")

    def kill(self) -> None:
        """End the server and all its children at once, as a crash would."""
        end_group(self.process, signal.SIGKILL)
        assert self.process.has_ended(wait_seconds=STOP_DEADLINE_SECONDS)
        deadline = time.monotonic() + STOP_DEADLINE_SECONDS
        while self._is_listening():  # the engine's process has inherited the socket, and ends after its parent
            assert time.monotonic() < deadline, f"{self.address} is still listened at"
            time.sleep(0.02)

    def _is_listening(self) -> bool:
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except ConnectionError:
            return False
        return True


@contextlib.contextmanager
def running_pods(
    count: int,
    *,
    environment: VllmEnvironment,
    model_folder: Path,
    logs: Path,
    extra_flags: Sequence[str] = (),
    addresses: Sequence[str] = (),
    extra_env: Callable[[], Mapping[str, str]] = dict,
) -> Iterator[tuple[VllmPod, ...]]:
    """Start servers side by side, yield them when all are healthy, and end them whatever happens.

    `addresses` are HOST:PORT for the first of them, as for a pod that comes back where it was; others get free ones.
    `extra_env` is asked once for each.
    """
    logs.mkdir(parents=True, exist_ok=True)
    pods: list[VllmPod] = []
    with contextlib.ExitStack() as stack:
        for number in range(count):
            pod = start(
                environment,
                address=addresses[number] if number < len(addresses) else f"127.0.0.1:{free_port()}",
                model_folder=model_folder,
                log_file=stack.enter_context((logs / f"vllm-{number}.log").open("wb")),
                log=logs / f"vllm-{number}.log",
                extra_flags=extra_flags,
                extra_env=extra_env(),
            )
            stack.callback(stop, pod)
            pods.append(pod)
        wait_until_healthy(pods, deadline_seconds=START_DEADLINE_SECONDS)
        yield tuple(pods)


def start(
    environment: VllmEnvironment,
    *,
    address: str,
    model_folder: Path,
    log_file: IO[bytes],
    log: Path,
    extra_flags: Sequence[str],
    extra_env: Mapping[str, str] | None = None,
) -> VllmPod:
    """Start one server in a process group of its own and return at once; it is not healthy yet."""
    environment_variables = offline() | {
        "VLLM_HOST_IP": address.rpartition(":")[0],  # what tcp://*:0 binds
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        **(extra_env or {}),
    }
    process = fork_server(environment.python, environment_variables).start(
        arguments(model_folder=model_folder, address=address, extra_flags=extra_flags),
        environment=environment_variables,
        log=log_file.fileno(),
    )
    return VllmPod(address=address, model=MODEL_NAME, model_folder=model_folder, log=log, process=process)


def arguments(*, model_folder: Path, address: str, extra_flags: Sequence[str]) -> list[str]:
    """Return the command line; event and replay ports are 0, `GET /kv_event_sources` tells which were bound."""
    host, port = address.rsplit(":", 1)
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:0",  # only with the star does vLLM tell the port that it bound
        "replay_endpoint": "tcp://*:0",
        "topic": f"kv@{address}@{MODEL_NAME}",
    }
    return [
        *("--model", str(model_folder), "--served-model-name", MODEL_NAME, "--host", host, "--port", port),
        *("--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager", "--block-size", str(BLOCK_SIZE)),
        *("--enable-prefix-caching", "--num-gpu-blocks-override", "512", "--max-num-seqs", "16"),
        *("--enable-prompt-tokens-details", "--enable-scale-out"),
        *("--kv-events-config", json.dumps(events)),
        *extra_flags,
    ]


def wait_until_healthy(pods: Sequence[VllmPod], *, deadline_seconds: float) -> None:
    """Return when every server answers /health; raise ServerStartError with the log of the first that will not."""
    give_up_at = time.monotonic() + deadline_seconds
    for pod in pods:
        while not is_healthy(pod):
            if pod.process.has_ended(wait_seconds=0.25):
                raise ServerStartError(f"vLLM has ended:\n{log_tail(pod.log)}")
            if time.monotonic() > give_up_at:
                raise ServerStartError(f"vLLM not healthy in {deadline_seconds:.0f} s:\n{log_tail(pod.log)}")


def is_healthy(pod: VllmPod) -> bool:
    try:
        with urllib.request.urlopen(f"{pod.url}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def stop(pod: VllmPod) -> None:
    """End a server and its children: politely, then for sure. Safe to call for one that is already gone."""
    end_group(pod.process, signal.SIGTERM)
    pod.process.has_ended(wait_seconds=STOP_DEADLINE_SECONDS)
    end_group(pod.process, signal.SIGKILL)  # also reaches children that outlived their parent
    assert pod.process.has_ended(wait_seconds=STOP_DEADLINE_SECONDS)


def end_group(process: ForkedProcess, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)  # its own session, so the group's number is its pid


def log_tail(log: Path, *, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def hit_tokens(pod: VllmPod) -> int:
    """Return the prompt tokens that the pod has found in its cache since it started."""
    found = re.findall(r"(?m)^vllm:prefix_cache_hits_total\{[^}]*\} (\S+)$", pod.get_text("/metrics"))
    return sum(int(float(count)) for count in found)


def free_port() -> int:
    """Return a port that nobody listens on now. vLLM's HTTP server cannot tell which port it bound, so no port 0."""
    return pick_free_port(host="127.0.0.1", avoid=())
