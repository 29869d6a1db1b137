"""What `kvmesh up` prints once all is healthy: a table of addresses and three commands to copy. Pure."""

import json
import shlex
from collections.abc import Mapping

from rich.table import Table

# long enough to fill several blocks of the prefix cache, so that the repeat has something to find there
SYSTEM_PROMPT = (
    "You are the librarian of a small town. You answer in two sentences at most, name the shelf where the reader finds "
    "more, and never invent a title. If you do not know the answer, you say so and point to the reading room. "
    "Readers of all ages ask you about science, history, cooking, gardening and the sea."
)


def address_table(facts: Mapping[str, object], *, log_directory: str) -> Table:
    """Where everything is; `facts` as in the ready file."""
    table = Table(title="kvmesh is up", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = {
        "gateway (send requests here)": facts["gateway"],
        "picker admin": f"{facts['admin']}  /state /metrics /readyz",
        "picker gRPC (ext_proc)": facts["extproc"],
        "indexer admin": f"{facts['indexer_admin']}  /metrics /readyz",
        "Envoy admin": facts["envoy_admin"],
        "Redis": facts["redis"],
        "pods": ", ".join(map(str, _sequence(facts["endpoints"]))),
        "logs, until the end": log_directory,
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


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
