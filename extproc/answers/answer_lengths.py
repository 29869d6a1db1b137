"""Expected length of an answer in tokens, learned from the answers of its session, tenant, class and model. Pure.

The most specific group with enough answers decides. Whole answers whose usage was read are learned: a sample, and all
of tenants with quotas. The mean and variance are exponentially weighted (Finch 2009, "Incremental calculation of
weighted mean and variance").
"""

from collections.abc import Mapping
from math import sqrt

import msgspec

WEIGHT = 0.05  # of the newest answer, once a group has 1 / WEIGHT answers
LEAST_ANSWERS = 5  # of a group, to decide
MOST_GROUPS = 4096  # sessions and tenants are the clients' names


class AnswerKind(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a request that decide on its answer's length; "" where there are none."""

    model: str  # a configured name, or ""
    adapter: str = ""
    class_name: str = ""
    tenant: str = ""
    session: str = ""
    choices: int = 1  # answers of one request, all with their own length

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups that learn from the answer, the most specific first."""
        served = self.model, self.adapter
        groups = (*served, self.class_name, self.tenant), (*served, self.class_name), served
        return ((self.session,), *groups) if self.session else groups


class AnswerLength(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The expected length of one request's answers, in tokens of all its choices."""

    tokens: float = 0.0  # mean; 0 if unknown
    spread: float = 0.0  # standard deviation


UNKNOWN_LENGTH = AnswerLength()


class AnswerLengths:
    """The groups' lengths; above MOST_GROUPS the group that has learned nothing for the longest time is dropped."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, ...], _Lengths] = {}
        self._errors: dict[str, _Lengths] = {}  # by model

    def expected(self, kind: AnswerKind | None, *, most: int | None) -> AnswerLength:
        """Return the length of a request's answers, at most `most` tokens (None: no limit)."""
        if kind is None:
            return UNKNOWN_LENGTH
        for group in kind.groups:
            seen = self._groups.get(group)
            if seen is not None and seen.answers >= LEAST_ANSWERS:
                tokens, spread = seen.mean * kind.choices, sqrt(seen.variance * kind.choices)
                if most is not None:
                    tokens = min(tokens, float(most))
                    spread = min(spread, most - tokens)
                return AnswerLength(tokens=tokens, spread=spread)
        return UNKNOWN_LENGTH

    def note(self, kind: AnswerKind, tokens: int, *, expected: float = 0.0) -> None:
        """Learn the tokens of a request's answers; `expected`: at its pick, 0 if unknown."""
        if expected:
            self._errors.setdefault(kind.model, _Lengths()).add(abs(expected - tokens))
        for group in kind.groups:
            seen = self._groups.pop(group, None) or _Lengths()
            seen.add(tokens / max(kind.choices, 1))
            self._groups[group] = seen  # re-inserted: the order is least recently learned first
        while len(self._groups) > MOST_GROUPS:
            del self._groups[next(iter(self._groups))]

    def errors(self) -> Mapping[str, float]:
        """Return the recent mean error |expected - real| by model, in tokens."""
        return {model: each.mean for model, each in self._errors.items()}


class _Lengths(msgspec.Struct, kw_only=True, eq=False, gc=False):
    mean: float = 0.0
    variance: float = 0.0
    answers: int = 0

    def add(self, tokens: float) -> None:
        self.answers += 1
        weight = max(1.0 / self.answers, WEIGHT)
        off = tokens - self.mean
        self.mean += weight * off
        self.variance = (1.0 - weight) * (self.variance + weight * off * off)
