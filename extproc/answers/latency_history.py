"""Token latencies of the last minutes: percentiles per series and time slice. Pure.

Time is an argument, monotonic seconds. Only bucket counts are kept, so that memory does not grow with requests: at most
`most_series` x `slices` arrays with one number per bucket. A percentile is interpolated in its bucket and clamped to
the observed minimum and maximum, if known.
"""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

Key = tuple[str, str]

SLICE_SECONDS = 15.0
SLICES = 60  # 15 minutes
MOST_SERIES = 32
OTHER: Key = ("other", "other")  # all further series together
SHARES = (0.5, 0.95, 0.99)
MOST_AT_ONCE = 1e12  # more is nonsense; pods are not trusted


def geometric_bounds(first_seconds: float, *, factor: float = 1.2, buckets: int = 64) -> tuple[float, ...]:
    """Return the upper bounds of buckets that grow by `factor`; the last bucket has none."""
    return tuple(first_seconds * factor**i for i in range(buckets - 1))


TTFT_BOUNDS = geometric_bounds(0.001)  # 1 ms to 81 s
INTER_TOKEN_BOUNDS = geometric_bounds(0.0001)  # 0.1 ms to 8 s


class Spread(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Percentiles of the observations, in seconds."""

    observed: int
    p50: float
    p95: float
    p99: float


class _Slice(msgspec.Struct, kw_only=True):
    number: int  # its start / slice length
    counts: "array[float]"  # by bucket; the last one has no bound
    observed: int = 0
    least: float = float("inf")  # seconds; of single observations only
    most: float = 0.0
    spread: Spread | None = None  # cached


class _Series(msgspec.Struct, kw_only=True):
    parts: deque[_Slice]  # oldest first
    whole: _Slice  # their sum
    is_old: bool = False  # `whole` still includes dropped slices, except in `observed`


class LatencyHistory:
    """Observations of one kind by a key of two names, e.g. class and model."""

    def __init__(
        self,
        bounds: Sequence[float],
        *,
        slice_seconds: float = SLICE_SECONDS,
        slices: int = SLICES,
        most_series: int = MOST_SERIES,
    ) -> None:
        self._bounds = tuple(bounds)
        self.slice_seconds = slice_seconds
        self.slices = slices
        self._most_series = most_series
        self._series: dict[Key, _Series] = {}

    def add(self, key: Key, seconds: float, *, weight: float = 1.0, now: float) -> None:
        """Add one observation with a weight."""
        series = self._of(key, now)
        place = bisect_left(self._bounds, seconds)
        for part in (series.parts[-1], series.whole):
            part.counts[place] += weight
            part.observed += 1
            part.least, part.most = min(part.least, seconds), max(part.most, seconds)
            part.spread = None

    def add_counts(self, key: Key, counts: Iterable[tuple[int, float]], *, now: float) -> None:
        """Add observations as (bucket, count) pairs; invalid counts are ignored."""
        counted = [(place, more) for place, more in counts if 0 < more < MOST_AT_ONCE]
        if not counted:
            return
        series = self._of(key, now)
        for part in (series.parts[-1], series.whole):
            for place, more in counted:
                part.counts[place] += more
                part.observed += round(more)
            part.spread = None

    def known(self, *, now: float) -> Sequence[Key]:
        """Return the keys with observations, the most observed first."""
        self._forget(now)
        return sorted(self._series, key=lambda key: -self._series[key].whole.observed)

    def spreads(self, key: Key, *, now: float) -> Sequence[Spread | None]:
        """Return each slice's percentiles, oldest first, the current one last; None without observations."""
        series, last = self._series.get(key), self.number(now)
        found = {part.number: self._spread(part) for part in series.parts} if series is not None else {}
        return [found.get(number) for number in range(last - self.slices + 1, last + 1)]

    def whole(self, key: Key, *, now: float) -> Spread | None:
        """Return the percentiles of all slices together."""
        self._forget(now)
        series = self._series.get(key)
        if series is None:
            return None
        self._add_up(series)
        return self._spread(series.whole)

    def number(self, now: float) -> int:
        """Return the number of the slice at `now`: its start / slice length."""
        return int(now // self.slice_seconds)

    def _of(self, key: Key, now: float) -> _Series:
        """Return the key's series (or OTHER's, above the bound), with the slice of `now` as its last one."""
        number, series = self.number(now), self._series.get(key)
        if series is None:
            if len(self._series) >= self._most_series:
                self._forget(now)
            if len(self._series) >= self._most_series:
                key = OTHER
            series = self._series.setdefault(key, _Series(parts=deque(), whole=self._empty(0)))
        if not series.parts or series.parts[-1].number < number:
            self._drop_old(series, first=number - self.slices + 1)
            series.parts.append(self._empty(number))
        return series

    def _empty(self, number: int) -> _Slice:
        return _Slice(number=number, counts=array("d", bytes(8 * (len(self._bounds) + 1))))

    def _forget(self, now: float) -> None:
        first = self.number(now) - self.slices + 1
        for key, series in list(self._series.items()):
            self._drop_old(series, first=first)
            if not series.parts:
                del self._series[key]

    def _drop_old(self, series: _Series, *, first: int) -> None:
        parts, whole = series.parts, series.whole
        if not parts or parts[0].number >= first:
            return
        while parts and parts[0].number < first:
            whole.observed -= parts.popleft().observed
        series.is_old = True

    def _add_up(self, series: _Series) -> None:
        """Sum up the remaining slices again: repeated subtraction would not end at exactly 0."""
        if not series.is_old:
            return
        parts, whole = series.parts, series.whole
        whole.counts = array("d", map(sum, zip(*(part.counts for part in parts), strict=True)))
        whole.least = min(part.least for part in parts)
        whole.most = max(part.most for part in parts)
        whole.spread = None
        series.is_old = False

    def _spread(self, part: _Slice) -> Spread:
        if part.spread is None:
            p50, p95, p99 = self._percentiles(part)
            part.spread = Spread(observed=part.observed, p50=p50, p95=p95, p99=p99)
        return part.spread

    def _percentiles(self, part: _Slice) -> list[float]:
        """Return the percentiles of SHARES; the bucket without a bound counts as the last bound."""
        bounds, counts = self._bounds, part.counts
        least, most = (part.least, part.most) if part.most else (0.0, bounds[-1])  # known from single observations
        cumulative = list(accumulate(counts))
        found = []
        for share in SHARES:
            wanted = share * cumulative[-1]
            place = bisect_left(cumulative, wanted)
            if place >= len(bounds):
                seconds = bounds[-1]
            else:
                low, below = (bounds[place - 1], cumulative[place - 1]) if place else (0.0, 0.0)
                seconds = low + (bounds[place] - low) * (wanted - below) / counts[place]
            found.append(min(max(seconds, least), most))
        return found
