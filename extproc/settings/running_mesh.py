"""Where `kvmesh up` leaves word of the mesh that it runs on this machine, for the other commands to find.

Each run has a folder of its own below the folder for temporary files; what is in it goes with the run.
"""

import os
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
    for path in Path(tempfile.gettempdir()).glob(f"{RUN_PREFIX}*/{READY_NAME}"):
        try:
            status = path.stat()
            if status.st_uid != os.getuid():
                continue
            facts = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError, ValueError, RecursionError):  # it ends just now, or is none
            continue
        if isinstance(facts, dict) and isinstance(facts.get("admin"), str):
            found.append((status.st_mtime, facts))
    return [facts for _, facts in sorted(found, key=lambda item: -item[0])]
