"""The last 15 minutes of one pool: its load, and token latencies as measured by this picker and by the pods.

The two measurements are never added up. `answers`: the streams whose bodies this picker reads (a sample), by class and
model, from the complete request to the token. `pods`: all requests of all pickers, from the pods' histograms, by model
and role. docs/reference/live-feed.md describes the output.
"""

from collections import deque
from collections.abc import Sequence

import msgspec

from extproc.answers.judgement import Measured
from extproc.answers.latency_history import INTER_TOKEN_BOUNDS, TTFT_BOUNDS, Key, LatencyHistory
from extproc.ledger import metrics

SLICE_SECONDS = 5.0
SLICES = 180  # 15 minutes


class LoadSlice(msgspec.Struct, kw_only=True, gc=False):
    """The load in one slice of time."""

    number: int  # start time divided by the slice length
    until: float  # monotonic seconds
    requests: int = 0  # routed
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # part of `prompt_tokens` predicted to be cached on the picked pods


class LoadHistory:
    """The load history of one pool by time slice; `now` is monotonic seconds.

    Costs one comparison and four additions per request, and 180 small records.
    """

    def __init__(self, *, slice_seconds: float = SLICE_SECONDS, slices: int = SLICES) -> None:
        self.slice_seconds = slice_seconds
        self.slices = slices
        self._parts: deque[LoadSlice] = deque(maxlen=slices + 1)  # plus the current one
        self._until = float("-inf")

    def routed(self, *, prompt_tokens: int, cached_tokens: int, now: float) -> None:
        """Count a request that was sent to a pod."""
        part = self._parts[-1] if now < self._until else self._begin(now)
        part.requests += 1
        part.prompt_tokens += prompt_tokens
        part.cached_tokens += cached_tokens

    def refused(self, *, now: float) -> None:
        """Count a request that the picker answered itself."""
        part = self._parts[-1] if now < self._until else self._begin(now)
        part.refused += 1

    def complete(self, *, now: float) -> Sequence[LoadSlice]:
        """Return the completed slices, the oldest first; slices without load have zeros."""
        last = int(now // self.slice_seconds) - 1
        found = {part.number: part for part in self._parts}
        return [
            found.get(number) or LoadSlice(number=number, until=(number + 1) * self.slice_seconds)
            for number in range(last - self.slices + 1, last + 1)
        ]

    def _begin(self, now: float) -> LoadSlice:
        number = int(now // self.slice_seconds)
        part = LoadSlice(number=number, until=(number + 1) * self.slice_seconds)
        self._parts.append(part)
        self._until = part.until
        return part


class PoolHistory:
    """The history of one pool since `began_at`, in monotonic seconds."""

    def __init__(self, *, began_at: float = 0.0) -> None:
        self.began_at = began_at
        self.load = LoadHistory()
        # by class and model
        self.ttft = LatencyHistory(TTFT_BOUNDS)
        self.inter_token = LatencyHistory(INTER_TOKEN_BOUNDS)
        # by model and role
        self.pods_ttft = LatencyHistory(metrics.TTFT.bounds)
        self.pods_inter_token = LatencyHistory(metrics.INTER_TOKEN.bounds)

    def measured(self, key: Key, measured: Measured, *, weight: float, now: float) -> None:
        """Take the latencies of one stream by class and model, sampled with this weight."""
        if measured.ttft_seconds is not None:
            self.ttft.add(key, measured.ttft_seconds, weight=weight, now=now)
        if measured.inter_token_seconds is not None:
            self.inter_token.add(key, measured.inter_token_seconds, weight=weight, now=now)
