"""A token bucket: so much a second, so much at once. Pure; time is an argument.

Used by `quota_share` where Redis cannot be asked; `quota.lua` does the same sums on the shared ones.
"""

import msgspec

# what is asked for counts as there when so little is missing: levels are rounded on their way to Redis and back
TOLERANCE = 0.001
LONGEST_WAIT_SECONDS = 1e9  # thirty years: what is told stays a number
NEVER_SECONDS = 60.0  # told where nothing ever comes: a bucket without a rate
LONGEST_DEBT_SECONDS = 3600.0


class BucketTerms(msgspec.Struct, frozen=True):
    """What one bucket gives."""

    per_second: float
    capacity: float  # what there is after a rest

    def shared_by(self, replicas: int) -> "BucketTerms":
        """Return one replica's share. One unit can always be had at once, or small shares would let nobody pass."""
        if replicas <= 1 or self.capacity <= 0:
            return self
        return BucketTerms(self.per_second / replicas, max(self.capacity / replicas, 1.0))


def terms_of(per_minute: float, *, burst_seconds: float) -> BucketTerms:
    """Return the terms of a limit per minute of which `burst_seconds` worth may come at once, at least one unit."""
    per_second = per_minute / 60.0
    return BucketTerms(per_second, max(per_second * burst_seconds, 1.0) if per_minute > 0 else 0.0)


class TokenBucket(msgspec.Struct):
    """A level that rises to the capacity; takes are decided with `wait` before."""

    terms: BucketTerms
    level: float
    at: float  # seconds of the clock that the callers use

    def wait(self, amount: float, *, now: float) -> float:
        """Return in how many seconds `amount` may be taken; 0: now.

        More than the capacity may be taken when the bucket is full, and leaves a debt: otherwise it never could.
        """
        self._rise(now)
        terms = self.terms
        missing = (min(amount, terms.capacity) if terms.capacity > 0 else amount) - self.level
        if missing <= TOLERANCE:
            return 0.0
        return min(missing / terms.per_second, LONGEST_WAIT_SECONDS) if terms.per_second > 0 else NEVER_SECONDS

    def change(self, amount: float, *, now: float) -> None:
        """Take `amount`, or give it back where it is negative; what does not fit is lost."""
        self._rise(now)
        self.level = self._bounded(self.level - amount)

    def _rise(self, now: float) -> None:
        self.level = self._bounded(self.level + max(now - self.at, 0.0) * self.terms.per_second)
        self.at = now

    def _bounded(self, level: float) -> float:
        return min(max(level, -LONGEST_DEBT_SECONDS * self.terms.per_second), self.terms.capacity)
