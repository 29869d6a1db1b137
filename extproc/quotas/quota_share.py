"""What one replica knows of a quota by itself: what is usual, what is open here, its share for when Redis is away.

Part of `quotas.quota.QuotaKey`, changed by `quotas.shared_quotas` only. Pure; time is an argument, monotonic seconds.
"""

from collections.abc import Sequence

import msgspec

from extproc.quotas.token_bucket import BucketTerms, TokenBucket

FIRST_GENERATED = 256.0  # tokens an answer is expected to have, until some were seen
FIRST_SECONDS = 2.0  # the same of a request's time
WEIGHT = 0.2  # of the newest in the moving averages


class QuotaShare(msgspec.Struct, eq=False):
    """Levels are in the order of `quotas.quota.Limit`: requests, prompt tokens, generated tokens."""

    open_requests: int = 0  # admitted here, not ended
    usual_generated: float = FIRST_GENERATED
    usual_seconds: float = FIRST_SECONDS
    heard: tuple[float, ...] = ()  # the shared levels when Redis answered last
    heard_at: float = 0.0
    buckets: tuple[TokenBucket, ...] = ()  # in use while Redis is away
    replicas: int = 1  # that they were made for

    def note(self, levels: tuple[float, ...], *, now: float) -> None:
        """Redis has answered: its levels count."""
        self.heard, self.heard_at = levels, now
        if self.buckets:
            self.buckets = ()

    def took(self, seconds: float) -> None:
        """Learn from the time that one request took."""
        self.usual_seconds += WEIGHT * (max(seconds, 0.0) - self.usual_seconds)

    def generated(self, tokens: int) -> None:
        """Learn from what one request generated."""
        self.usual_generated += WEIGHT * (tokens - self.usual_generated)

    def local(self, terms: Sequence[BucketTerms], *, replicas: int, now: float) -> tuple[TokenBucket, ...]:
        """Return the buckets of this replica alone; they begin with its share of what Redis said last."""
        replicas = max(replicas, 1)
        if not self.buckets or replicas != self.replicas:
            self.buckets = tuple(self._bucket(i, each, replicas, now) for i, each in enumerate(terms))
            self.replicas = replicas
        return self.buckets

    def _bucket(self, index: int, terms: BucketTerms, replicas: int, now: float) -> TokenBucket:
        share = terms.shared_by(replicas)
        if self.buckets:  # others came or went
            old = self.buckets[index]
            level, at = old.level * self.replicas / replicas, old.at
        elif self.heard:
            level, at = self.heard[index] / replicas, self.heard_at
        else:
            level, at = share.capacity, now
        return TokenBucket(share, min(level, share.capacity), at)

    def is_crowded(self, most_open: int, *, replicas: int) -> bool:
        """Tell whether as many requests are open here as this replica's share of `most_open`, at least one."""
        return self.open_requests >= (max(most_open // max(replicas, 1), 1) if most_open > 0 else 0)

    def wait_for_an_end(self) -> float:
        """Return in how many seconds one of the open requests here is likely to end."""
        return self.usual_seconds / max(self.open_requests, 1)
