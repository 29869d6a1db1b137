"""Prints how the code is built: lines, files, modules with one importer, protocols, rooms, arrows, and one chat's path.

`python -m tools.structure`; docs/decisions/0007-rooms.md holds the table that it is compared with.
"""

import ast
from collections import Counter
from pathlib import Path

from tests.unit.structure.imports import imports, sources
from tools.traced_chat import traced_chat

PACKAGES = ("extproc", "kv_indexer", "kvmesh", "podsim")
THREE = ("extproc", "kv_indexer", "kvmesh")  # what was the picker and the indexer; `podsim` is a witness apart


def room_of(module: str) -> str:
    """Return the package and the folder below it."""
    return ".".join(module.split(".")[:2])


def protocols(path: Path) -> int:
    """Count the classes that are protocols by their bases."""
    classes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)]
    return sum(any(_name(base) == "Protocol" for base in each.bases) for each in classes)


def _name(base: ast.expr) -> str:
    if isinstance(base, ast.Subscript):
        base = base.value
    return base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""


def main() -> None:
    """Print the table."""
    modules = sources(PACKAGES)
    graph = imports(modules)
    importers = Counter(each for imported in graph.values() for each in imported if each in modules)
    rooms = {room_of(name) for name in modules if name.partition(".")[0] in THREE and name.count(".") >= 2}
    arrows = {(room_of(a), room_of(b)) for a in graph for b in graph[a] if b in modules and room_of(a) != room_of(b)}
    inside = [name for name, path in modules.items() if path.name != "__init__.py"]
    top = [
        name for name in inside if name.count(".") == 1 and name.startswith("extproc.") and name != "extproc.__main__"
    ]
    rows = {
        "lines of Python": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in modules.values()),
        "files": len(modules),
        "files without `__init__.py`": len(inside),
        "modules that exactly one other imports": sum(importers[name] == 1 for name in inside),
        "modules of extproc in no room": len(top),
        "protocols": sum(protocols(path) for path in modules.values()),
        "rooms": len(rooms),
        "arrows between rooms": len(arrows),
    }
    rows |= traced_chat().counts()
    for name, value in rows.items():
        print(f"{name:42}{value:>8,}")


if __name__ == "__main__":
    main()
