"""Which module of ours imports which, and which of the standard library and of others. Read from the source."""

import ast
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
PACKAGES = ("extproc", "kv_indexer", "kvmesh", "operate", "podsim")


def sources(packages: Iterable[str] = PACKAGES) -> Mapping[str, Path]:
    """Return module name -> file."""
    found = {}
    for package in packages:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def nodes_of(path: Path) -> Iterable[ast.AST]:
    """Return the nodes of a file's syntax tree."""
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def imports(
    modules: Mapping[str, Path], *, nodes: Callable[[Path], Iterable[ast.AST]] = nodes_of
) -> Mapping[str, frozenset[str]]:
    """Return what each module imports anywhere, also late; of ours the module, of others the top package."""
    return {name: frozenset(_imported(nodes(path), modules)) - {name} for name, path in modules.items()}


def _imported(nodes: Iterable[ast.AST], modules: Mapping[str, Path]) -> Iterable[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in named:
            own = name if name in modules else name.rpartition(".")[0]
            yield own if own in modules else name.partition(".")[0]
