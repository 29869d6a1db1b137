"""One endpoint as the scraper knows it: its connection, its last report, and what a pick sees of it."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Self

from extproc.pods.endpoint import EndpointModels, EndpointStatus, Reachability
from extproc.pods.endpoint_samples import TrendWatch
from kvmesh.pods.metrics_page import MetricsPage
from kvmesh.pods.pod_http import PodHttp
from kvmesh.pods.pod_key import PodKey
from kvmesh.pods.pod_report import EndpointLoad

MOST_PAUSE_SECONDS = 10.0  # no step takes longer


@dataclass(slots=True, kw_only=True)
class ScrapeTarget:
    """Made by `at`; the scraper writes what it learns."""

    address: str
    http: PodHttp  # one connection for all pages
    page: MetricsPage
    # what a pick may see, made once a scrape and not once a pick
    unknown: EndpointStatus
    unreachable: EndpointStatus
    ready: EndpointStatus | None = None
    load: EndpointLoad | None = None  # that `ready` has
    models: EndpointModels | None = None
    trends: TrendWatch = field(default_factory=TrendWatch)
    text: bytes = b""  # that `load` was read from
    changed_at: float = 0.0  # monotonic seconds of the first report with the numbers of `load`
    longest_pause_seconds: float = 0.0  # that its numbers stood still while requests were there, and then moved
    refused: bool = False  # by the last scrape
    closed_since: float = 0.0  # monotonic seconds
    closed: EndpointStatus | None = None  # what a pick sees while it may get no new requests, whatever it reports
    out: EndpointStatus | None = None  # `closed`, or `unreachable` where it has refused
    tasks: tuple[asyncio.Task[None], ...] = ()
    is_new: bool = False  # its next report is its first: it was not there, or is another process
    ready_since: float | None = None  # monotonic seconds; None: it served when we first looked, or has not yet
    last_problem: str | None = None
    problem_since: float = 0.0  # monotonic seconds at which it reported no more
    refusal: str | None = None  # why it does not list its models
    scraped: asyncio.Event = field(default_factory=asyncio.Event)
    must_ask: bool = True  # its process has not been asked for its models
    models_due: asyncio.Event = field(default_factory=asyncio.Event)  # set: at once

    @classmethod
    def at(cls, address: str, *, timeout_seconds: float, key: PodKey | None = None) -> Self:
        """Return an endpoint of which nothing is known yet; a connection may take so long. `key` is shown to it."""
        http = PodHttp(address, connect_seconds=timeout_seconds, key=key)
        return cls(
            address=address,
            http=http,
            page=MetricsPage(http.get),
            unknown=EndpointStatus(address=address, reachability=Reachability.UNKNOWN, load=None),
            unreachable=EndpointStatus(address=address, reachability=Reachability.UNREACHABLE, load=None),
        )

    @property
    def is_silent(self) -> bool:
        """Whether it has never said anything."""
        return self.load is None and self.models is None

    def refuses(self, *, refused: bool) -> None:
        """Note whether it refuses connections, and what a pick sees of it."""
        self.refused = refused
        self.out = self.closed or (self.unreachable if refused else None)

    def still_seconds(self, load: EndpointLoad) -> float:
        """Return for how long its numbers have been these although it says that requests run or wait there.

        Numbers, not the page: what the process counts of itself goes on when its engine is stuck. An idle pod has no
        reason to count, and one that became busy does so from then on.
        """
        last = self.load
        if last is None or replace(load, reported_at=last.reported_at) != last:
            return 0.0
        if load.shows_last_step or not load.unfinished_requests:
            return 0.0
        return load.reported_at - self.changed_at

    def moved(self, load: EndpointLoad) -> None:
        """Note that the numbers have changed, and after how long a pause: on a slow pod that is a step's time."""
        last = self.load
        if last is not None and last.unfinished_requests:
            pause = min(load.reported_at - self.changed_at, MOST_PAUSE_SECONDS)
            self.longest_pause_seconds = max(self.longest_pause_seconds, pause)
        self.changed_at = load.reported_at
