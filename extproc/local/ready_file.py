"""The ready file: what `kvmesh up` writes of a running mesh, and what other commands of the same user read of it."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from extproc.errors import ConfigError
from extproc.local.errors import UpError
from extproc.local.stack_settings import StackSettings, local
from extproc.settings.running_mesh import running_meshes


class ReadyMesh(msgspec.Struct, frozen=True):
    """What commands need of a ready file."""

    gateway: str
    model: str | None = None
    endpoints: tuple[str, ...] = ()


def running_mesh(gateway: str | None) -> ReadyMesh | None:
    """Return the mesh with that gateway, without one the only one that runs; None where there is none.

    Raise ConfigError where several run.
    """
    found = []
    for facts in running_meshes():
        with suppress(msgspec.ValidationError):  # of another release
            found.append(msgspec.convert(facts, ReadyMesh))
    found = [mesh for mesh in found if gateway in (None, mesh.gateway)]
    if len(found) > 1:
        names = ", ".join(mesh.gateway for mesh in found)
        raise ConfigError(f"several meshes run on this machine: choose with --server: {names}")
    return found[0] if found else None


def temporary_path(path: Path) -> Path:
    """Where the file is written before it gets its name."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def ready_facts(settings: StackSettings, *, redis: str, pids: Mapping[str, int]) -> dict[str, object]:
    """The content: URLs, except `extproc` (gRPC) and `endpoints`, which are ip:port; `redis` names no password."""
    return {
        "gateway": f"http://{local(settings.envoy_port)}",
        "admin": f"http://{local(settings.admin_port)}",
        "extproc": str(local(settings.grpc_port)),
        "indexer_admin": f"http://{local(settings.indexer_admin_port)}",
        "redis": redis,
        "envoy_admin": f"http://{local(settings.envoy_admin_port)}",
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
    """Write it under another name first: a reader that sees the file sees all of it."""
    temporary = temporary_path(path)
    temporary.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
