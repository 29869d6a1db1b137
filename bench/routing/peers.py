"""Other routers that can stand in for Envoy and the picker, where somebody has installed them.

`python -m bench.routing.peers` makes an environment of their own beside kvmesh's other caches; `arms` asks whether it
is there. Their cache-aware policies get their defaults and, where they ask for one, the model's tokenizer.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.routing.subject import HERE

REQUIREMENTS = ("vllm-router==0.1.17", "smg==1.13.0")
# other routers listen on more ports than one; each start names them all
Command = Callable[[Path, int, int, Sequence[str], Path], Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One router: how to start it with (folder of programs, port, metrics port, pods as HOST:PORT, tokenizer)."""

    name: str
    says: str
    program: str | None  # in the peers' environment; None: the bench's own
    command: Command
    environment: Callable[[Path], Mapping[str, str]]
    ready_path: str
    needs_render: bool = False  # gets the prompt's tokens from a pod's /render; without, it picks at random

    @property
    def installed(self) -> bool:
        """Whether it can be started."""
        return self.program is None or (peers_folder() / "bin" / self.program).exists()


def peers_folder() -> Path:
    """The environment of the peers."""
    cache = os.environ.get("KVMESH_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvmesh"
    return Path(cache) / f"bench-peers-py{sys.version_info[0]}{sys.version_info[1]}"


def _vllm_router(programs: Path, port: int, metrics_port: int, pods: Sequence[str], _: Path) -> Sequence[str]:
    return (
        *(str(programs / "vllm-router"), "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"),
        *("--prometheus-port", str(metrics_port), "--log-level", "error"),
        *("--worker-startup-check-interval", "1"),
        *("--worker-urls", *(f"http://{pod}" for pod in pods)),
    )


def _smg(programs: Path, port: int, metrics_port: int, pods: Sequence[str], tokenizer: Path) -> Sequence[str]:
    return (
        *(str(programs / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"),
        *("--prometheus-port", str(metrics_port), "--log-level", "error", "--backend", "vllm"),
        *("--model-path", str(tokenizer)),
        *("--worker-urls", *(f"http://{pod}" for pod in pods)),
    )


def _guide(_: Path, port: int, __: int, pods: Sequence[str], ___: Path) -> Sequence[str]:
    return (sys.executable, "-m", "bench.routing.guide_router", "--port", str(port), "--pods", ",".join(pods))


LLM_D_GUIDE = Peer(
    name="llm-d-guide",
    says='llm-d\'s guide "optimized baseline", its picks alone',
    program=None,
    command=_guide,
    environment=lambda _: {"PYTHONPATH": str(HERE)},
    ready_path="/readiness",
)
VLLM_ROUTER = Peer(
    name="vllm-router",
    says="vllm-router 0.1.17, cache_aware",
    program="vllm-router",
    command=_vllm_router,
    environment=lambda tokenizer: {"VLLM_ROUTER_TOKENIZER": str(tokenizer)},
    ready_path="/readiness",
    needs_render=True,
)
SMG = Peer(
    name="smg",
    says="smg 1.13.0, cache_aware",
    program="smg",
    command=_smg,
    environment=lambda _: {},
    ready_path="/readiness",
)


def main() -> None:
    folder = peers_folder()
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, "--only-binary", ":all:", *REQUIREMENTS], check=True)
    print(f"{', '.join(REQUIREMENTS)} are in {folder}")


if __name__ == "__main__":
    main()
