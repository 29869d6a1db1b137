"""One pod in virtual time: a queue of prompts before one that is computed, and streams that share its steps.

All streams of a pod have their tokens at the same times, so that one clock that counts tokens is enough for all.
"""

import heapq
from collections import deque
from collections.abc import Iterator

from bench.scaling.loads import Request
from bench.scaling.plan import Engine
from kvmesh.pods.pod_report import EndpointLoad

NEVER = float("inf")


class UnderWay:
    """One request on a pod; times in seconds."""

    __slots__ = ("began", "ends_at_token", "first", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.began = self.first = 0.0  # its prompt's computing, its first token
        self.ends_at_token = 0.0  # of the pod's clock


class Pod:
    """`advance` it before anything else is done at a time; `next_event` says when it has something to do by itself."""

    def __init__(self, address: str, engine: Engine, *, asked_at: float, serves_at: float) -> None:
        self.address, self.asked_at, self.serves_at = address, asked_at, serves_at
        self.leaves_at: float | None = None  # since when it takes nothing new
        self.gone_at: float | None = None
        self.version = 0  # of its next event
        self._engine = engine
        self._now = serves_at
        self._queue: deque[UnderWay] = deque()
        self._prompt: UnderWay | None = None
        self._left = 0.0  # tokens of that prompt
        self._queued = 0.0  # and of those behind it
        self._token = 0.0  # the clock
        self._streams: list[tuple[float, int, UnderWay]] = []
        self._order = 0
        self._cached = 0.0  # tokens of all that is open
        self._queried = self._hits = self._computed = self._prefill_seconds = 0.0
        self._prefills = self._first_tokens = 0
        self._first_seconds = self._tokens = self._token_seconds = 0.0

    def backlog_tokens(self, now: float) -> float:
        """Tokens of prompts that are not computed at a time before the next event."""
        if self._prompt is None:
            return 0.0
        return self._left - (now - self._now) * self._prompt_rate() + self._queued

    @property
    def waiting(self) -> int:
        """Prompts that are not begun."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Streams, and the prompt that is computed."""
        return len(self._streams) + (self._prompt is not None)

    @property
    def usage(self) -> float:
        """Share of its cache in use."""
        return min(max(self._cached / self._engine.cache_tokens, 0.0), 1.0)  # sums of floats end a hair below nothing

    def fits(self, request: Request) -> bool:
        """Whether its cache has room."""
        return self._cached + _size(request) <= self._engine.cache_tokens

    def add(self, request: Request) -> None:
        """Give it a request."""
        self._cached += _size(request)
        self._queue.append(UnderWay(request))
        self._queued += request.uncached_tokens
        self._begin()

    def next_event(self) -> float:
        """Return when a prompt or a stream ends by itself."""
        prompt = self._now + self._left / self._prompt_rate() if self._prompt is not None else NEVER
        stream = NEVER
        if self._streams:
            stream = self._now + max(self._streams[0][0] - self._token, 0.0) * self._token_time()
        return min(prompt, stream)

    def advance(self, now: float) -> Iterator[tuple[UnderWay, bool]]:
        """Let time go by until `now`; yield what has its first token (False) or has ended (True) then."""
        seconds, self._now = now - self._now, now
        if self._streams:
            tokens = seconds / self._token_time()
            self._token += tokens
            self._tokens += tokens * len(self._streams)
            self._token_seconds += seconds * len(self._streams)
        if self._prompt is not None:
            self._left -= seconds * self._prompt_rate()
            if self._left <= 1e-6:
                yield self._first_token(self._prompt, now), False
        while self._streams and self._streams[0][0] <= self._token + 1e-6:
            done = heapq.heappop(self._streams)[2]
            self._cached -= _size(done.request)
            self._count_ended(done)
            yield done, True

    def report(self, now: float) -> EndpointLoad:
        """Return what a scrape gets."""
        return EndpointLoad(
            waiting_requests=self.waiting,
            running_requests=self.running,
            kv_usage=self.usage,
            prefix_hit_tokens=round(self._hits),
            prefix_query_tokens=round(self._queried),
            reported_at=now,
            kv_capacity_tokens=round(self._engine.cache_tokens),
            inter_token_seconds_sum=self._token_seconds,
            inter_token_count=round(self._tokens),
            prefill_seconds_sum=self._prefill_seconds,
            prefill_count=self._prefills,
            prefill_computed_tokens=round(self._computed),
            first_token_seconds_sum=self._first_seconds,
            first_token_count=self._first_tokens,
        )

    def _begin(self) -> None:
        if self._prompt is None and self._queue:
            self._prompt = begun = self._queue.popleft()
            begun.began = self._now
            self._left = begun.request.uncached_tokens
            self._queued = self._queued - self._left if self._queue else 0.0
            self._queried += begun.request.uncached_tokens + begun.request.cached_tokens
            self._hits += begun.request.cached_tokens

    def _first_token(self, prompt: UnderWay, now: float) -> UnderWay:
        prompt.first = now
        prompt.ends_at_token = self._token + prompt.request.answer_tokens - 1.0
        self._order += 1
        heapq.heappush(self._streams, (prompt.ends_at_token, self._order, prompt))
        self._first_tokens += 1
        self._first_seconds += now - prompt.request.at
        self._prompt, self._left = None, 0.0
        self._begin()
        return prompt

    def _count_ended(self, done: UnderWay) -> None:
        self._prefills += 1
        self._prefill_seconds += done.first - done.began
        self._computed += done.request.uncached_tokens

    def _token_time(self) -> float:
        engine = self._engine
        prompt = engine.prompt_seconds if self._prompt is not None else 0.0
        return engine.alone_seconds + engine.stream_seconds * len(self._streams) + prompt

    def _prompt_rate(self) -> float:
        """Streams take a part of each step: as much as their tokens are of it."""
        return self._engine.tokens_per_second / (1.0 + 0.002 * len(self._streams))


def _size(request: Request) -> float:
    return request.uncached_tokens + request.cached_tokens + request.answer_tokens
