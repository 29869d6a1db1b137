"""What `kvmesh up` prints once all is healthy: a table of addresses, and commands to copy. Pure."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from kvmesh.plain_text import printable

# long enough to fill several blocks of the prefix cache, so that the repeat has something to find there
SYSTEM_PROMPT = (
    "You are the librarian of a small town. You answer in two sentences at most, name the shelf where the reader finds "
    "more, and never make up a title. If you do not know, say so and point to the reading room. Be kind to all who ask."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A chat to send, and what to look for in its answer."""

    name: str
    look_for: str
    turns: tuple[str, ...]  # questions and answers in turn
    number: int

    @property
    def file(self) -> str:
        """The name of the file that holds the body."""
        return f"{self.number}-{self.name}.json"

    def body(self, model: str) -> dict[str, object]:
        """The request."""
        roles = ("user", "assistant")
        turns = [{"role": roles[place % 2], "content": turn} for place, turn in enumerate(self.turns)]
        return {
            "model": model,
            "max_tokens": 24,
            "messages": [{"role": "system", "content": SYSTEM_PROMPT}, *turns],
        }


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


def greeting(
    facts: Mapping[str, object],
    *,
    log_directory: str,
    notes: Sequence[str],
    load: str,
) -> list[Text]:
    """The lines to print, to be wrapped by the terminal alone; `facts` as in the ready file.

    `load` is a call of `kvmesh load` that finds this mesh.
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
    """Where everything is."""
    rows = {
        "gateway": f"{facts['gateway']}  (send requests here)",
        "picker admin": f"{facts['admin']}  (a page for the browser; /state /metrics)",
        "picker gRPC": f"{facts['extproc']}  (ext_proc)",
        "indexer admin": f"{facts['indexer_admin']}  /metrics /readyz",
        "Envoy admin": facts["envoy_admin"],
        "Redis": facts["redis"],
        "pods": ", ".join(map(str, _sequence(facts["endpoints"]))),
        "logs": f"{log_directory}  (until the end)",
        **kill_line(facts),
    }
    return [Text.assemble((f"{name:<15}", "dim"), printable(str(value))) for name, value in rows.items()]


def kill_line(facts: Mapping[str, object]) -> dict[str, str]:
    """How to kill a simulated pod; real ones are not ours to kill."""
    pids = facts["pids"]
    pods = sorted(name for name in pids if name.startswith("pod-")) if isinstance(pids, Mapping) else []
    if not isinstance(pids, Mapping) or not pods:
        return {}
    return {"kill a pod": f"kill -9 {pids[pods[0]]}  ({pods[0]}; it is back some seconds later, with an empty cache)"}


def lines_on_screen(lines: Sequence[Text], *, width: int) -> int:
    """How many lines of a terminal they fill."""
    return sum(max(1, -(-cell_len(line.plain) // width)) for line in lines)


def _sequence(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]
