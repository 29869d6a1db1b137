"""Plain values of a document (YAML or JSON, already parsed) -> dataclasses; strict: an error names the path.

Used by `policy_document`. The document's fields are those of the dataclasses, so that neither can have one more.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from extproc.errors import ConfigError

T = TypeVar("T")
# what a message of msgspec's ends with where it knows the place
PLACE = " - at `$"
_hints: Callable[[type], Mapping[str, Any]] = cache(get_type_hints)


def read_over(document: object, base: T, path: str) -> T:
    """Return `base` with the fields that the document gives in their place, at any depth.

    A mapping of dataclasses is merged key by key; a list of them takes the place of the one below.
    """
    given = mapping(document, path)
    hints = _hints(type(base))
    refuse_unknown(given, hints, path)
    changed = {name: _value(value, hints[name], getattr(base, name), f"{path}.{name}") for name, value in given.items()}
    return replace(base, **changed)  # type: ignore[type-var]  # every caller's base is a dataclass


def read_new(document: object, kind: type[T], path: str) -> T:
    """Return a new value of this dataclass; a field without default must be given."""
    given = mapping(document, path)
    hints = _hints(kind)
    refuse_unknown(given, hints, path)
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in given and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{path}.{field.name}: is missing")
    return kind(**{name: _value(value, hints[name], None, f"{path}.{name}") for name, value in given.items()})


def numbers(value: Any, path: str) -> Iterator[tuple[str, str, float]]:
    """Yield every number in a dataclass: its path, its field's name, itself."""
    for field in fields(value):
        yield from _numbers(getattr(value, field.name), field.name, f"{path}.{field.name}")


def mapping(value: object, path: str) -> Mapping[str, Any]:
    """Return a mapping whose keys are texts, or raise ConfigError."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{path}: must be a mapping, not {value!r}")
    return value


def refuse_unknown(given: Iterable[str], known: Iterable[str], path: str, *, what: str = "field") -> None:
    """Raise ConfigError for the first name that is not known."""
    known = list(known)
    for name in given:
        if name not in known:
            raise ConfigError(f"{path}.{name}: unknown {what}{nearest(name, known)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message that names what was probably meant."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
    return f"; the nearest valid one is {close[0]!r}" if close else ""


def _value(value: object, hint: Any, below: Any, path: str) -> Any:
    if is_dataclass(below):
        return read_over(value, below, path)
    inner: tuple[Any, ...] = get_args(hint)
    if get_origin(hint) is tuple and is_dataclass(inner[0]):
        if not isinstance(value, list):
            raise ConfigError(f"{path}: must be a list, not {value!r}")
        return tuple(read_new(item, inner[0], f"{path}[{i}]") for i, item in enumerate(value))  # type: ignore[arg-type]
    if get_origin(hint) is Mapping and is_dataclass(inner[1]):
        usual: Any = inner[1]
        parts = {
            name: read_over(part, below[name] if name in below else usual(), f"{path}.{name}")
            for name, part in mapping(value, path).items()
        }
        return {**below, **parts}
    if get_origin(hint) is Mapping:
        return {name: _value(part, inner[1], None, f"{path}.{name}") for name, part in mapping(value, path).items()}
    if isinstance(hint, type) and issubclass(hint, Enum) and value not in [member.value for member in hint]:
        raise ConfigError(f"{path}: must be one of {', '.join(str(member.value) for member in hint)}, not {value!r}")
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise ConfigError(_placed(str(error), path)) from error


def _numbers(value: Any, name: str, path: str) -> Iterator[tuple[str, str, float]]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield path, name, value
    elif is_dataclass(value):
        yield from numbers(value, path)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _numbers(part, name, f"{path}.{key}")
    elif isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from _numbers(part, name, f"{path}[{i}]")


def _placed(message: str, path: str) -> str:
    words, _, place = message.partition(PLACE)
    return f"{path}{place.rstrip('`')}: {words[:1].lower()}{words[1:]}"
