"""What a greeting offers, made ready: the files of its requests, and the call of `kvmesh load` that finds this mesh."""

import json
import shlex
import shutil
import sys
from pathlib import Path

from extproc.local.greeting import EXAMPLES
from extproc.local.stack_settings import StackSettings, local

USUAL_PORT = StackSettings().envoy_port


def write_examples(folder: Path, *, model: str) -> None:
    """Write the requests that the greeting offers into files, so that its commands are short."""
    for example in EXAMPLES:
        body = json.dumps(example.body(model), indent=1)
        (folder / example.file).write_text(f"{body}\n", encoding="utf-8")


def load_command(settings: StackSettings, *, others_run: bool = False) -> str:
    """Return a load beside round robin, as it is called from the folder in which this was started.

    `others_run`: there are other meshes on this machine.
    """
    if shutil.which("kvmesh"):
        program = ["kvmesh"]
    else:
        program = [sys.argv[0]] if Path(sys.argv[0]).name == "kvmesh" else [sys.executable, "-m", "extproc"]
    port, key = settings.envoy_port, settings.pod_access.key_file
    return shlex.join(
        [
            *(*program, "load", "--beside", "round-robin"),
            # the usual one is found, unless another mesh runs, too
            *([] if port == USUAL_PORT and not others_run else ["--server", f"http://{local(port)}"]),
            *([] if key is None else ["--pod-key-file", str(key.absolute())]),
        ]
    )
