"""The state of one role of a pool: its demand, forecasts, and desired replicas. Pure.

A forecast is of the load at the time when a pod requested now is ready: a robust level plus its trend. Samples are
averaged over buckets of five seconds. The level is the median of the last two minutes, or the mean of the last three
buckets if all of them are far above it (a step). The trend is a low quantile of the slopes between all buckets at least
a minute apart: Theil-Sen's median would take noise for a trend every second time. Only a rising trend counts; `holding`
delays the way down. The trend is extrapolated no further than it looks back, five minutes.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median

from extproc.scaling.demand import RoleDemand, Work
from extproc.scaling.holding import Holding
from extproc.scaling.need import Outlook, Outlooks
from extproc.scaling.seen import PoolSeen
from extproc.scaling.variant_scaling import RoleReady, VariantSet

BUCKET_SECONDS = 5.0
KEPT = 60  # buckets, five minutes: as far back as the trend looks
LEVEL = 24  # buckets
LEAST = 6  # buckets before the first forecast
PAIR_SECONDS = 2 * BUCKET_SECONDS  # the trend uses pairs of buckets: half as many values
APART = 6  # pairs of buckets, the least distance for a slope
SLOPES = 8  # needed for a trend
QUANTILE = 0.1  # of the slopes
STEP_BUCKETS = 3  # in a row, for a step: two of them are high by chance every hour or two
STEP_DEVIATIONS = 3.0
LEAST_DEVIATION = 0.05  # of the level
GAUSS = 1.4826  # standard deviation over median absolute deviation, of a normal distribution
MOST_FACTOR = 2.0  # of the level
MOST_TREND_SECONDS = KEPT * BUCKET_SECONDS


@dataclass(slots=True, eq=False)
class Forecast:
    """Forecast of one kind of work in one role."""

    _buckets: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _since: float | None = None  # start of the open bucket, in seconds
    _open: list[float] = field(default_factory=list)
    _slope: float = 0.0  # change of the load per second
    level: float | None = None  # the load now, or None with too few samples

    def add(self, value: float, *, now: float) -> None:
        """Take a sample; `now` is in seconds and never decreases."""
        if self._since is None:
            self._since = now
        if now - self._since >= BUCKET_SECONDS and self._open:
            self._buckets.append(fmean(self._open))
            self._open.clear()
            self._since += BUCKET_SECONDS * ((now - self._since) // BUCKET_SECONDS)
            self.level, self._slope = self._found_level(), self._trend()
        self._open.append(value)

    def clear(self) -> None:
        """Forget the samples: the clock has jumped, or the unit has changed."""
        self._buckets.clear()
        self._open.clear()
        self._since, self._slope, self.level = None, 0.0, None

    def ahead(self, seconds: float) -> float | None:
        """Return the load in this many seconds, or None with too few samples."""
        if self.level is None:
            return None
        # the median describes the middle of its window
        age = min(len(self._buckets), LEVEL) * BUCKET_SECONDS / 2.0
        trend = self.level + self._slope * (age + min(seconds, MOST_TREND_SECONDS))
        return min(trend, MOST_FACTOR * self.level)

    def _found_level(self) -> float | None:
        if len(self._buckets) < LEAST:
            return None
        recent = list(self._buckets)[-LEVEL:]
        return fmean(recent[-STEP_BUCKETS:]) if self._is_step(recent) else median(recent)

    @staticmethod
    def _is_step(recent: list[float]) -> bool:
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


@dataclass(slots=True, eq=False)
class RoleMemory:
    """The state of one role between looks."""

    demand: RoleDemand = field(default_factory=RoleDemand)
    prefill: Forecast = field(default_factory=Forecast)
    decode: Forecast = field(default_factory=Forecast)
    holding: Holding = field(default_factory=Holding)  # without variants
    variants: VariantSet = field(default_factory=VariantSet)
    work: Work | None = None  # of the last look with enough reports

    def count_in(self, reference: str) -> None:
        """Count work in pods of this variant from now on."""
        if self.demand.reference != reference:  # samples are in pods of the old reference
            self.demand.reference = reference
            self.prefill.clear()
            self.decode.clear()

    def forget_samples(self) -> None:
        """Drop demand and forecasts; the desired replicas stay."""
        self.demand = RoleDemand(reference=self.demand.reference)
        self.prefill.clear()
        self.decode.clear()

    def ahead(
        self, role: str, seen: PoolSeen, ready: RoleReady, *, seconds: float, alone_seconds: float = 0.0
    ) -> Outlooks:
        """Return the forecast for a time in `seconds`; until the next pod is ready it takes `alone_seconds`."""

        def outlook(forecast: Forecast, ready: float) -> Outlook | None:
            busy = forecast.ahead(seconds)
            if forecast.level is None or busy is None:
                return None
            return Outlook(
                level=forecast.level,
                busy=busy,
                horizon=seconds,
                alone_seconds=alone_seconds,
                ready=ready,
                ttft_seconds=seen.ttft_seconds,
                inter_token_seconds=seen.inter_token_seconds,
            )

        return Outlooks(
            prompts=outlook(self.prefill, ready.prompts) if role != "decode" else None,
            decoding=outlook(self.decode, ready.decoding) if role != "prefill" else None,
        )
