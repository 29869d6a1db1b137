"""What the work will be when a pod that is asked for now serves: a robust level, and its trend. Pure.

Samples are averaged over buckets of ten seconds. The level is the median of the last minute; where the last two buckets
both are far above it, it is theirs: a step. The trend is a low quantile of the slopes between all buckets that are a
minute or more apart (as Theil and Sen have it, but their median would take noise for a trend every second time), and
counts only upwards: what falls is held by `holding`.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median

BUCKET_SECONDS = 10.0
KEPT = 30  # buckets, which are five minutes: as far back as the trend looks
LEVEL = 6  # buckets
LEAST = 3  # buckets, before which nothing is said
APART = 6  # buckets, between two that show a slope
SLOPES = 8  # at least so many
QUANTILE = 0.2  # of the slopes
STEP_DEVIATIONS = 3.0
LEAST_DEVIATION = 0.05  # of the level
GAUSS = 1.4826  # a standard deviation is so many median absolute ones
MOST_FACTOR = 2.0  # of the level


@dataclass(slots=True, eq=False)
class Forecast:
    """Of one kind of work in one role."""

    _buckets: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _since: float | None = None  # seconds at which the open bucket began
    _open: list[float] = field(default_factory=list)
    _slope: float = 0.0  # a second

    def add(self, value: float, *, now: float) -> None:
        """Take a sample at a time, in seconds, which do not fall."""
        if self._since is None:
            self._since = now
        if now - self._since >= BUCKET_SECONDS and self._open:
            self._buckets.append(fmean(self._open))
            self._open.clear()
            self._since = now
            self._slope = self._trend()
        self._open.append(value)

    def clear(self) -> None:
        """Forget everything: the clock has jumped."""
        self._buckets.clear()
        self._open.clear()
        self._since, self._slope = None, 0.0

    @property
    def level(self) -> float | None:
        """Return what the work is now; None: too few samples."""
        if len(self._buckets) < LEAST:
            return None
        recent = list(self._buckets)[-LEVEL:]
        before = list(self._buckets)[:-2]
        last = recent[-2:]
        if len(before) >= LEAST:
            usual = median(before[-2 * LEVEL :])
            deviation = GAUSS * median(abs(value - usual) for value in before[-2 * LEVEL :])
            if min(last) > usual + STEP_DEVIATIONS * max(deviation, LEAST_DEVIATION * usual):
                return fmean(last)
        return median(recent)

    def ahead(self, seconds: float) -> float | None:
        """Return what the work will be in so many seconds; None: too few samples."""
        level = self.level
        return None if level is None else min(level + self._slope * seconds, MOST_FACTOR * level)

    def _trend(self) -> float:
        values = list(self._buckets)
        slopes = sorted(
            (later - earlier) / ((j - i) * BUCKET_SECONDS)
            for i, earlier in enumerate(values)
            for j, later in enumerate(values)
            if j - i >= APART
        )
        if len(slopes) < SLOPES:
            return 0.0
        return max(slopes[int(QUANTILE * len(slopes))], 0.0)
