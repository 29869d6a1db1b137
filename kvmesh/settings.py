"""Declares the settings of a process once, as the fields of the frozen dataclass that holds their values.

Flag, environment variable (`KVMESH_<FLAG>`), key of the YAML file, help and check follow from a field:

    index_timeout_seconds: float = milliseconds(0.02, "Milliseconds to wait for Redis.", "index_timeout_ms", least=1)

`kvmesh.options` makes the command-line option. Pure.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, TypeVar

T = TypeVar("T")
MARK = "setting"  # key of a field's metadata
OWN: Any = object()  # the field's own value


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The option that fills a field."""

    help: str
    flag: str = ""  # with underscores, as the key of the YAML file; default: the field's name
    given: Any = OWN  # the type on the command line
    shown: Any = OWN  # the default on the command line
    read: Callable[[Any], Any] | None = None  # makes the field's value; raises an error that names the mistake
    write: Callable[[Any], Any] | None = None  # makes the shown default from the field's
    absent: Any = OWN  # the field's value if nothing is given
    warn: Callable[[str], str | None] | None = None  # returns why a value must not be given on the command line
    switch: str | None = None  # "--on/--off" of a boolean; default: --FLAG/--no-FLAG
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    must_exist: bool = False  # a path
    is_folder: bool | None = None  # a path: must be a folder (True), must be none (False), or either (None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The options of a settings class; `instead` redeclares some of its fields."""

    holds: type
    instead: tuple[tuple[str, Setting], ...] = ()


def setting(
    default: T, text: str, flag: str = "", *, factory: Callable[[], T] | None = None, secret: bool = False, **more: Any
) -> T:
    """Declare a field that an option fills: its default, its help, its flag, and further attributes of `Setting`.

    `factory` makes a new default for each value; a `secret` is left out of the value's repr.
    """
    metadata = {MARK: Setting(help=text, flag=flag, **more)}
    if factory is not None:
        return field(default_factory=factory, repr=not secret, metadata=metadata)
    return field(default=default, repr=not secret, metadata=metadata)


def text_setting(default: T, text: str, flag: str = "", *, read: Callable[[str], T], **more: Any) -> T:
    """Declare a field that is read from a text; without a text it keeps its default."""
    return setting(default, text, flag, given=str | None, shown=None, read=read, **more)


def milliseconds(default: float, text: str, flag: str, *, least: float) -> float:
    """Declare a field in seconds that an option in milliseconds fills."""
    return setting(default, text, flag, given=float, read=_seconds, write=_milliseconds, least=least)


def _seconds(value: float) -> float:
    return value / 1000


def _milliseconds(seconds: float) -> float:
    value = round(seconds * 1000, 6)
    return int(value) if value.is_integer() else value  # as help shows it


def group(default: T, **instead: Setting) -> T:
    """Declare a field that holds a group of settings; `instead` redeclares some of their fields."""
    return field(default=default, metadata={MARK: Group(holds=type(default), instead=tuple(instead.items()))})


def declared(holds: type, name: str) -> Any:
    """Declare a field with the default and the option of the field `name` of another settings class."""
    known = next(each for each in fields(holds) if each.name == name)
    return field(default=known.default, repr=known.repr, metadata={MARK: options_of(holds)[name]})


def options_of(holds: type) -> Mapping[str, Setting]:
    """Return the options that fill the fields of a class, by field name; without its groups' options."""
    marks = declarations(Group(holds=holds))
    return {each.name: mark for each, mark in marks if isinstance(mark, Setting)}


def declarations(group: Group) -> Iterator[tuple[Field[Any], Setting | Group]]:
    """Return the fields that the command line fills, in order; each setting has its flag."""
    instead = dict(group.instead)
    for each in fields(group.holds):
        mark = instead.get(each.name, each.metadata.get(MARK))
        if isinstance(mark, Setting):
            yield each, replace(mark, flag=mark.flag or each.name)
        elif mark is not None:
            yield each, mark
