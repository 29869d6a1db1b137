"""Notices faults although nothing has failed; reports each once, and once more when it has healed.

Every second it judges each stream that this indexer follows, and each pod without one, by the telemetry's record of the
stream, the pod's /metrics, and the stream's entries in the index. `watch.finding_rules` has the rules. A finding is a
log line that says what to do, a metric (`kvmesh_indexer_finding`), a line on /sources and a field in Redis, where
`kvmesh index sources` reads it. No state of any stream is changed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping

from kv_indexer.pools.members import RANKS_A_POD, PodAnswer
from kv_indexer.ports import IndexerTelemetry
from kv_indexer.watch.finding_rules import StreamRules
from kv_indexer.watch.pod_metrics import PodMetrics
from kv_indexer.watch.stream_activity import FindingPolicy, StreamActivity, StreamFacts
from kvmesh.blocks.findings import Finding, FindingBook
from kvmesh.blocks.source import Registry, SlotRecord, Stream
from kvmesh.errors import IndexUnavailableError
from kvmesh.pods.pod_report import EngineCounters, PodReport, sum_counters

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
RARER_LOOKS = 2.5  # factor in large fleets: there are still two looks per scrape
LONGEST_LOOK_SECONDS = 25.0  # if longer, current findings would expire in Redis (after 30 s) between two looks
JUDGED_AT_ONCE = 250  # streams; takes some milliseconds, and no event is applied meanwhile
SHARE_SECONDS = 5.0  # between two confirmations of findings in Redis

# (current, healed findings) -> findings that any indexer has confirmed; raises IndexUnavailableError
ShareFindings = Callable[[Collection[Finding], Collection[Finding]], Awaitable[tuple[Finding, ...]]]
Subject = tuple[str, int | None]  # endpoint and rank; no rank if not all engines of the pod have a known stream


class PodWatch:
    """Keeps the findings of this indexer."""

    def __init__(
        self,
        *,
        endpoints: Collection[str],
        activities: Mapping[Stream, StreamActivity],
        pods: PodMetrics,
        share: ShareFindings,
        telemetry: IndexerTelemetry,
        held: Callable[[], Collection[Stream]],
        answers: Mapping[str, PodAnswer],
        registry: Callable[[], Registry],
        clock: Callable[[], float],
        wall: Callable[[], float],
        policy: FindingPolicy | None = None,
        slowdown: Callable[[], float] = lambda: 1.0,
        pool_of: Callable[[str], str] = lambda _: "",
    ) -> None:
        """Take the sources of the facts, each updated in place.

        `activities` is the telemetry's, `pods` has their last reports. `held` returns the streams that this indexer
        follows, `registry` the index's records; `answers` is the result of discovery. `clock` gives monotonic seconds
        as everywhere else, `wall` unix seconds. `slowdown` returns a factor on the interval, `pool_of` the pool of an
        endpoint, or "".
        """
        self.shown: tuple[Finding, ...] = ()  # of all indexers, as recorded in Redis
        self._endpoints = endpoints
        self._activities = activities
        self._pods = pods
        self._share_findings = share
        self._telemetry = telemetry
        self._held = held
        self._answers = answers
        self._registry = registry
        self._clock = clock
        self._wall = wall
        self._policy = policy or FindingPolicy()
        self._slowdown = slowdown
        self._pool_of = pool_of
        self._book = FindingBook()
        self._rules: dict[Subject, StreamRules] = {}
        self._share_at = 0.0
        self._unshared: dict[tuple[str, str], Finding] = {}  # healed, but not removed from Redis yet
        self._is_share_failing = False
        self._slots_of: Registry | None = None  # the registry of `_slots`
        self._slots: Mapping[Stream, Collection[SlotRecord]] = {}

    @property
    def current(self) -> tuple[Finding, ...]:
        """The current findings of this indexer."""
        return self._book.current

    async def look(self) -> float:
        """Judge everything once; return the seconds until the next time."""
        now = self._clock()
        facts = {(found.endpoint, found.dp_rank): found for found in self._gather()}
        self._forget(self._rules.keys() - facts.keys())
        findings = []
        for number, (subject, found) in enumerate(facts.items(), 1):
            rules = self._rules.get(subject) or self._rules.setdefault(subject, StreamRules(self._policy))
            findings += rules.judge(found, now=now, unix_now=self._wall())
            if number % JUDGED_AT_ONCE == 0:
                await asyncio.sleep(0)
        news = self._book.look(findings, now=now)
        for finding in news.appeared:
            log.warning("%s: %s (%s)", finding.subject, finding.message, finding.reason, extra=self._facts(finding))
        for finding in news.healed:
            log.info("%s: no more %s", finding.subject, finding.reason, extra=self._facts(finding))
        self._telemetry.findings(self.current, appeared=news.appeared, endpoints=self._endpoints)
        self._unshared.update((finding.key, finding) for finding in news.healed)
        if news.appeared or news.healed or now >= self._share_at:
            self._share_at = now + SHARE_SECONDS
            await self._share()
        slowdown = self._slowdown()
        return min(LOOK_SECONDS * slowdown * min(slowdown, RARER_LOOKS), LONGEST_LOOK_SECONDS)

    async def _share(self) -> None:
        try:
            self.shown = await self._share_findings(self.current, tuple(self._unshared.values()))
        except IndexUnavailableError as error:
            if not self._is_share_failing:
                log.warning("findings cannot be shared, they are in this log and in our metrics alone: %s", error)
            self._is_share_failing = True
            self.shown = self.current
        else:
            self._is_share_failing = False
            self._unshared.clear()

    def _gather(self) -> list[StreamFacts]:
        registry = self._registry()
        if registry is not self._slots_of:  # an unchanged registry is the same object
            self._slots_of, self._slots = registry, registry.slots_by_stream()
        slots = self._slots
        facts = [self._stream_facts(stream, slots.get(stream, ())) for stream in self._held()]
        return facts + [found for endpoint in self._endpoints if (found := self._pod_facts(endpoint))]

    def _pod_facts(self, endpoint: str) -> StreamFacts | None:
        report = self._pods.latest(endpoint)
        counters = self._unheard(endpoint, report) if report else None
        left_out = max(len(self._ranks(endpoint)) - RANKS_A_POD, 0)
        if counters is None and not left_out:
            return None
        return StreamFacts(
            endpoint=endpoint,
            dp_rank=None,
            activity=StreamActivity(),
            report=report,
            counters=counters,
            ranks_left_out=left_out,
        )

    def _stream_facts(self, stream: Stream, slots: Collection[SlotRecord]) -> StreamFacts:
        report = self._pods.latest(stream.endpoint)
        return StreamFacts(
            endpoint=stream.endpoint,
            dp_rank=stream.dp_rank,
            activity=self._activities.get(stream) or StreamActivity(),
            report=report,
            counters=self._counters(stream, report),
            blocks=sum(slot.blocks for slot in slots),
            gpu_block_size=next((slot.block_size for slot in slots if slot.tier == "GPU"), None),
        )

    def _counters(self, stream: Stream, report: PodReport | None) -> EngineCounters | None:
        """Return the counters of the engine behind a stream; None if the engines cannot be distinguished."""
        engines = report.engines if report and report.engines else {}
        if len(engines) == 1 and len(self._ranks(stream.endpoint)) == 1:
            return next(iter(engines.values()))  # the numbers of engine and rank may differ
        return engines.get(stream.dp_rank) if len(engines) > 1 else None

    def _unheard(self, endpoint: str, report: PodReport) -> EngineCounters | None:
        """Sum the counters of a pod's engines without a known stream."""
        engines, ranks = report.engines or {}, self._ranks(endpoint)
        if ranks and len(engines) == 1:
            return None
        return sum_counters([counters for engine, counters in engines.items() if engine not in ranks])

    def _ranks(self, endpoint: str) -> Collection[int]:
        answer = self._answers.get(endpoint)
        return answer.ranks.keys() if answer else ()

    def _forget(self, subjects: Collection[Subject]) -> None:
        """Stop judging streams and pods that are no longer ours: their findings in Redis expire."""
        for endpoint, rank in subjects:
            del self._rules[endpoint, rank]
            self._book.forget([endpoint if rank is None else Stream(endpoint=endpoint, dp_rank=rank).name])

    def _facts(self, finding: Finding) -> dict[str, str]:
        pool = self._pool_of(finding.endpoint)
        return {"endpoint": finding.endpoint, "finding": finding.reason} | ({"pool": pool} if pool else {})
