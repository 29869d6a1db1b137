"""Deployments that are not scaled as a policy wants, as its status says it. Pure values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MOST_NAMED = 3  # Deployments, in one condition


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleProblem:
    """One Deployment."""

    deployment: str  # of the pool's namespace
    reason: str  # a word, like "autoscaler-decides"
    message: str


Problems = tuple[tuple[str, ScaleProblem], ...]  # each with its pool


def problems_of(problems: Mapping[str, Sequence[ScaleProblem]], pools: Iterable[str]) -> Problems:
    """Return those of these pools."""
    return tuple((pool, each) for pool in pools for each in problems.get(pool, ()))


def as_said(problems: Iterable[tuple[str, ScaleProblem]]) -> frozenset[tuple[str, str, str]]:
    """Return what a status is written anew for: pools, Deployments, reasons; the words may change all the time."""
    return frozenset((pool, each.deployment, each.reason) for pool, each in problems)


def scale_words(problems: Problems) -> tuple[str, str]:
    """Return the reason and the message of a condition; there is one problem at least."""
    said = [f"Deployment {pool.partition('/')[0]}/{each.deployment}: {each.message}" for pool, each in problems]
    more = len(said) - MOST_NAMED
    reason = "".join(word.capitalize() for word in problems[0][1].reason.split("-"))
    return reason, "; ".join(said[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
