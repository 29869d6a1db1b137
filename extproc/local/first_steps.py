"""What a greeting offers, made ready: the files of its requests, and the call of `kvmesh load` that finds this mesh."""

import json
import shlex
import shutil
import sys
from pathlib import Path

from extproc.local.greeting import EXAMPLES
from extproc.local.ready_file import usual_ready_file
from extproc.local.stack_settings import StackSettings, local


def write_examples(folder: Path, *, model: str) -> None:
    """Write the requests that the greeting offers into files, so that its commands are short."""
    for example in EXAMPLES:
        body = json.dumps(example.body(model), indent=1)
        (folder / example.file).write_text(f"{body}\n", encoding="utf-8")


def load_command(settings: StackSettings) -> str:
    """Return a load beside round robin, as it is called from the folder in which this was started."""
    if shutil.which("kvmesh"):
        program = ["kvmesh"]
    else:
        program = [sys.argv[0]] if Path(sys.argv[0]).name == "kvmesh" else [sys.executable, "-m", "extproc"]
    gateway = f"http://{local(settings.envoy_port)}"
    ready, key = settings.ready_file, settings.pod_access.key_file
    is_found = ready == usual_ready_file(settings.envoy_port)
    return shlex.join(
        [
            *(*program, "load", "--beside", "round-robin"),
            *([] if ready is None or is_found else ["--ready-file", str(ready.absolute())]),
            *(["--server", gateway, "--endpoints", ",".join(map(str, settings.pods))] if ready is None else []),
            *([] if key is None else ["--pod-key-file", str(key.absolute())]),
        ]
    )
