"""What the work will be when a pod that is asked for now serves: a robust level, and its trend. Pure.

Samples are averaged over buckets of five seconds. The level is the median of the last two minutes; where the last three
buckets all are far above it, it is theirs: a step. The trend is a low quantile of the slopes between all buckets that
are a minute or more apart (as Theil and Sen have it, but their median would take noise for a trend every second time),
and counts only upwards: what falls is held by `holding`. It is drawn out for as long as it was looked at, and no
longer. Beside it stands what the days before had at that time of day (`day_profile`): the higher one counts.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median

from extproc.scaling.day_profile import DayProfile, DayState

BUCKET_SECONDS = 5.0
KEPT = 60  # buckets, which are five minutes: as far back as the trend looks
LEVEL = 24  # buckets
LEAST = 6  # buckets, before which nothing is said
PAIR_SECONDS = 2 * BUCKET_SECONDS  # the trend goes by pairs of buckets, of which there are half as many
APART = 6  # pairs of buckets, between two that show a slope
SLOPES = 8  # at least so many
QUANTILE = 0.1  # of the slopes
STEP_BUCKETS = 3  # that have to be far above those before: two are so by chance every hour or two
STEP_DEVIATIONS = 3.0
LEAST_DEVIATION = 0.05  # of the level
GAUSS = 1.4826  # a standard deviation is so many median absolute ones
MOST_FACTOR = 2.0  # of the level
MOST_TREND_SECONDS = KEPT * BUCKET_SECONDS


@dataclass(slots=True, eq=False)
class Forecast:
    """Of one kind of work in one role."""

    _buckets: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _since: float | None = None  # seconds at which the open bucket began
    _open: list[float] = field(default_factory=list)
    _slope: float = 0.0  # a second
    level: float | None = None  # what the work is now; None: too few samples
    day: DayProfile = field(default_factory=DayProfile)

    def add(self, value: float, *, now: float, wall: float | None = None) -> None:
        """Take a sample at a time, in seconds, which do not fall; `wall`: the same since the epoch."""
        if wall is not None:
            self.day.add(value, now=now, wall=wall)
        if self._since is None:
            self._since = now
        if now - self._since >= BUCKET_SECONDS and self._open:
            self._buckets.append(fmean(self._open))
            self._open.clear()
            self._since += BUCKET_SECONDS * ((now - self._since) // BUCKET_SECONDS)
            self.level, self._slope = self._found_level(), self._trend()
        self._open.append(value)

    def clear(self) -> None:
        """Forget the samples: the clock has jumped. What the days before were stays."""
        self._buckets.clear()
        self._open.clear()
        self._since, self._slope, self.level = None, 0.0, None

    def ahead(self, seconds: float, *, wall: float | None = None) -> float | None:
        """Return what the work will be in so many seconds; None: too few samples. `wall`: the time of day now."""
        if self.level is None:
            return None
        # the median is that of the middle of its time
        age = min(len(self._buckets), LEVEL) * BUCKET_SECONDS / 2.0
        trend = self.level + self._slope * (age + min(seconds, MOST_TREND_SECONDS))
        return max(min(trend, MOST_FACTOR * self.level), self.by_day(seconds, wall=wall) or 0.0)

    def by_day(self, seconds: float, *, wall: float | None) -> float | None:
        """Return what the time of day says that the work will be; None: it says nothing."""
        ratio = None if wall is None else self.day.ratio(wall=wall, seconds=seconds)
        return None if ratio is None or self.level is None else ratio * self.level

    def day_state(self, seconds: float, *, wall: float | None) -> DayState:
        """Tell whether the time of day says something of the time in so many seconds."""
        return DayState.LEARNING if wall is None else self.day.state(wall=wall, seconds=seconds)

    def _found_level(self) -> float | None:
        if len(self._buckets) < LEAST:
            return None
        recent = list(self._buckets)[-LEVEL:]
        return fmean(recent[-STEP_BUCKETS:]) if self._is_step(recent) else median(recent)

    @staticmethod
    def _is_step(recent: list[float]) -> bool:
        """Tell whether the last ones all are far above those before."""
        before = recent[:-STEP_BUCKETS]
        if len(before) < LEAST:
            return False
        usual = median(before)
        deviation = GAUSS * median(abs(value - usual) for value in before)
        return min(recent[-STEP_BUCKETS:]) > usual + STEP_DEVIATIONS * max(deviation, LEAST_DEVIATION * usual)

    def _trend(self) -> float:
        buckets = list(self._buckets)
        values = [fmean(pair) for pair in zip(buckets[::2], buckets[1::2], strict=False)]
        slopes = sorted(
            (later - earlier) / ((j - i) * PAIR_SECONDS)
            for i, earlier in enumerate(values)
            for j, later in enumerate(values)
            if j - i >= APART
        )
        if len(slopes) < SLOPES:
            return 0.0
        return max(slopes[int(QUANTILE * len(slopes))], 0.0)
