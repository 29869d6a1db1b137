"""Where `kvmesh up` leaves the addresses of a running mesh, so that other commands of the same user find it."""

import os
import stat
import tempfile
from pathlib import Path

import msgspec

from extproc.errors import ConfigError

FOLDER = "kvmesh"
PATTERN = "up-*.json"


class ReadyMesh(msgspec.Struct, frozen=True):
    """What commands need of a ready file."""

    gateway: str
    model: str | None = None
    endpoints: tuple[str, ...] = ()


def usual_ready_file(envoy_port: int) -> Path | None:
    """Return where the mesh with that gateway's port is written down; None where there is no folder for it.

    One file for each gateway, because several meshes may run.
    """
    folder = _folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return folder / PATTERN.replace("*", str(envoy_port)) if _is_own(folder) else None


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
