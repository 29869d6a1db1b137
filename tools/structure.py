"""Prints how the code is built: `python -m tools.structure`, as JSON with `--json`.

tests/unit/structure/budgets.toml limits most of these numbers; docs/decisions/0007-rooms.md has those of a rewrite.
"""

import importlib
import inspect
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kvmesh.heap import collector_at_rest
from operate.cli import build
from tests.unit.structure.imports import REPOSITORY
from tools import dialect
from tools.reference import SHARED, commands
from tools.source_tree import PACKAGES, SourceTree
from tools.traced_chat import traced_chat

# the modules that every pick goes through; who splits or merges them edits this
PATH = (
    "extproc.pick",
    "extproc.pools.pool_runtime",
    "extproc.pools.picker_books",
    "extproc.pools.booked_exchange",
    "extproc.pools.prefill_legs",
)
ASIDE = r"telemetry|trace|shadow|slo\b|history"  # on a line of the path: it counts, traces or asks about shadow mode
# classes of the path that do not travel with a request: as old as their pool, or part of one that is counted
SETTLED = frozenset({"PoolRuntime", "PickerBooks", "PrefillLegs"})
PARTS = frozenset({"ReadResponse", "BookedLeg"})  # one response, perhaps of another picker's request; of PrefillWork
CROSSING = ("shadow", "promise", "degrad")  # words of features that many rooms know
POLICY = REPOSITORY / "manifests" / "crds" / "kvmesh.io_inferencepolicies.yaml"
OWN_METRICS = "kvmesh_"


def measures() -> Mapping[str, float]:
    """Return all numbers by name."""
    tree = SourceTree()
    return {**_sizes(tree), **traced_chat().counts(), **_path(tree), **_surface(tree), **_texts()}


def _sizes(tree: SourceTree) -> Mapping[str, float]:
    lines = tree.lines()
    return {
        **{f"lines of {package}": lines[package] for package in PACKAGES},
        "lines of the packages": sum(lines.values()),
        "files over 400 lines": tree.long_files(),
        "modules that exactly one other imports": tree.single_importers(),
        "late imports in functions": tree.late_imports(),
        "protocols": tree.protocols(),
        "parameters and fields of extproc that are callables": tree.callables("extproc"),
        "arrows between rooms": tree.arrows(),
        **{f"rooms of extproc with {word!r}": tree.rooms_with(word, package="extproc") for word in CROSSING},
    }


def _path(tree: SourceTree) -> Mapping[str, float]:
    lines, aside = tree.matching_lines(PATH, ASIDE)
    travelling = list(travelling_classes())
    return {
        "lines of the path": lines,
        "lines of the path that count, trace or shadow": aside,
        "mutable objects that travel with a request": len(travelling),
        "fields of these": sum(len(_fields(each)) for each in travelling),
    }


def travelling_classes() -> Iterator[type]:
    """Return the mutable classes of the path, without SETTLED and PARTS: a new one counts until it is in these.

    Raise AssertionError for a name in these that no module of the path has.
    """
    kept: dict[str, type] = {}
    for name in PATH:
        module = importlib.import_module(name)
        kept |= {each: cls for each, cls in vars(module).items() if inspect.isclass(cls) and cls.__module__ == name}
    assert kept.keys() >= SETTLED | PARTS, f"not on the path: {(SETTLED | PARTS) - kept.keys()}"
    return (cls for name, cls in kept.items() if name not in SETTLED | PARTS and _is_mutable(cls))


def _is_mutable(cls: Any) -> bool:
    if issubclass(cls, Enum | BaseException) or getattr(cls, "_is_protocol", False):
        return False
    if issubclass(cls, msgspec.Struct):
        return not cls.__struct_config__.frozen
    return not (is_dataclass(cls) and vars(cls)["__dataclass_params__"].frozen)


def _fields(cls: Any) -> tuple[Any, ...]:
    if is_dataclass(cls):
        return fields(cls)
    names: tuple[str, ...] = cls.__struct_fields__ if issubclass(cls, msgspec.Struct) else tuple(cls.__slots__)
    return names


def _surface(tree: SourceTree) -> Mapping[str, float]:
    """Return the numbers of options, properties and metrics.

    A command's arguments count as options, the options that every command has do not. A metric is a declared family
    with the product's prefix: simulated pods and the inference extension's names have others.
    """
    given = [
        each.name for _, command in commands(build()) for each in command.params if each.name not in (*SHARED, "help")
    ]
    (version,) = yaml.safe_load(POLICY.read_text(encoding="utf-8"))["spec"]["versions"]
    policy = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return {
        "command-line options": len(given),
        "different command-line options": len(set(given)),
        "policy properties": _properties(policy),
        "metrics": len([name for name in tree.metrics() if name.startswith(OWN_METRICS)]),
    }


def _properties(schema: Any) -> int:
    """Count the properties of an OpenAPI schema, at any depth."""
    if isinstance(schema, list):
        return sum(map(_properties, schema))
    if not isinstance(schema, dict):
        return 0
    own = schema.get("properties")
    here = len(own) if isinstance(own, dict) else 0
    return here + sum(_properties(each) for each in schema.values())


def _texts() -> Mapping[str, float]:
    pages, tests = (REPOSITORY / "docs").rglob("*.md"), (REPOSITORY / "tests").rglob("*.py")
    return {
        "dialect of extproc, %": dialect.share(REPOSITORY / "extproc"),
        "dialect of kv_indexer and kvmesh, %": dialect.share(REPOSITORY / "kv_indexer", REPOSITORY / "kvmesh"),
        "dialect of docs, %": dialect.share(REPOSITORY / "docs"),
        "dialect of README, %": dialect.share(REPOSITORY / "README.md"),
        "lines of tests": sum(len(_read(path).splitlines()) for path in tests),
        "words of docs": sum(len(_read(path).split()) for path in pages),
    }


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Print the table."""
    logging.disable()  # the traced picker says that it has no indexer
    with collector_at_rest():
        found = measures()
    if "--json" in arguments:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:54}{value:>8,}")


if __name__ == "__main__":
    main(sys.argv[1:])
