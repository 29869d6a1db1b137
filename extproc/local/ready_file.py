"""The ready file of `kvmesh up`: how a script learns where everything is, and that all of it is healthy.

Written by `command` once, atomically; removed by the guard of `run_directory` at the end.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from extproc.local.errors import UpError
from extproc.local.stack import StackSettings


def temporary_path(path: Path) -> Path:
    """Where the file is written before it gets its name."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def ready_facts(settings: StackSettings, *, redis: str, pids: Mapping[str, int]) -> dict[str, object]:
    """The content: URLs, except `extproc` (gRPC) and `endpoints`, which are ip:port; `redis` names no password."""
    return {
        "gateway": f"http://{settings.gateway}",
        "admin": f"http://{settings.picker_admin}",
        "extproc": str(settings.picker),
        "indexer_admin": f"http://{settings.indexer_admin}",
        "redis": redis,
        "envoy_admin": f"http://{settings.envoy_admin}",
        "endpoints": [str(pod) for pod in settings.pods],
        "model": settings.model,
        "pids": dict(pids),
    }


def remove_stale(path: Path) -> None:
    """Remove what an earlier run left: until this run is ready, the file must not be there. Raise UpError."""
    try:
        path.unlink(missing_ok=True)
        temporary_path(path).touch()  # better to learn now than after the start that it cannot be written
    except OSError as error:
        raise UpError(f"the ready file {path} cannot be written: {error.strerror}") from error


def write_ready_file(path: Path, facts: Mapping[str, object]) -> None:
    """Write it under another name first: whoever sees the file sees all of it."""
    temporary = temporary_path(path)
    temporary.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
