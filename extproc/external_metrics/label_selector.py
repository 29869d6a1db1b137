"""Label selectors as the API server hands them on: `pool=llama,role in (both, decode)`. Pure.

https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#label-selectors
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

LONGEST_TEXT = 4_096  # characters
_KEY = r"[A-Za-z0-9](?:[-A-Za-z0-9_./]*[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
_EQUALITY = re.compile(rf"({_KEY})\s*(==|=|!=)\s*({_VALUE})")
_SET = re.compile(rf"({_KEY})\s+(in|notin)\s*\(([^()]*)\)")
_EXISTS = re.compile(rf"(!?)\s*({_KEY})")
_COMMA_OUTSIDE = re.compile(r",(?![^(]*\))")  # not one of those within brackets


class SelectorError(ValueError):
    """What was sent is no selector; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """One condition on a label."""

    key: str
    values: frozenset[str] | None  # None: any, it only has to be there
    negated: bool = False

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Tell whether these labels meet it; a label that is not there is unequal to everything."""
        value = labels.get(self.key)
        is_met = value is not None and (self.values is None or value in self.values)
        return is_met != self.negated


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSelector:
    """Conditions that are all to be met."""

    requirements: Sequence[Requirement] = ()

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Tell whether these labels meet all conditions."""
        return all(each.holds(labels) for each in self.requirements)


def parse_selector(text: str, *, known: Collection[str]) -> LabelSelector:
    """Read a selector of these labels. Raise SelectorError, also for a label that is not known: it is misspelt."""
    if len(text) > LONGEST_TEXT:
        raise SelectorError(f"it is longer than {LONGEST_TEXT} characters")
    parts = [part.strip() for part in _COMMA_OUTSIDE.split(text)] if text.strip() else []
    requirements = tuple(_requirement(part) for part in parts)
    for each in requirements:
        if each.key not in known:
            raise SelectorError(f"there is no label {each.key!r}; there are {', '.join(known)}")
    return LabelSelector(requirements=requirements)


def _requirement(text: str) -> Requirement:
    if found := _EQUALITY.fullmatch(text):
        return Requirement(key=found[1], values=frozenset({found[3]}), negated=found[2] == "!=")
    if found := _SET.fullmatch(text):
        values = frozenset(value.strip() for value in found[3].split(","))
        if not all(re.fullmatch(_VALUE, value) for value in values):
            raise SelectorError(f"{text!r} has a value that no label may have")
        return Requirement(key=found[1], values=values, negated=found[2] == "notin")
    if found := _EXISTS.fullmatch(text):
        return Requirement(key=found[2], values=None, negated=bool(found[1]))
    raise SelectorError(f"{text!r} is no condition: write LABEL=VALUE, LABEL!=VALUE, LABEL in (VALUE, ...)")
