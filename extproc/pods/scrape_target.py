"""The scraper's state of one endpoint: its connection, its last report, its trend, and the status for picks.

`FirstAnswers` tracks which endpoints have not been asked for their models yet: new endpoints and restarted ones. An
endpoint that does not answer counts as asked, so that it blocks nothing.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from msgspec import structs

from extproc.pods.endpoint import NO_TREND, EndpointModels, EndpointStatus, EndpointTrend, EndpointTrouble, Reachability
from extproc.pods.endpoint_samples import LEAST_GENERATED, restarted
from extproc.pods.pod_ranks import page_of, pod_of, rank_of, ranks_on
from kvmesh.pods.metrics_page import MetricsPage
from kvmesh.pods.pod_http import PodHttp
from kvmesh.pods.pod_key import PodKey
from kvmesh.pods.pod_report import EndpointLoad

log = logging.getLogger(__name__)

# length of a period with waiting requests throughout: pods count a whole prompt when they start it, so the rate of a
# shorter period mostly depends on how many starts fall into it
LEAST_WAITED_SECONDS, MOST_WAITED_SECONDS = 0.5, 10.0
LEAST_WAITED_STARTS = 4  # first tokens in it, if the pod counts them: one or two long prompts give any rate
MEANS_SECONDS = 2.0  # window of the means; shorter windows have too few counts
RATE_FADING = 0.01  # per second: a period never exceeds the pod's capacity, so the best one counts, and decays
ASLEEP = "it is asleep (vllm:engine_sleep_state): requests would hang until it is woken up (POST /wake_up)"
# the page of the version, and the first one that is known to read the header; older ones may ignore it
_VERSIONS = (("/version", (0, 18)), ("/server_info", (0, 5, 19)))
_VERSION = re.compile(rb'"version":\s*"(\d{1,4})\.(\d{1,4})\.(\d{1,4})')
MOST_VERSION_BYTES = 1 << 20
RANKS_EVERY_SECONDS = 2.0  # between looks for other ranks: each takes 26 us of a page of 30 kB
MOST_PAUSE_SECONDS = 10.0  # no engine step takes longer


class TrendWatch:
    """Tracks one endpoint's trend from report to report."""

    def __init__(self) -> None:
        self._previous: EndpointLoad | None = None
        self._waiting_since: EndpointLoad | None = None  # first report of the period with waiting requests
        self._rate_then: float | None = None
        self._base: EndpointLoad | None = None  # first report of the means' window
        self._prompt_rate = 0.0  # of the last window
        self.trend = NO_TREND

    def report(self, load: EndpointLoad) -> EndpointTrend:
        """Take a report and return the trend up to it."""
        previous, self._previous = self._previous, load
        if previous is None or restarted(previous, load):
            self._base, self._waiting_since, self.trend, self._prompt_rate = load, None, NO_TREND, 0.0
            self._prefill_rate(load)
            return self.trend
        base = self._base or previous
        rate = self._prefill_rate(load)
        inter_token, moved = self.trend.inter_token_seconds, self.trend.memory_bytes_per_second
        prompts = self.trend.prompt_tokens_per_second
        seconds = load.reported_at - base.reported_at
        if seconds >= MEANS_SECONDS:
            tokens = load.inter_token_count - base.inter_token_count
            inter_token = (
                (load.inter_token_seconds_sum - base.inter_token_seconds_sum) / tokens
                if tokens >= LEAST_GENERATED
                else None
            )
            if load.memory_bytes_moved is not None and base.memory_bytes_moved is not None:
                moved = (load.memory_bytes_moved - base.memory_bytes_moved) / seconds
            # a whole prompt counts when it starts, but may last into the next window
            before, self._prompt_rate = self._prompt_rate, _computed(base, load) / seconds
            prompts = max(before, self._prompt_rate)
            self._base = load
        self.trend = EndpointTrend(
            inter_token_seconds=inter_token,
            memory_bytes_per_second=moved,
            prefill_tokens_per_second=rate,
            prompt_tokens_per_second=prompts,
        )
        return self.trend

    def _prefill_rate(self, load: EndpointLoad) -> float | None:
        """Return the best prefill rate of the periods in which requests waited throughout.

        A mean over all time would be lower for a pod with little to do, and a pod that looks slow gets even less.
        """
        known, start = self.trend.prefill_tokens_per_second, self._waiting_since
        if not load.waiting_requests:
            self._waiting_since = None
            return known
        # a request waiting for its KV transfer also counts as waiting, but nothing is computed
        fetches = start is not None and (load.fetched_tokens, load.fetched_bytes) != (
            start.fetched_tokens,
            start.fetched_bytes,
        )
        if start is None or fetches or load.reported_at - start.reported_at > MOST_WAITED_SECONDS:
            self._waiting_since, self._rate_then = load, known
            return known
        seconds = load.reported_at - start.reported_at
        computed = _computed(start, load)
        if seconds < LEAST_WAITED_SECONDS or computed <= 0:  # nothing computed: requests wait for memory
            return known
        if load.first_token_count and load.first_token_count - start.first_token_count < LEAST_WAITED_STARTS:
            return known
        sample, earlier = computed / seconds, self._rate_then
        return sample if earlier is None else max(sample, earlier * (1.0 - RATE_FADING * seconds))


def _computed(since: EndpointLoad, load: EndpointLoad) -> int:
    return (load.prefix_query_tokens - load.prefix_hit_tokens) - (since.prefix_query_tokens - since.prefix_hit_tokens)


@dataclass(slots=True, kw_only=True)
class ScrapeTarget:
    """One endpoint, made by `at` and updated by the scraper."""

    address: str
    http: PodHttp  # one connection for all pages
    page: MetricsPage
    # the possible statuses for picks, made once per scrape and not once per pick
    unknown: EndpointStatus
    unreachable: EndpointStatus
    asleep: EndpointStatus
    ready: EndpointStatus | None = None
    load: EndpointLoad | None = None  # last accepted report
    models: EndpointModels | None = None
    trends: TrendWatch = field(default_factory=TrendWatch)
    text: bytes = b""  # the metrics page of `load`
    changed_at: float = 0.0  # monotonic seconds of the first report with the numbers of `load`
    longest_pause_seconds: float = 0.0  # longest time without change under load that later ended
    refused: bool = False  # the last scrape's connection was refused
    closed_since: float = 0.0  # monotonic seconds
    closed: EndpointStatus | None = None  # status while its platform keeps new requests away, whatever it reports
    out: EndpointStatus | None = None  # `closed`, `asleep`, or `unreachable` after a refused connection
    tasks: tuple[asyncio.Task[None], ...] = ()
    is_new: bool = False  # its next report is its first: it came later, or has restarted
    ready_since: float | None = None  # monotonic seconds; None if it served at the first scrape, or does not yet
    last_problem: str | None = None
    problem_since: float = 0.0  # monotonic seconds of the first scrape with a problem
    refusal: str | None = None  # why it does not list its models
    ranks: tuple[int, ...] | None = None  # of its pod, on its last page; None before the first one
    ranks_due: float = 0.0  # monotonic seconds of the next look for other ranks
    is_dealt: bool = False  # its pod has several ranks and chooses among them itself
    scraped: asyncio.Event = field(default_factory=asyncio.Event)
    must_ask: bool = True  # its process has not been asked for its models
    models_due: asyncio.Event = field(default_factory=asyncio.Event)  # set to read the models at once

    @classmethod
    def at(cls, address: str, *, timeout_seconds: float, key: PodKey | None = None) -> Self:
        """Return an endpoint without any report; `timeout_seconds` to connect, `key` goes with each request."""
        http = PodHttp(pod_of(address), connect_seconds=timeout_seconds, key=key)
        return cls(
            address=address,
            http=http,
            page=MetricsPage(http.get),
            unknown=EndpointStatus(address=address, reachability=Reachability.UNKNOWN, load=None),
            unreachable=EndpointStatus(address=address, reachability=Reachability.UNREACHABLE, load=None),
            asleep=EndpointStatus(address=address, reachability=Reachability.NOT_READY, load=None),
        )

    async def own_page(self, text: bytes, *, ranked: Callable[[str, tuple[int, ...]], None]) -> bytes:
        """Return the page of its rank; `ranked` gets its pod's ranks if they are others than on the last page.

        They are () if a request cannot name one. Raise HttpResponseError or OSError.
        """
        if (now := time.monotonic()) >= self.ranks_due:
            if (ranks := ranks_on(text)) != self.ranks:
                reads = bool(ranks) and await reads_header(self.http)
                self.ranks, self.is_dealt = ranks, bool(ranks) and not reads
                ranked(pod_of(self.address), ranks if reads else ())
            self.ranks_due = now + RANKS_EVERY_SECONDS
        rank = rank_of(self.address)
        return text if rank is None else page_of(text, rank)

    @property
    def is_silent(self) -> bool:
        """Whether it has never said anything."""
        return self.load is None and self.models is None

    def refuses(self, *, refused: bool) -> None:
        """Set whether it refuses connections, and its status for picks."""
        self.refused = refused
        self.out = self.closed or (self.unreachable if refused else None)

    def sleeps(self) -> None:
        """Let it get no requests until it reports to be awake."""
        self.ready, self.out = None, self.closed or self.asleep
        self.note_problem(ASLEEP)

    def reports(self, load: EndpointLoad) -> EndpointTrend:
        """Take a report into its status for picks, and return the trend up to it."""
        trend = self.trends.report(load)
        self.ready = EndpointStatus(
            address=self.address,
            reachability=Reachability.READY,
            load=load,
            trend=trend,
            models=self.models,
            ready_since=self.ready_since,
        )
        return trend

    def trouble(self, *, asked_every_seconds: float) -> EndpointTrouble | None:
        """Return why it gets no requests or has an unknown load, or None without trouble."""
        if self.last_problem is None and self.closed is None:
            return None
        return EndpointTrouble(
            since=self.closed_since if self.closed is not None else self.problem_since,
            problem=self.last_problem,
            asked_every_seconds=asked_every_seconds,
        )

    def note_problem(self, problem: str | None) -> None:
        """Note why its last scrape failed, or None; log a change."""
        if problem == self.last_problem:
            return
        if self.last_problem is None:
            self.problem_since = time.monotonic()
        self.last_problem = problem
        if problem is None:
            log.info("endpoint reports its load", extra={"endpoint": self.address})
        else:
            log.warning("endpoint: %s", problem, extra={"endpoint": self.address})

    def note_refusal(self, refusal: str | None) -> None:
        """Note why it does not list its models, or None; log a change."""
        if refusal == self.refusal:
            return
        self.refusal = refusal
        if refusal is None:
            log.info("endpoint lists its models", extra={"endpoint": self.address})
        else:
            log.warning("endpoint does not list its models: %s", refusal, extra={"endpoint": self.address})

    def lists(self, models: EndpointModels | None) -> None:
        """Set its models, also in its statuses for picks; None if they are unknown."""
        self.models = models
        self.unknown = structs.replace(self.unknown, models=models)
        if self.ready is not None:
            self.ready = structs.replace(self.ready, models=models)

    def still_seconds(self, load: EndpointLoad) -> float:
        """Return how long its numbers have stood still although it reports running or waiting requests.

        Compare the numbers, not the page: metrics of the process itself go on when its engine is stuck. An idle pod
        (0.0) has no reason to count; after it becomes busy, the time counts from the first busy report.
        """
        last = self.load
        if last is None or load.shows_last_step or not load.unfinished_requests:
            return 0.0
        if structs.replace(load, reported_at=last.reported_at) != last:
            return 0.0
        return load.reported_at - self.changed_at

    def moved(self, load: EndpointLoad) -> None:
        """Note that the numbers changed, and the pause before: on a slow pod, the time of a step."""
        last = self.load
        if last is not None and last.unfinished_requests:
            pause = min(load.reported_at - self.changed_at, MOST_PAUSE_SECONDS)
            self.longest_pause_seconds = max(self.longest_pause_seconds, pause)
        self.changed_at = load.reported_at


class FirstAnswers:
    """The endpoints of one pool that still have to be asked; `is_complete` while there are none."""

    def __init__(self, addresses: Iterable[str], *, completed: Callable[[], None]) -> None:
        """`completed` is called from the event loop just before `wait` returns."""
        self._awaited = set(addresses)
        self._completed = completed
        self._are_in = asyncio.Event()
        if not self._awaited:
            self._are_in.set()

    @property
    def is_complete(self) -> bool:
        """Whether every endpoint has been asked."""
        return self._are_in.is_set()

    def expect(self, address: str) -> None:
        """Note that the endpoint has to be asked."""
        self._awaited.add(address)
        self._are_in.clear()

    def got(self, address: str) -> None:
        """Note that the endpoint answered, failed to answer, or is gone."""
        if address not in self._awaited:
            return
        self._awaited.discard(address)
        if not self._awaited:
            # deferred: this may be called in the middle of a change of the pool
            asyncio.get_running_loop().call_soon(self._complete)

    async def wait(self, *, seconds: float) -> None:
        """Wait until every endpoint has been asked, at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._are_in.wait()

    def _complete(self) -> None:
        if not self._awaited and not self._are_in.is_set():
            self._completed()
            self._are_in.set()


async def reads_header(http: PodHttp) -> bool:
    """Tell whether the pod's version reads the header. Raise HttpResponseError or OSError."""
    for path, least in _VERSIONS:
        response = await http.get(path, max_body_bytes=MOST_VERSION_BYTES)
        found = _VERSION.search(response.body) if response.status == 200 else None
        if found is not None:
            return tuple(map(int, found.groups())) >= least
    return False
