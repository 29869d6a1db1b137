"""Reads our packages once, and counts in them: lines, imports, classes, words, annotations."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from tests.unit.structure.imports import REPOSITORY, imports, sources
from tools.dialect import cached_nodes

PACKAGES = tuple(
    name for name in ("operate", "extproc", "kv_indexer", "kvmesh", "podsim") if (REPOSITORY / name).is_dir()
)
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # of statements
Node = TypeVar("Node", bound=ast.AST)
LONG_FILE = 400  # lines


def room_of(module: str) -> str:
    """Return the package and the folder, or the module, below it."""
    return ".".join(module.split(".")[:2])


@dataclass(frozen=True)
class Module:
    """One file of Python."""

    name: str
    path: Path

    @property
    def package(self) -> str:
        """The top package."""
        return self.name.partition(".")[0]

    @cached_property
    def text(self) -> str:
        """The whole file."""
        return self.path.read_text(encoding="utf-8")

    @property
    def lines(self) -> list[str]:
        """The lines of the file."""
        return self.text.splitlines()

    @property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the syntax tree."""
        return cached_nodes(self.path)


class SourceTree:
    """The packages as they are on disk."""

    def __init__(self) -> None:
        self.paths = sources(PACKAGES)
        self.modules = [Module(name, path) for name, path in self.paths.items()]

    @cached_property
    def imported(self) -> Mapping[str, frozenset[str]]:
        """The modules that each module imports."""
        return imports(self.paths, nodes=cached_nodes)

    def lines(self) -> Mapping[str, int]:
        """Return the lines of Python by package."""
        counts = Counter(dict.fromkeys(PACKAGES, 0))
        for module in self.modules:
            counts[module.package] += len(module.lines)
        return counts

    def long_files(self) -> int:
        """Return the number of files that are longer than LONG_FILE."""
        return sum(len(module.lines) > LONG_FILE for module in self.modules)

    def single_importers(self) -> int:
        """Return the number of modules that exactly one other module imports."""
        importers = Counter(each for imported in self.imported.values() for each in imported if each in self.paths)
        return sum(importers[name] == 1 for name, path in self.paths.items() if path.name != "__init__.py")

    def arrows(self) -> int:
        """Return the number of pairs of rooms of which one imports the other."""
        graph = self.imported
        pairs = {(room_of(name), room_of(each)) for name in graph for each in graph[name] if each in self.paths}
        return sum(importer != imported for importer, imported in pairs)

    def late_imports(self) -> int:
        """Return the number of import statements in functions."""
        return sum(_late_imports(module.nodes[:1]) for module in self.modules)

    def protocols(self) -> int:
        """Return the number of classes that are protocols by their bases."""
        classes = self._all(ast.ClassDef)
        return sum(any(_name(base) == "Protocol" for base in each.bases) for each in classes)

    def metrics(self) -> set[str]:
        """Return the names of the metrics' families that are declared."""
        calls = (call for call in self._all(ast.Call) if _name(call.func) in ("counter", "gauge", "histogram"))
        names = (call.args[0].value for call in calls if call.args and isinstance(call.args[0], ast.Constant))
        return {name for name in names if isinstance(name, str)}

    def callables(self, package: str) -> int:
        """Return the number of parameters and fields that are a `Callable`, or may be one."""
        count = 0
        for module in self.modules:
            if module.package != package:
                continue
            for node in module.nodes:
                if isinstance(node, ast.arg):
                    count += _is_callable(node.annotation)
                elif isinstance(node, ast.ClassDef):
                    fields = (each for each in node.body if isinstance(each, ast.AnnAssign))
                    count += sum(_is_callable(each.annotation) for each in fields)
        return count

    def rooms_with(self, word: str, *, package: str) -> int:
        """Return the number of a package's rooms in whose code or comments a word stands, also as part of another."""
        return len({room_of(each.name) for each in self.modules if each.package == package and word in each.text})

    def matching_lines(self, names: tuple[str, ...], pattern: str) -> tuple[int, int]:
        """Return the lines of modules, and how many of these match. Raise KeyError for a module that is not there."""
        of_name = {module.name: module for module in self.modules}
        lines = [line for name in names for line in of_name[name].lines]
        return len(lines), sum(re.search(pattern, line) is not None for line in lines)

    def _all(self, kind: type[Node]) -> Iterator[Node]:
        return (node for module in self.modules for node in module.nodes if isinstance(node, kind))


def _late_imports(statements: Iterable[ast.AST], *, is_late: bool = False) -> int:
    """Count the imports in functions: only statements hold statements, and they are few among the nodes."""
    count = 0
    for each in statements:
        if isinstance(each, ast.Import | ast.ImportFrom):
            count += is_late
            continue
        for name in BLOCKS:
            if block := getattr(each, name, None):
                count += _late_imports(block, is_late=is_late or isinstance(each, FUNCTIONS))
    return count


def _name(base: ast.expr) -> str:
    if isinstance(base, ast.Subscript):
        base = base.value
    return base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""


def _is_callable(annotation: ast.expr | None) -> bool:
    if annotation is None:
        return False
    if isinstance(annotation, ast.BinOp):  # a union
        return _is_callable(annotation.left) or _is_callable(annotation.right)
    return _name(annotation) == "Callable"
