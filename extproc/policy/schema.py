"""The kinds of fields that a policy's structs declare: one reading of the annotations for reader, CRD and docs table.

`kind_of(struct)` walks a msgspec Struct. A field's type gives its bounds, `about` its description; its default is the
picker's value if no policy sets the field. The API server fills in no defaults except inside lists that are merged as a
whole: elsewhere a namespace's default would hide the mesh's value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, inspect

# an absolute path without "..": a policy's author must not make the picker read arbitrary files
FILE_PATTERN = r"^/([^.]|\.[^.])*\.?$"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A condition across several fields of one object."""

    cel: str  # for the API server; only operators and macros that every CEL library has
    message: str
    holds: Callable[[Any], bool]  # the same check here, on a value with individually valid fields
    at: str = ""  # the field that the message is about; "" for the whole object


class Section(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A part of a policy: fields are in snake case here, in camel case in documents."""

    conditions: ClassVar[tuple[Rule, ...]] = ()
    is_open: ClassVar[bool] = False  # unknown fields are ignored


def at_most(lower: str, upper: str) -> Rule:
    """Return the rule that `lower` is at most `upper` if both are given."""

    def holds(given: Mapping[str, Any]) -> bool:
        low, high = given.get(lower), given.get(upper)
        return low is None or high is None or bool(low <= high)

    return Rule(
        cel=f"!has(self.{lower}) || !has(self.{upper}) || self.{lower} <= self.{upper}",
        message=f"{lower} must not be above {upper}",
        holds=holds,
    )


def about(
    description: str,
    *,
    default: str | None = None,
    names: Mapping[str, str] | None = None,
    entry: tuple[str, str] | None = None,
    keys: tuple[str, ...] = (),
    unique: bool = False,
    rules: tuple[Rule, ...] = (),
) -> Meta:
    """Describe a field.

    `default` documents the value without a policy, if the field's own default does not show it; "" documents nothing.
    A mapping has either `names`, all its possible keys, each with its documented default; or `entry`, for a list of
    objects in documents: the names of the objects' fields for key and value (if the second is "", the value's own
    fields are next to the key). In a list, `keys` names the fields that identify an item, and `unique` refuses
    duplicates. `rules` are conditions on a list as a whole, or on each entry of a mapping.
    """
    extra = {"default": default, "names": names, "entry": entry, "keys": keys, "unique": unique, "rules": rules}
    return Meta(description=description, extra={name: value for name, value in extra.items() if value is not None})


def matching(pattern: str, meaning: str, *, most: int, least: int = 1) -> Meta:
    """Restrict a text to a full match of a pattern (valid for RE2 and Python); `meaning` is for messages."""
    return Meta(min_length=least, max_length=most, pattern=pattern, extra={"meaning": meaning})


Share = Annotated[float, Meta(ge=0, le=1)]
RealShare = Annotated[float, Meta(gt=0, le=1)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
SecondsOrZero = Annotated[float, Meta(ge=0, le=86_400)]
Amount = Annotated[float, Meta(gt=0, le=10**15)]
AmountOrZero = Annotated[float, Meta(ge=0, le=10**15)]
Factor = Annotated[float, Meta(gt=0, le=10**6)]
Million = Annotated[float, Meta(ge=0, le=10**6)]
Count = Annotated[int, Meta(ge=1, le=10**6)]
CountOrZero = Annotated[int, Meta(ge=0, le=10**6)]
Tokens = Annotated[int, Meta(ge=1, le=10**9)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
HeaderName = Annotated[
    str,
    # RFC 9110, 5.6.2; Envoy's pseudo-headers begin with a colon
    matching(r"^:?[-!#$%&'*+.^_`|~0-9a-z]+$", "a header's name in lower case", most=128),
]


# --- kinds ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text of `least` to `most` characters."""

    least: int
    most: int
    pattern: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number within bounds; with `above` the lower bound is exclusive."""

    least: float
    most: float
    above: bool
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """True or false."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of a few texts or numbers."""

    of: tuple[str, ...] | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOf:
    """A list of at most `most` items, merged as a whole unless it is read as a mapping.

    `keys` names the fields that identify an item; with `unique` all items are different texts. A list read `as_mapping`
    becomes key -> the rest of the item, or key -> its field `value`: such lists are merged by key.
    """

    item: "Kind"
    least: int
    most: int
    keys: tuple[str, ...] = ()
    unique: bool = False
    as_mapping: bool = False
    value: str = ""
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """One field of an object."""

    kind: "Kind"
    description: str  # for the schema and the table
    default: str  # value without a policy, for people
    filled: Any = None  # value that the API server fills in if it is left out, or None
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An object with these fields, and by default no others."""

    properties: Mapping[str, Property]
    rules: tuple[Rule, ...] = ()
    is_open: bool = False  # others are allowed, and ignored


Kind = Text | Number | Flag | Choice | ListOf | Record


@cache
def kind_of(struct: type[Section]) -> Record:
    """Return the kinds of all fields below a struct."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return _record(info, filled=False)


def _record(info: inspect.StructType, *, filled: bool) -> Record:
    assert issubclass(info.cls, Section)
    properties = {field.encode_name: _property(field, filled=filled) for field in info.fields}
    return Record(properties=properties, rules=info.cls.conditions, is_open=info.cls.is_open)


def _property(field: inspect.Field, *, filled: bool) -> Property:
    kind, description, shown = _described(field.type, filled=filled)
    default = None if field.default is msgspec.NODEFAULT else field.default
    return Property(
        kind=kind,
        description=description,
        default=_shown(default) if shown is None else shown,
        filled=msgspec.to_builtins(default) if filled and default else None,
        required=field.required,
    )


def _described(annotated: inspect.Type, *, filled: bool) -> tuple[Kind, str, str | None]:
    """Return a type's kind and description, and the text of its default if `about` gives one."""
    extra: dict[str, Any] = {}
    description = ""
    kind = annotated
    while isinstance(kind, inspect.Metadata | inspect.UnionType):
        if isinstance(kind, inspect.Metadata):
            description = description or (kind.extra_json_schema or {}).get("description", "")
            extra = {**(kind.extra or {}), **extra}
            kind = kind.type
        else:  # a value or None, which documents do not write
            (kind,) = (each for each in kind.types if not isinstance(each, inspect.NoneType))
    return _kind(kind, extra, filled=filled), description, extra.get("default")


def _kind(kind: inspect.Type, extra: Mapping[str, Any], *, filled: bool) -> Kind:
    found: Kind
    match kind:
        case inspect.StructType():
            found = _record(kind, filled=filled)
        case inspect.BoolType():
            found = Flag()
        case inspect.FloatType() | inspect.IntType():
            bound = kind.ge if kind.gt is None else kind.gt
            assert bound is not None and kind.le is not None  # every number has bounds
            whole = isinstance(kind, inspect.IntType)
            found = Number(least=bound, most=kind.le, above=kind.gt is not None, whole=whole)
        case inspect.EnumType():
            found = Choice(of=tuple(member.value for member in kind.cls))
        case inspect.LiteralType():
            found = Choice(of=tuple(kind.values))  # type: ignore[arg-type]  # all texts, or all numbers
        case inspect.StrType():
            assert kind.max_length is not None  # every text has a bound
            meaning: str = extra.get("meaning", "")
            found = Text(least=kind.min_length or 0, most=kind.max_length, pattern=kind.pattern or "", meaning=meaning)
        case inspect.CustomType() if kind.cls is Path:
            found = Text(least=1, most=1024, pattern=FILE_PATTERN, meaning="an absolute path without '..'")
        case inspect.VarTupleType() | inspect.FrozenSetType():
            found = _list(kind, extra)
        case inspect.DictType():
            found = _mapping(kind, extra, filled=filled)
        case _:
            raise TypeError(f"a policy has no fields of the type {kind}")
    return found


def _list(kind: inspect.VarTupleType | inspect.FrozenSetType, extra: Mapping[str, Any]) -> ListOf:
    item, _, _ = _described(kind.item_type, filled=True)
    keys = extra.get("keys", ())
    assert kind.max_length is not None  # every list has a bound
    if isinstance(item, Record):  # the API requires a value for each key field
        properties = {name: _with_default(prop) if name in keys else prop for name, prop in item.properties.items()}
        item = replace(item, properties=properties)
    return ListOf(
        item=item,
        least=kind.min_length or 0,
        most=kind.max_length,
        keys=keys,
        unique=extra.get("unique", False) or isinstance(kind, inspect.FrozenSetType),
        rules=extra.get("rules", ()),
    )


def _with_default(prop: Property) -> Property:
    return prop if prop.required or prop.filled is not None else replace(prop, filled="")


def _mapping(kind: inspect.DictType, extra: Mapping[str, Any], *, filled: bool) -> Kind:
    value, description, _ = _described(kind.value_type, filled=filled)
    if "names" in extra:
        names: Mapping[str, str] = extra["names"]
        return Record(
            properties={
                name: Property(kind=value, description=description, default=default) for name, default in names.items()
            }
        )
    key, value_name = extra["entry"]
    key_kind, key_words, _ = _described(kind.key_type, filled=filled)
    properties = {key: Property(kind=key_kind, description=key_words, default="", required=True)}
    rules: tuple[Rule, ...] = extra.get("rules", ())
    if value_name:
        properties[value_name] = Property(kind=value, description=description, default="", required=True)
    else:
        assert isinstance(value, Record)
        properties |= value.properties
        rules = value.rules
    assert kind.max_length is not None  # every list has a bound
    item = Record(properties=properties, rules=rules)
    return ListOf(item=item, least=0, most=kind.max_length, keys=(key,), as_mapping=True, value=value_name)


def _shown(default: Any) -> str:
    """Return a default for descriptions, or "" if it need not be shown."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int | float):
        return f"{default:g}"
    if isinstance(default, str):
        return f'"{default}"' if default == "*" else default
    return ""
