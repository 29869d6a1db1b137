"""The ready file: what `kvmesh up` writes of a running mesh, and where other commands of the same user find it."""

import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from extproc.errors import ConfigError
from extproc.local.errors import UpError
from extproc.local.stack_settings import StackSettings, local

FOLDER = "kvmesh"
PATTERN = "up-*.json"


class ReadyMesh(msgspec.Struct, frozen=True):
    """What commands need of a ready file."""

    gateway: str
    model: str | None = None
    endpoints: tuple[str, ...] = ()


def usual_ready_file(envoy_port: int) -> Path:
    """Return where the mesh with that gateway's port is written down: a file for each, because several may run."""
    return _folder() / PATTERN.replace("*", str(envoy_port))


def make_folder(file: Path) -> bool:
    """Make the folder of a usual ready file, where it is not there. Return whether it can be used."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return _is_own(file.parent)


def running_mesh(given: Path | None) -> ReadyMesh | None:
    """Return the mesh of the given file, else the only one that runs; None where none does.

    Raise ConfigError for a file that cannot be used, and where several meshes run.
    """
    if given is not None:
        return _read(given)
    folder = _folder()
    files = sorted(folder.glob(PATTERN)) if _is_own(folder) else []
    if len(files) > 1:
        names = ", ".join(map(str, files))
        raise ConfigError(f"several meshes run: name one with --ready-file, or give --url: {names}")
    return _read(files[0]) if files else None


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


def _read(file: Path) -> ReadyMesh:
    try:
        return msgspec.json.decode(file.read_bytes(), type=ReadyMesh)
    except OSError as error:
        raise ConfigError(
            f"--ready-file: {file}: {error.strerror}; `kvmesh up` writes it once all is healthy"
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--ready-file: {file} is no ready file of `kvmesh up`: {error}") from error


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / FOLDER if runtime else Path(tempfile.gettempdir()) / f"{FOLDER}-{os.getuid()}"


def _is_own(folder: Path) -> bool:
    """Whether nobody else can put files there: in /tmp anybody may have made it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
