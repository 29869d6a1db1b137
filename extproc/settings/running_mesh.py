"""Where `kvmesh up` leaves word of the mesh that it runs on this machine, for the other commands to find.

Each run has a folder of its own below the folder for temporary files; what is in it goes with the run.
"""

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

RUN_PREFIX = "kvmesh-up-"
READY_NAME = "ready.json"


def running_meshes() -> list[Mapping[str, Any]]:
    """Return what each mesh of this user says of itself, as in its ready file, the newest first."""
    found = []
    for folder in Path(tempfile.gettempdir()).glob(f"{RUN_PREFIX}*"):
        try:
            if not _is_own_folder(folder):
                continue
            began = (folder / READY_NAME).stat().st_mtime
            facts = msgspec.json.decode((folder / READY_NAME).read_bytes())
        except (OSError, ValueError, RecursionError):  # it ends just now, or is none
            continue
        if isinstance(facts, dict) and isinstance(facts.get("admin"), str):
            found.append((began, facts))
    return [facts for _, facts in sorted(found, key=lambda item: -item[0])]


def _is_own_folder(path: Path) -> bool:
    """Tell whether only this user can have put something there: another's file may be a pipe that nobody writes to."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
