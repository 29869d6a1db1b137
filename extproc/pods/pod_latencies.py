"""Latencies that pods count themselves, added up over pods: one histogram for each model and role. Pure.

`latency_telemetry` reads the pods' pages and shows what comes out. A histogram that has begun anew (its pod is
another process) counts from zero; what a pod had counted before it was first seen does not count.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf

OTHER = "other"  # in place of names beyond the bound
MOST_MODELS = 100  # with series of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class PodHistogram:
    """One histogram as a pod shows it: counts of all observations up to each bound, since its start."""

    bounds: tuple[float, ...]  # seconds, ascending; the last one is inf
    counts: tuple[float, ...]  # as many, cumulative
    seconds: float  # sum of all observations


class MergedHistogram:
    """Observations of all pods, by bucket; the buckets are ours, whatever a pod's are."""

    __slots__ = ("counts", "seconds")

    def __init__(self, buckets: int) -> None:
        self.counts = [0.0] * buckets  # not cumulative; the last bucket has no bound
        self.seconds = 0.0


class PodLatencies:
    """Merges one kind of latency."""

    def __init__(self, bounds: tuple[float, ...], *, most_models: int = MOST_MODELS) -> None:
        """`bounds`: of our buckets in ascending seconds, without the last one, which has none."""
        self.bounds = bounds
        self._most_models = most_models
        self._last: dict[str, Mapping[str, PodHistogram]] = {}  # endpoint -> model -> as last shown
        self._merged: dict[tuple[str, str], MergedHistogram] = {}
        self._models: set[str] = set()

    @property
    def merged(self) -> Mapping[tuple[str, str], MergedHistogram]:
        """Return what was observed since the start, by model and role."""
        return self._merged

    def report(self, endpoint: str, shown: Mapping[str, PodHistogram], *, role: str) -> None:
        """Take what a pod shows now, by model."""
        before = self._last.get(endpoint)
        self._last[endpoint] = shown
        for model, now in shown.items():
            merged = self._of(model, role)
            if before is None:
                continue  # from here on
            last = before.get(model)
            is_new = last is None or last.bounds != now.bounds or any(map(_falls, last.counts, now.counts))
            self._add(merged, now, None if is_new else last)

    def restarted(self, endpoint: str) -> None:
        """Count all that the endpoint shows next: it is another process, which has begun at zero."""
        if endpoint in self._last:
            self._last[endpoint] = {}

    def forget(self, endpoint: str) -> None:
        """Forget an endpoint that is gone; what it has shown stays counted."""
        self._last.pop(endpoint, None)

    def _of(self, model: str, role: str) -> MergedHistogram:
        if model not in self._models:
            if len(self._models) >= self._most_models:
                model = OTHER
            self._models.add(model)
        merged = self._merged.get((model, role))
        if merged is None:
            merged = self._merged[model, role] = MergedHistogram(len(self.bounds) + 1)
        return merged

    def _add(self, merged: MergedHistogram, now: PodHistogram, last: PodHistogram | None) -> None:
        places = _places(self.bounds, now.bounds)
        counted = 0.0  # up to the bound before
        for i, place in enumerate(places):
            more = now.counts[i] - (last.counts[i] if last is not None else 0.0)
            if more > counted:
                merged.counts[place] += more - counted
                counted = more
        if counted:
            merged.seconds += max(now.seconds - (last.seconds if last is not None else 0.0), 0.0)


def _falls(last: float, now: float) -> bool:
    return now < last


@lru_cache(maxsize=64)
def _places(own: tuple[float, ...], theirs: tuple[float, ...]) -> tuple[int, ...]:
    """Return our bucket for each of a pod's: the first whose bound is not below, so that no time looks shorter."""
    return tuple(len(own) if bound == inf else bisect_left(own, bound) for bound in theirs)
