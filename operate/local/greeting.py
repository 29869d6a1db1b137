"""The greeting of `kvmesh up` once the mesh is healthy: addresses, example requests, and commands to copy."""

import json
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len
from rich.text import Text

from kvmesh.plain_text import printable
from operate.local.ports import MeshPorts
from operate.local.stack_settings import StackSettings, local

USUAL_PORT = MeshPorts().gateway

# long enough to fill several cache blocks, so that a repeated request has hits
SYSTEM_PROMPT = (
    "You are the librarian of a small town. You answer in two sentences at most, name the shelf where the reader finds "
    "more, and never make up a title. If you do not know, say so and point to the reading room. Be kind to all who ask."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An example chat request, and what to look for in its response."""

    name: str
    look_for: str
    turns: tuple[str, ...]  # user and assistant alternate
    number: int

    @property
    def file(self) -> str:
        """The file name of the request body."""
        return f"{self.number}-{self.name}.json"

    def body(self, model: str) -> dict[str, object]:
        """Return the request body."""
        roles = ("user", "assistant")
        turns = [{"role": roles[place % 2], "content": turn} for place, turn in enumerate(self.turns)]
        return {"model": model, "max_tokens": 24, "messages": [{"role": "system", "content": SYSTEM_PROMPT}, *turns]}


QUESTION = "Why is the sea salty, and where do I find more about it?"
EXAMPLES = (
    Example(number=1, name="cold", look_for="cold: nobody has asked this yet, cached_tokens is 0", turns=(QUESTION,)),
    Example(
        number=2,
        name="warm",
        look_for="warm: the follow-up goes to the pod that served 1 and finds all of that question in its cache",
        turns=(QUESTION, "Rivers carry it there. Look at shelf 12.", "And why are rivers not salty?"),
    ),
    Example(
        number=3,
        name="shared",
        look_for="shared: somebody else's question, only the instructions before it are the same",
        turns=("Who wrote the first travel guide?",),
    ),
)


def greeting(facts: Mapping[str, object], *, log_directory: str, notes: Sequence[str], load: str) -> list[Text]:
    """Return the lines to print, which only the terminal wraps; `facts` is the ready file's content.

    `load` is a `kvmesh load` command for this mesh.
    """
    url = f"{facts['gateway']}/v1/chat/completions"
    return [
        Text("kvmesh is up", style="bold"),
        *(Text(printable(note), style="yellow") for note in notes),
        *address_lines(facts, log_directory=log_directory),
        Text(),
        Text("in another terminal: the same load here and by round robin, 20 s each", style="bold"),
        Text(load),
        Text(),
        Text(
            "single requests: look at x-kvmesh-upstream (the pod) and cached_tokens (not computed again)", style="bold"
        ),
        *(line for example in EXAMPLES for line in _shown(example, url=url, folder=log_directory)),
        Text(),
    ]


def _shown(example: Example, *, url: str, folder: str) -> tuple[Text, Text]:
    file = shlex.quote(f"{folder}/{example.file}")
    command = f"curl -si {url} -H 'content-type: application/json' -d @{file}"
    return Text(f"{example.number}. {example.look_for}"), Text(command)


def address_lines(facts: Mapping[str, object], *, log_directory: str) -> list[Text]:
    """Return the table of addresses."""
    rows = {
        "gateway": f"{facts['gateway']}  (send requests here)",
        "picker admin": f"{facts['admin']}  (a page for the browser; /state /metrics)",
        "picker gRPC": f"{facts['extproc']}  (ext_proc)",
        "indexer admin": f"{facts['indexer_admin']}  /metrics /readyz",
        "Envoy admin": facts["envoy_admin"],
        "Redis": facts["redis"],
        "pods": ", ".join(map(str, _sequence(facts["endpoints"]))),
        "logs": f"{log_directory}  (until the end)",
        **kill_lines(facts),
    }
    return [Text.assemble((f"{name:<15}", "dim"), printable(str(value))) for name, value in rows.items()]


def kill_lines(facts: Mapping[str, object]) -> dict[str, str]:
    """Return the commands that kill the picker (its parent respawns it) and a simulated pod, never a real one."""
    pids = facts["pids"]
    assert isinstance(pids, Mapping)
    lines = {"kill picker": f"pkill -9 -P {pids['extproc']}  (it is back at once)"}
    if pods := sorted(name for name in pids if name.startswith("pod-")):
        pod = pods[0]
        lines["kill a pod"] = f"kill -9 {pids[pod]}  ({pod}; it is back some seconds later, with an empty cache)"
    return lines


def lines_on_screen(lines: Sequence[Text], *, width: int) -> int:
    """Return the number of terminal lines that they fill when wrapped."""
    return sum(max(1, -(-cell_len(line.plain) // width)) for line in lines)


def _sequence(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]


def write_examples(folder: Path, *, model: str) -> None:
    """Write the greeting's example requests to files, so that its commands stay short."""
    for example in EXAMPLES:
        body = json.dumps(example.body(model), indent=1)
        (folder / example.file).write_text(f"{body}\n", encoding="utf-8")


def load_command(settings: StackSettings, *, others_run: bool = False) -> str:
    """Return the command that compares this mesh with round robin, for the current working directory.

    `others_run`: other meshes run on this machine.
    """
    if shutil.which("kvmesh"):
        program = ["kvmesh"]
    else:
        program = [sys.argv[0]] if Path(sys.argv[0]).name == "kvmesh" else [sys.executable, "-m", "operate"]
    port, key = settings.ports.gateway, settings.pod_access.key_file
    return shlex.join(
        [
            *(*program, "load", "--beside", "round-robin"),
            # `kvmesh load` finds the default port itself if only one mesh runs
            *([] if port == USUAL_PORT and not others_run else ["--server", f"http://{local(port)}"]),
            *([] if key is None else ["--pod-key-file", str(key.absolute())]),
        ]
    )
