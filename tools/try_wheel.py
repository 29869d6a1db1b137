"""Tries a wheel as a user would: `python tools/try_wheel.py dist/kvmesh-….whl`, with the Python that is to be tried.

A new environment gets the wheel with what the demo needs. There `kvmesh --version` answers, and `kvmesh up` starts a
mesh that serves a request and ends. It needs nothing of the checkout: what is tried is what was installed.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path

START_SECONDS = 120.0
PORTS = ("envoy-port", "envoy-admin-port", "grpc-port", "admin-port", "indexer-admin-port", "sim-port")
BODY = {"model": "tiny", "max_tokens": 4, "prompt": "Why is the sea salty?"}


def main(wheel: Path) -> None:
    """Install and try; raise where anything fails."""
    folder = Path(tempfile.mkdtemp(prefix="kvmesh-wheel-"))
    try:
        kvmesh = install(wheel, folder / "environment")
        print(output(kvmesh, "--version").strip())
        print(serve_one(kvmesh, folder))
    finally:
        shutil.rmtree(folder)


def install(wheel: Path, environment: Path) -> Path:
    """Install a wheel into a new environment; return its `kvmesh`."""
    venv.create(environment, with_pip=True)
    pip = (str(environment / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, "install", f"kvmesh[local] @ {wheel.resolve().as_uri()}"], check=True)
    subprocess.run([*pip, "check"], check=True)
    return environment / "bin" / "kvmesh"


def output(*command: Path | str) -> str:
    """Run a command away from the checkout, without what this process was told of kvmesh."""
    done = subprocess.run(
        [str(each) for each in command], env=plain(), cwd="/", capture_output=True, text=True, check=True
    )
    return done.stdout


def plain() -> dict[str, str]:
    """Return the environment without anything that leads to other code or settings."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("KVMESH_") and name not in {"PYTHONPATH", "VIRTUAL_ENV"}
    }


def serve_one(kvmesh: Path, folder: Path) -> str:
    """Start a mesh, send it one request, and end it; return what the answer says."""
    ready = folder / "ready.json"
    flags = [f"--{name}={port}" for name, port in zip(PORTS, free_ports(len(PORTS)), strict=True)]
    command = [str(kvmesh), "up", "--no-live", "--pods=1", f"--ready-file={ready}", *flags]
    up = subprocess.Popen(command, env=plain(), cwd="/", stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            if up.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"kvmesh up was not ready: {up.poll()}")
            time.sleep(0.05)
        gateway = json.loads(ready.read_text(encoding="utf-8"))["gateway"]
        request = urllib.request.Request(  # noqa: S310
            f"{gateway}/v1/completions", data=json.dumps(BODY).encode(), headers={"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:  # noqa: S310
            return f"{answer.status} from {answer.headers['x-kvmesh-upstream']}: {json.load(answer)['usage']}"
    finally:
        up.send_signal(signal.SIGTERM)
        if up.wait(START_SECONDS) != 0:
            raise RuntimeError(f"kvmesh up ended with {up.returncode}")


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


if __name__ == "__main__":
    main(Path(sys.argv[1]))
