"""Reads the values of a command's usual options, which typer would load pydantic for: a third of a picker's start.

What is not plainly right is left to typer, which reads it by its own rules or says what is wrong with it. Called by the
command line alone.
"""

import os
import re
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import typer

INT = re.compile(r"-?[0-9]{1,18}")
FLOAT = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")


def read_plainly(root: Any, commands: Iterable[Any]) -> None:
    """Have the options of commands of typer's read so, as far as they are of a type that is known here."""
    above = typer.Context(root, **root.context_settings)
    options = root.get_params(above)  # and `--help`
    for command in commands:
        options += command.get_params(typer.Context(command, parent=above))
    for option in {id(each): each for each in options}.values():  # some are shared
        kind, declared = option.type_descriptor.annotation, option.type_descriptor.parameter_info
        if option.nargs == 1 and not getattr(option, "multiple", False) and declared.parser is None:
            option.get_runtime_param = PlainReader(kind, declared, option.get_runtime_param).itself


class PlainReader:
    """Stands in for what typer reads one option with."""

    def __init__(self, kind: Any, declared: Any, usual: Callable[[], Any]) -> None:
        """`declared` has the option's limits; `usual` returns what typer reads it with."""
        self._kind = kind
        self._declared = declared
        self._usual = usual

    def itself(self) -> "PlainReader":
        """Return this; typer asks for it with each value."""
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the option's value as its type; raise what typer raises for one that is wrong."""
        if value is None:
            return None
        read = plain_value(value, self._kind, self._declared)
        return self._usual().coerce(value, param=param, ctx=ctx) if read is None else read


def plain_value(value: Any, kind: Any, declared: Any) -> Any:
    """Return a value as `kind` where that is plain, else None."""
    if kind is str or kind is bool:
        return value if type(value) is kind else None
    if kind is int or kind is float:
        return _number(value, kind, declared)
    if kind is Path:
        return _path(value, declared)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return value if type(value) is kind else {each.value: each for each in kind}.get(value)
    return None


def _number(value: Any, kind: type[int] | type[float], declared: Any) -> Any:
    if (isinstance(value, str) and (INT if kind is int else FLOAT).fullmatch(value)) or type(value) is int:
        value = kind(value)
    if type(value) is not kind:
        return None
    is_within = (declared.min is None or value >= declared.min) and (declared.max is None or value <= declared.max)
    return value if is_within else None


def _path(value: Any, declared: Any) -> Path | None:
    if not isinstance(value, str | Path) or declared.resolve_path or declared.allow_dash:
        return None
    path = Path(value)
    if not path.exists():
        return None if declared.exists else path
    is_welcome = (declared.file_okay or not path.is_file()) and (declared.dir_okay or not path.is_dir())
    return path if is_welcome and not declared.writable and os.access(path, os.R_OK) else None
