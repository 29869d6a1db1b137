"""Deciding is pure: only listed modules may wait, look at a clock or draw lots, themselves or through another.

`waiting_modules.txt` is the list. It is exact: a module that has become pure leaves it.
"""

from pathlib import Path

from tests.unit.structure.imports import imports, sources

LIST = Path(__file__).with_name("waiting_modules.txt")
# `ssl`, `socket` and the libraries do I/O; `time` and `random` make the same arguments give different results
IMPURE = frozenset(
    {
        *("asyncio", "socket", "ssl", "os", "time", "random", "secrets", "logging", "subprocess", "threading"),
        *("multiprocessing", "signal", "shutil", "tempfile", "grpc", "grpc_health", "redis", "zmq", "aiohttp"),
        *("lightkube", "httpx", "uvloop", "typer", "opentelemetry", "rich"),
    }
)


def waiting_modules() -> set[str]:
    """Return the modules that import something impure, themselves or through others of ours."""
    graph = imports(sources(("extproc", "kv_indexer", "kvmesh")))
    found = {name for name, imported in graph.items() if imported & IMPURE}
    while more := {name for name, imported in graph.items() if imported & found} - found:
        found |= more
    return found


def test_only_listed_modules_wait_look_at_clocks_or_draw_lots() -> None:
    listed = [line for line in LIST.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert listed == sorted(waiting_modules())
