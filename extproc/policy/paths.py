"""Where people write what the picker's documents have: paths of `fields` and of error messages as paths of `spec`.

Used by `inference_policy`, and for the origins of merged fields.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from extproc.policy.bounds import POLICY
from extproc.policy.field_kinds import Kind, ListOf, Path, Property, Record, snake
from extproc.policy.fields import SPEC
from extproc.policy.reading import PolicyDocumentError

FIELD_PATH = re.compile(r"(?P<path>[^\s:]+):? (?P<words>.*)", re.DOTALL)
SNAKE_WORD = re.compile(r"(?<!\w)[a-z]+(?:_[a-z]+)+(?!\w)")
QUOTED_OR_NOT = re.compile(r"'[^']*'|\"[^\"]*\"|[^'\"]+|['\"]")  # in quotes it is somebody's own
PATH_PART = re.compile(r"[^.\[\]]+")
NAMED: tuple[Path, ...] = ((*POLICY, "priorities", "classes"), (*POLICY, "priorities", "objectives"))  # by people
OTHER_PATH = re.compile(r"\b(?:policy|models)\.[^\s:,]+")


def spec_path(path: Sequence[str]) -> str:
    """Return where people write what `fields` has at this path.

    ("policy", "priorities", "classes", "chat", "ttft_seconds") -> "spec.priorities.classes[chat].ttftSeconds".
    """
    parts = tuple(path)
    unknown = parts[1:] if parts[:1] == POLICY else parts  # a setting that the resource does not have
    return "spec" + (_names(SPEC, parts, ()) or "".join(f".{part}" for part in unknown))


def in_words_of_the_resource(message: str, fields: Mapping[str, Any]) -> PolicyDocumentError:
    """Return what was said of merged `fields` by whoever reads them, with paths and names as people write them."""
    match = FIELD_PATH.match(message)
    if match is None:
        return PolicyDocumentError("spec", message)
    path = spec_path(_split(match["path"], fields))
    return PolicyDocumentError(path, QUOTED_OR_NOT.sub(lambda part: _in_words(part[0], fields), match["words"]))


def _in_words(part: str, fields: Mapping[str, Any]) -> str:
    if part[0] in "'\"":
        return part
    part = OTHER_PATH.sub(lambda found: spec_path(_split(found[0], fields)), part)
    return SNAKE_WORD.sub(lambda found: _camel(found[0]), part)


def _split(text: str, fields: Mapping[str, Any]) -> Path:
    """Split `policy.priorities.rules[0].headers`; the names of classes and objectives may have dots."""
    parts: list[str] = []
    priorities = fields.get("policy", {}).get("priorities", {})
    for part in PATH_PART.findall(text):
        longer = f"{parts[-1]}.{part}" if parts else part
        names = priorities.get(parts[-2], {}) if tuple(parts[:-1]) in NAMED else ()
        if any(f"{name}.".startswith(f"{longer}.") for name in names):
            parts[-1] = longer
        else:
            parts.append(part)
    return tuple(parts)


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)


def _target(name: str, prop: Property, parent: Path) -> Path:
    return (*parent, snake(name)) if prop.into is None else prop.into


def _names(record: Record, path: Path, parent: Path) -> str:
    """Return the resource's names for a path in the picker's documents, "" where the record has nothing there."""
    for name, prop in record.properties.items():
        target = _target(name, prop, parent)
        if path[: len(target)] != target:
            continue
        rest = path[len(target) :]
        if not isinstance(prop.kind, Record):
            return f".{name}{_rest_names(prop.kind, rest)}"
        if not rest and target != POLICY:  # several sections share that one
            return f".{name}"
        if found := _names(prop.kind, path, target):
            return f".{name}{found}"
    return _elsewhere(record, path, parent)


def _elsewhere(record: Record, path: Path, parent: Path) -> str:
    """Look into the sections whose fields do not all lie below the section itself."""
    for name, prop in record.properties.items():
        target = _target(name, prop, parent)
        if not isinstance(prop.kind, Record) or path[: len(target)] == target:
            continue
        if found := _names(prop.kind, path, target):
            return f".{name}{found}"
    return ""


def _rest_names(kind: Kind, rest: Path) -> str:
    if not rest:
        return ""
    if not isinstance(kind, ListOf):
        return "".join(f".{part}" for part in rest)
    found = _names(kind.item, rest[1:], ()) if isinstance(kind.item, Record) and len(rest) > 1 else ""
    return f"[{rest[0]}]" + (found or "".join(f".{part}" for part in rest[1:]))
