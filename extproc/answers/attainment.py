"""The share of recent requests that met all their targets, per class. Time is an argument."""

from collections import deque

import msgspec

WINDOW_SECONDS = 300.0
SLICE_SECONDS = 10.0


class Attainment(msgspec.Struct, frozen=True, kw_only=True):
    """The SLO attainment of one class in the last minutes."""

    share: float  # 0..1, weighted share of the judged requests
    judged: int  # number of judged requests


class _Slice(msgspec.Struct):
    began_at: float
    met: float = 0.0  # weights
    missed: float = 0.0
    judged: int = 0


class AttainmentWindow:
    """A sliding window of sums per slice: its cost does not grow with requests."""

    def __init__(self, *, window_seconds: float = WINDOW_SECONDS, slice_seconds: float = SLICE_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._slice_seconds = slice_seconds
        self._slices: dict[str, deque[_Slice]] = {}  # by class

    def add(self, class_name: str, *, met: bool, weight: float, now: float) -> None:
        """Add one verdict at `now` (monotonic seconds)."""
        slices = self._slices.setdefault(class_name, deque())
        if not slices or now - slices[-1].began_at >= self._slice_seconds:
            slices.append(_Slice(began_at=now))
            self._forget_old(slices, now=now)
        last = slices[-1]
        last.judged += 1
        if met:
            last.met += weight
        else:
            last.missed += weight

    def of(self, class_name: str, *, now: float) -> Attainment | None:
        """Return the class's recent attainment, or None if nothing was judged."""
        slices = self._slices.get(class_name)
        if slices is None:
            return None
        self._forget_old(slices, now=now)
        judged = sum(each.judged for each in slices)
        if not judged:
            del self._slices[class_name]
            return None
        met, missed = sum(each.met for each in slices), sum(each.missed for each in slices)
        return Attainment(share=met / (met + missed), judged=judged)

    def _forget_old(self, slices: deque[_Slice], *, now: float) -> None:
        while slices and now - slices[0].began_at >= self._window_seconds:
            slices.popleft()
