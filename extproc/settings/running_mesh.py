"""Finds the meshes that `kvmesh up` runs on this machine, for the other commands.

Each run has its own folder below the folder for temporary files, and removes it at the end.
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
    """Return the ready file's content of each mesh of this user, newest first."""
    found = []
    for folder in Path(tempfile.gettempdir()).glob(f"{RUN_PREFIX}*"):
        try:
            if not _is_own_folder(folder):
                continue
            began = (folder / READY_NAME).stat().st_mtime
            facts = msgspec.json.decode((folder / READY_NAME).read_bytes())
        except (OSError, ValueError, RecursionError):  # the run is ending, or the folder is not one of a run
            continue
        if isinstance(facts, dict) and isinstance(facts.get("admin"), str):
            found.append((began, facts))
    return [facts for _, facts in sorted(found, key=lambda item: -item[0])]


def _is_own_folder(path: Path) -> bool:
    """Tell whether the folder belongs to this user: reading another user's file, for example a pipe, might block."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
