"""The watch over the pods: what it looks at, what it says once, and what it shares."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from kv_indexer.pools.follow_pools import SLOWEST
from kv_indexer.pools.members import PodAnswer
from kv_indexer.telemetry.indexer_telemetry import PrometheusTelemetry
from kv_indexer.watch.pod_metrics import PodMetrics
from kv_indexer.watch.watch_pods import SHARE_SECONDS, PodWatch
from kvmesh.blocks.findings import Finding
from kvmesh.blocks.source import EventAddresses, Registry, SlotRecord, SourceState, Stream
from kvmesh.errors import IndexUnavailableError
from kvmesh.index.redis_findings import VOID_SECONDS
from kvmesh.pods.pod_report import EngineCounters, PodReport

POD = "10.0.0.1:8000"
ONE, TWO = Stream(endpoint=POD), Stream(endpoint=POD, dp_rank=1)
NOTHING = EngineCounters(
    prompt_tokens=0,
    cached_prompt_tokens=0,
    generated_tokens=0,
    prefills=0,
    unfinished=0,
    queried_tokens=0,
    hit_tokens=0,
)
SERVED = replace(NOTHING, prompt_tokens=10_000, queried_tokens=10_000, prefills=1)


@dataclass
class SharedFindings:
    """What Redis would have."""

    kept: dict[tuple[str, str], Finding] = field(default_factory=dict)
    calls: int = 0
    healed: Collection[Finding] = ()  # as told last
    down: bool = False

    async def share(self, standing: Collection[Finding], healed: Collection[Finding]) -> tuple[Finding, ...]:
        self.calls += 1
        if self.down:
            raise IndexUnavailableError("Redis is away")
        self.healed = healed
        for finding in healed:
            self.kept.pop(finding.key, None)
        self.kept.update((finding.key, finding) for finding in standing)
        return tuple(self.kept.values())


class World:
    """All that the watch sees, to be changed by a test."""

    def __init__(self, *streams: Stream, ranks: Collection[int] | None = None) -> None:
        self.now = 1000.0
        self.telemetry = PrometheusTelemetry(clock=lambda: self.now)
        self.held = list(streams)
        self.engines: dict[int, EngineCounters] = {0: NOTHING}
        self.registry = Registry(version=b"1")
        self.shared = SharedFindings()
        self.slowdown = 1.0
        known = [stream.dp_rank for stream in streams] if ranks is None else ranks
        addresses = {rank: EventAddresses(events="tcp://10.0.0.1:5557") for rank in known}
        self.answers: Mapping[str, PodAnswer] = {POD: PodAnswer(asked_at=0.0, ranks=addresses)}
        self.watch = PodWatch(
            endpoints=[POD],
            activities=self.telemetry.activities,
            pods=cast("PodMetrics", self),
            share=self.shared.share,
            telemetry=self.telemetry,
            held=lambda: self.held,
            slowdown=lambda: self.slowdown,
            answers=self.answers,
            registry=lambda: self.registry,
            clock=lambda: self.now,
            wall=lambda: self.now + 5000.0,
        )
        for stream in streams:
            self.telemetry.state(stream, state=SourceState.LIVE, reason="")

    def latest(self, endpoint: str) -> PodReport | None:
        return PodReport(scraped_at=self.now, block_size=16, caches_prefixes=True, engines=dict(self.engines))

    async def pass_seconds(self, seconds: int) -> list[tuple[str, str]]:
        for _ in range(seconds):
            self.now += 1
            assert await self.watch.look() == 1.0
        return [finding.key for finding in self.watch.current]

    def event(self, stream: Stream) -> None:
        self.telemetry.applied(stream, batches=1, events={"BlockStored": 1}, last_ts=self.now)

    def metric(self, reason: str) -> str:
        text = self.telemetry.render().decode()
        name = f'kvmesh_indexer_finding{{endpoint="{POD}",reason="{reason}"}} '
        return next(line.removeprefix(name) for line in text.splitlines() if line.startswith(name))


async def test_a_silent_pod_is_one_log_line_a_metric_and_a_shared_record_until_it_speaks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    world = World(ONE)
    await world.pass_seconds(5)
    assert world.metric("no-events") == "0.0"
    world.engines = {0: SERVED}
    assert await world.pass_seconds(60) == [(f"{POD}#0", "no-events")]

    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"{POD}#0: serves requests but has sent no KV events")
    assert "--kv-events-config" in caplog.text
    assert world.metric("no-events") == "1.0"
    assert list(world.shared.kept) == [(f"{POD}#0", "no-events")]
    assert [finding.since for finding in world.watch.shown] == [1000.0 + 6 + 5000.0]

    caplog.clear()
    world.event(ONE)
    assert await world.pass_seconds(10) == []
    assert [record.getMessage() for record in caplog.records] == [f"{POD}#0: no more no-events"]
    assert world.metric("no-events") == "0.0"
    assert world.shared.kept == {}
    assert 'kvmesh_indexer_findings_total{reason="no-events"} 1.0' in world.telemetry.render().decode()


async def test_of_two_ranks_the_silent_one_is_named() -> None:
    world = World(ONE, TWO)
    world.engines = {0: NOTHING, 1: NOTHING}
    await world.pass_seconds(5)
    world.engines = {0: SERVED, 1: SERVED}
    world.event(ONE)

    assert await world.pass_seconds(60) == [(f"{POD}#1", "no-events")]


async def test_a_rank_of_which_no_stream_is_known_is_a_finding_of_the_pod() -> None:
    world = World(ONE)
    world.engines = {0: NOTHING, 1: NOTHING}
    await world.pass_seconds(5)
    world.engines = {0: NOTHING, 1: SERVED}

    assert await world.pass_seconds(60) == [(POD, "no-events")]


async def test_a_pod_without_streams_is_watched_all_the_same() -> None:
    world = World(ranks=[])
    await world.pass_seconds(5)
    world.engines = {0: SERVED}

    assert await world.pass_seconds(60) == [(POD, "no-events")]


async def test_a_stream_that_another_indexer_follows_is_left_to_it() -> None:
    world = World(ranks=[0])
    await world.pass_seconds(5)
    world.engines = {0: SERVED}

    assert await world.pass_seconds(60) == []


async def test_a_stream_that_passes_to_another_indexer_has_not_healed(caplog: pytest.LogCaptureFixture) -> None:
    world = World(ONE)
    await world.pass_seconds(5)
    world.engines = {0: SERVED}
    await world.pass_seconds(60)
    caplog.clear()
    caplog.set_level(logging.INFO)
    world.held.clear()

    assert await world.pass_seconds(10) == []
    assert caplog.records == []
    assert list(world.shared.kept) == [(f"{POD}#0", "no-events")]  # ends by itself, or its new indexer confirms it


async def test_blocks_in_the_index_are_those_of_the_stream_in_all_its_tiers() -> None:
    world = World(ONE)
    await world.pass_seconds(5)
    world.engines = {0: replace(SERVED, hit_tokens=9984, cached_prompt_tokens=9984)}
    assert await world.pass_seconds(60) == [(f"{POD}#0", "nothing-indexed")]

    slot = SlotRecord(slot=0, endpoint=POD, dp_rank=0, tier="CPU", epoch=1, block_size=16, blocks=1)
    world.registry = Registry(version=b"2", slots=(slot,))
    assert await world.pass_seconds(5) == []


async def test_findings_are_shared_when_they_change_and_confirmed_every_few_seconds() -> None:
    world = World(ONE)
    await world.pass_seconds(int(SHARE_SECONDS) * 4)
    assert world.shared.calls == 4
    world.telemetry.undecodable(ONE, reasons={"unknown-event-type": 1})
    await world.pass_seconds(1)

    assert world.shared.calls == 5


async def test_without_redis_findings_stand_in_log_and_metrics_and_what_healed_is_taken_away_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(ONE)
    await world.pass_seconds(5)
    world.telemetry.undecodable(ONE, reasons={"unknown-event-type": 1})
    await world.pass_seconds(1)
    assert list(world.shared.kept) == [(f"{POD}#0", "decode-errors")]
    world.shared.down = True
    assert await world.pass_seconds(310) == []
    assert world.watch.shown == ()
    assert caplog.text.count("findings cannot be shared") == 1
    assert list(world.shared.kept) == [(f"{POD}#0", "decode-errors")]

    world.shared.down = False
    await world.pass_seconds(int(SHARE_SECONDS))
    assert world.shared.kept == {}
    assert len(world.shared.healed) == 1
    await world.pass_seconds(int(SHARE_SECONDS))
    assert world.shared.healed == ()


@pytest.mark.parametrize(("slowdown", "seconds"), [(1.0, 1.0), (2.0, 4.0), (10.0, 25.0), (SLOWEST, 25.0)])
async def test_in_large_fleets_it_looks_more_rarely_but_never_so_that_what_stands_is_void_in_between(
    slowdown: float, seconds: float
) -> None:
    world = World(ONE)
    world.slowdown = slowdown
    assert (await world.watch.look(), seconds < VOID_SECONDS) == (seconds, True)
