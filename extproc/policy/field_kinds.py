"""The kinds of fields that a policy resource is made of: what each takes, in words that both schema and reader use.

Values only. `policy_fields` builds the resource from them, `policy_reading` reads documents by them and `policy_crd`
writes the schema, so that neither knows a field that the other does not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What several fields of one object must have to do with each other."""

    cel: str  # as the API server checks it; only operators and macros that every CEL library has
    message: str
    holds: Callable[[Any], bool]  # the same here, of a value whose fields are valid one by one
    at: str = ""  # the field that the message is about, "" for the whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text of `least` to `most` characters that matches the pattern (RE2 and Python alike) as a whole."""

    most: int = 256
    least: int = 1
    pattern: str = ""
    words: str = ""  # what the pattern wants, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number within bounds; `above` instead of `least` where the bound itself is no value."""

    least: float | None = 0.0
    above: float | None = None
    most: float = 1e9
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """True or false."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of a few words or numbers."""

    of: tuple[str, ...] | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOf:
    """A list of at most `most` items, replaced as a whole in merging unless it is read as a mapping.

    `keys` names the items' fields that tell them apart; with `unique` all items are different texts. A list that is
    read `as_mapping` becomes key -> the rest of the item, or key -> its field `value`: such lists are merged by key.
    """

    item: "Kind"
    most: int
    least: int = 0
    keys: tuple[str, ...] = ()
    unique: bool = False
    as_mapping: bool = False
    value: str = ""
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """One field of an object: what it takes, what it means, and where it goes."""

    kind: "Kind"
    words: str  # for the schema and the field table
    into: Path | None = None  # in the documents that the picker reads; None: in the parent, by its name in snake case
    required: bool = False
    default: Any = (
        None  # only inside lists that are replaced as a whole: elsewhere it would hide a wider policy's value
    )
    usual: str = ""  # what holds where nobody says, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An object with these fields and no others."""

    properties: Mapping[str, Property]
    rules: tuple[Rule, ...] = field(default=())


Kind = Text | Number | Flag | Choice | ListOf | Record


@cache
def snake(name: str) -> str:
    """Return a field's name as the picker's documents write it: ttftSeconds -> ttft_seconds."""
    if not name[:1].islower() or "-" in name:
        return name  # a scorer or a tier: their names are the same everywhere
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
