"""seconds to a first token = base + tokens x seconds a token: fitted to samples that fade, towards a prior. Pure.

`latency_estimate` has one for each endpoint. Least squares on relative errors: a long prompt must not drown the short
ones. Without samples the prior is all there is, so that an estimate which nothing confirms drifts back to it.
"""

import msgspec

SCALE_TOKENS = 4096.0  # a prompt of so many tokens teaches as much of the time a token as of the base
PRIOR_WEIGHT = 0.05  # samples that the prior counts as
FADING = 0.95  # of what was known, with each whole sample
MOST_FACTOR = 4.0  # one sample counts as at most so many times more, or less, than expected
MOST_SURPRISE_SECONDS = 0.1  # beside that: a multiple of very little is very little
LEAST_SECONDS_A_TOKEN, MOST_SECONDS_A_TOKEN = 1e-7, 0.1
MOST_BASE_SECONDS = 60.0
MOST_TOKENS = 1e7


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt costs."""

    base_seconds: float  # however short it is
    seconds_a_token: float

    def seconds(self, tokens: float) -> float:
        """Return what so many tokens take."""
        return self.base_seconds + self.seconds_a_token * tokens


class FirstTokenFit:
    """Sums over weighted samples; `pace` solves for the two numbers."""

    __slots__ = ("_s", "_su", "_suu", "_suy", "_sy")

    def __init__(self) -> None:
        self._s = self._su = self._suu = self._sy = self._suy = 0.0

    @property
    def weight(self) -> float:
        """How much is known: up to 1 after the first sample, up to 20 after many."""
        return self._s + self._suu

    def add(self, *, tokens: float, seconds: float, expected: Pace, share: float = 1.0) -> None:
        """Take a sample that counts as `share` of a whole one; how far it may be from `expected` is bounded."""
        tokens = min(max(tokens, 0.0), MOST_TOKENS)
        usual = expected.seconds(tokens)
        most = usual * MOST_FACTOR + MOST_SURPRISE_SECONDS
        seconds = min(max(seconds, usual / MOST_FACTOR), most)
        u = tokens / SCALE_TOKENS
        weight = share / ((1.0 + u) * (1.0 + u))
        self.fade(FADING**share)
        self._s += weight
        self._su += weight * u
        self._suu += weight * u * u
        self._sy += weight * seconds
        self._suy += weight * u * seconds

    def fade(self, share: float) -> None:
        """Let what is known count for `share` (0..1) of what it did."""
        self._s *= share
        self._su *= share
        self._suu *= share
        self._sy *= share
        self._suy *= share

    def pace(self, prior: Pace) -> Pace:
        """Return the numbers that fit best; neither is negative, both are bounded."""
        base, slope = prior.base_seconds, prior.seconds_a_token * SCALE_TOKENS
        s, suu = self._s + PRIOR_WEIGHT, self._suu + PRIOR_WEIGHT
        sy, suy = self._sy + PRIOR_WEIGHT * base, self._suy + PRIOR_WEIGHT * slope
        # never 0: s x suu >= su x su before the prior's weight came to both
        det = s * suu - self._su * self._su
        base = (sy * suu - self._su * suy) / det
        slope = (s * suy - self._su * sy) / det
        least = LEAST_SECONDS_A_TOKEN * SCALE_TOKENS
        if base < 0.0:
            base, slope = 0.0, suy / suu
        elif slope < least:
            slope = least
            base = (sy - self._su * slope) / s
        return Pace(
            base_seconds=min(max(base, 0.0), MOST_BASE_SECONDS),
            seconds_a_token=min(max(slope / SCALE_TOKENS, LEAST_SECONDS_A_TOKEN), MOST_SECONDS_A_TOKEN),
        )
