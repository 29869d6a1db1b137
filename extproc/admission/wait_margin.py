"""How much longer than expected requests of a class wait at worst, learned from those that have waited. Pure.

An estimate that is right on average refuses half of those who will be late only when they are: after a long wait. So
the class's target is compared with the wait that all but a few stay below: the estimate times this margin. It is a
quantile of real by expected wait, tracked by steps (Robbins, Monro 1951): up by a large one for each that waited
longer, down by a small one for each that did not.
"""

from math import exp

LATE_SHARE = 0.01  # of those who wait may wait longer than the margin says: a refusal is to be quick for 99 in 100
STEP = 0.25  # in the logarithm, for one that waited longer
FIRST = 1.5  # an overload that begins refuses some too many, and not all those who then wait in vain
MOST = 8.0
TELLING_SHARE = (
    0.2  # of the target: waits that stay below it even at their worst tell nothing of those that are near it
)


class WaitMargin:
    """Of one tenant's requests of one class in one pool."""

    def __init__(self) -> None:
        self.factor = FIRST

    def waited(self, real_seconds: float, *, expected_seconds: float, target_seconds: float) -> None:
        """Take a request that has left the queue for an endpoint, or because it was too late."""
        # with the margin, or one that has become large would let nobody in who could show that it may shrink
        if expected_seconds * self.factor < TELLING_SHARE * target_seconds:
            return
        is_late = real_seconds > expected_seconds * self.factor
        step = STEP * (1.0 - LATE_SHARE) if is_late else -STEP * LATE_SHARE
        self.factor = min(max(self.factor * exp(step), 1.0), MOST)
