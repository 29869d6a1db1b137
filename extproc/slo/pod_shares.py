"""How much of what pods have measured is within a target: interpolated in the histogram's bucket, with its bounds."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import msgspec

Key = tuple[str, str]  # model, role


class Within(msgspec.Struct, kw_only=True):
    """Observations within a target, of so many."""

    observed: float = 0.0
    least: float = 0.0  # all of the target's bucket are beyond it
    estimate: float = 0.0  # they are spread evenly over the bucket
    most: float = 0.0  # all of them are within it


def within(bounds: Sequence[float], counts: Sequence[float], target: float) -> Within:
    """Return how many of the observations are at most `target`.

    `counts` by bucket, not cumulative, one more than bounds; a bucket's bound belongs to it. What is beyond the last
    bound is counted as beyond every target, at least.
    """
    at = bisect_left(bounds, target)
    least, here = sum(counts[:at]), counts[at]
    share = 0.0
    if at < len(bounds):
        below = bounds[at - 1] if at else 0.0
        share = (target - below) / (bounds[at] - below)
    if share >= 1:
        least, here = least + here, 0.0  # the bound itself is the target: nothing is to be guessed
    return Within(observed=sum(counts), least=least, estimate=least + share * here, most=least + here)


class PodShares:
    """Adds up, for each class, what pods have observed while its target was in force."""

    def __init__(self) -> None:
        self._last: dict[Key, tuple[float, ...]] = {}
        self.sums: dict[tuple[str, Key], Within] = {}  # by class

    def take(self, key: Key, bounds: Sequence[float], counts: Sequence[float], targets: Mapping[str, float]) -> None:
        """Take a histogram as it is now: its counts only grow; `targets` by class, in seconds."""
        last = self._last.get(key)
        self._last[key] = now = tuple(counts)
        more = now if last is None else tuple(map(float.__sub__, now, last))
        for class_name, target in targets.items():
            sums = self.sums.setdefault((class_name, key), Within())
            if not any(more):
                continue
            found = within(bounds, more, target)
            sums.observed += found.observed
            sums.least += found.least
            sums.estimate += found.estimate
            sums.most += found.most
