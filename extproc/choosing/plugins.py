"""Scorers and filters of other packages: entry points `kvmesh.scorers` and `kvmesh.filters`, loaded once at start.

A scorer is called with the candidates and the request, and returns one number from 0.0 to 1.0 for each candidate. A
filter returns the addresses to drop, each with a reason. Both run on the picker's event loop, within `MOST_SECONDS`.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from extproc.choosing.decision import FILTERS
from extproc.choosing.scorers import SCORERS, Column
from extproc.errors import ConfigError, PluginSkippedError
from extproc.pods.endpoint import Ask, Candidate

log = logging.getLogger(__name__)

MOST_SECONDS = 0.005
REST = 99.0  # pause after a slow call, as a multiple of its duration: slow calls take at most 1 % of the loop's time


@dataclass(slots=True, kw_only=True)
class Plugin:
    """One plug-in between its checks. A call raises PluginSkippedError where its result cannot be used."""

    name: str
    call: Callable[[Sequence[Candidate], Ask], Any]
    check: Callable[[Any, Sequence[Candidate]], str]  # the fault of a result, or ""
    clock: Callable[[], float] = time.perf_counter  # seconds
    resumes_at: float = -math.inf

    def __call__(self, candidates: Sequence[Candidate], ask: Ask) -> Any:
        """Return the checked result of the plug-in."""
        began = self.clock()
        if began < self.resumes_at:
            raise PluginSkippedError(f"{self.name} was slow and rests for {self.resumes_at - began:.3g} s")
        fault = ""
        result = None
        try:
            result = self.call(candidates, ask)
            fault = self.check(result, candidates)
        except Exception as error:
            fault = f"failed with {type(error).__name__}: {error}"
        took = self.clock() - began
        if took > MOST_SECONDS:
            self.resumes_at = began + took + REST * took
            fault = fault or f"took {1000 * took:.1f} ms, at most {1000 * MOST_SECONDS:g} are allowed"
        if fault:
            raise PluginSkippedError(f"{self.name} {fault}")
        return result


def load_plugins() -> None:
    """Add the installed plug-ins to `SCORERS` and `FILTERS`. Raise ConfigError for one that cannot be loaded."""
    for kind, table, check in (("scorer", SCORERS, fault_of_scores), ("filter", FILTERS, fault_of_dropped)):
        for entry in entry_points(group=f"kvmesh.{kind}s"):
            package = entry.dist.name if entry.dist is not None else "?"
            if isinstance(table.get(entry.name), Plugin):
                continue
            if entry.name in table:
                raise ConfigError(
                    f"kvmesh has a {kind} {entry.name!r} of its own: rename that of the package {package}"
                )
            try:
                call = entry.load()
            except Exception as error:
                raise ConfigError(
                    f"cannot load {kind} {entry.name!r} of the package {package}: {error}; fix or remove it"
                ) from error
            table[entry.name] = Plugin(name=entry.name, call=call, check=check)
            log.info("loaded %s %s of the package %s", kind, entry.name, package)


def fault_of_scores(scores: Column, candidates: Sequence[Candidate]) -> str:
    """Return why these scores cannot be used, or ""."""
    if len(scores) != len(candidates):
        return f"returned {len(scores)} scores for {len(candidates)} endpoints"
    if not all(0.0 <= score <= 1.0 for score in scores):
        return "returned a score outside 0 to 1"
    return ""


def fault_of_dropped(dropped: Mapping[str, str], candidates: Sequence[Candidate]) -> str:
    """Return why these dropped endpoints cannot be used, or ""."""
    if not dropped.keys() <= {candidate.address for candidate in candidates}:
        return "dropped an address that is no candidate"
    if not all(isinstance(reason, str) for reason in dropped.values()):
        return "returned a reason that is no text"
    return ""
