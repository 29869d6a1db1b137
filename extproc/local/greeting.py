"""What `kvmesh up` prints once all is healthy: a table of addresses and three commands to copy. Pure."""

import json
import shlex
from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.text import Text

from kvmesh.plain_text import printable

# long enough to fill several blocks of the prefix cache, so that the repeat has something to find there
SYSTEM_PROMPT = (
    "You are the librarian of a small town. You answer in two sentences at most, name the shelf where the reader finds "
    "more, and never make up a title. If you do not know, say so and point to the reading room. Be kind to all who ask."
)


def greeting(facts: Mapping[str, object], *, log_directory: str, model: str, notes: Sequence[str]) -> list[Text]:
    """The lines to print, to be wrapped by the terminal alone; `facts` as in the ready file."""
    commands = example_commands(str(facts["gateway"]), model=model)
    return [
        Text("kvmesh is up", style="bold"),
        *(Text(printable(note), style="yellow") for note in notes),
        *address_lines(facts, log_directory=log_directory),
        *(line for command in commands for line in (Text(), Text(command))),
        Text(),
    ]


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
    }
    return [Text.assemble((f"{name:<15}", "dim"), printable(str(value))) for name, value in rows.items()]


def lines_on_screen(lines: Sequence[Text], *, width: int) -> int:
    """How many lines of a terminal they fill."""
    return sum(max(1, -(-cell_len(line.plain) // width)) for line in lines)


def example_commands(gateway_url: str, *, model: str) -> tuple[str, str, str]:
    """A chat, the same chat again (look at x-kvmesh-upstream and cached_tokens), and a streamed completion."""
    chat = {
        "model": model,
        "max_tokens": 16,
        "messages": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": "Why is the sea salty?"},
        ],
    }
    completion = {"model": model, "max_tokens": 16, "stream": True, "prompt": f"{SYSTEM_PROMPT} Today"}
    first = _curl(f"{gateway_url}/v1/chat/completions", chat)
    return (first, first, _curl(f"{gateway_url}/v1/completions", completion))


def _curl(url: str, body: Mapping[str, object]) -> str:
    return f"curl -si {url} -H 'content-type: application/json' -d {shlex.quote(json.dumps(body))}"


def _sequence(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]
