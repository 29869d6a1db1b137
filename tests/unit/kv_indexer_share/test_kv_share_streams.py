"""Followers start, stop and change in step with the leases."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager

import pytest

from kv_indexer.pools.members import PodAnswer, known_streams
from kv_indexer.share.share_streams import StreamSharer
from kvmesh.blocks.source import Claim, EventAddresses, SourceState, Stream
from kvmesh.errors import IndexUnavailableError, KvIndexerError, LeaseLostError
from tests.unit.kv_indexer_follow.kv_fakes import CountingTelemetry

A, B, A1 = Stream(endpoint="a:1"), Stream(endpoint="b:1"), Stream(endpoint="a:1", dp_rank=1)
AT_A, AT_B, ELSEWHERE = (EventAddresses(events=f"tcp://{host}:9") for host in ("a", "b", "c"))
BOTH = {"a:1": {0: AT_A}, "b:1": {0: AT_B}}


def claim(stream: Stream, fence: int = 1) -> Claim:
    return Claim(stream=stream, fence=fence)


class FakeLeases:
    """Grants what the test says."""

    def __init__(self) -> None:
        self.granted: dict[Stream, Claim] = {}
        self.same = False  # gives out the same object as long as it stays so, as the book in Redis does
        self.fails_with: KvIndexerError | None = None
        self.drop_fails_with: KvIndexerError | None = None
        self.candidates: list[AbstractSet[Stream]] = []
        self.dropped: list[Claim] = []
        self.released = 0
        self.silent: AbstractSet[str] = frozenset()

    def grant(self, *claims: Claim) -> None:
        self.granted = {each.stream: each for each in claims}

    async def tick(self, candidates: AbstractSet[Stream]) -> Mapping[Stream, Claim]:
        self.candidates.append(frozenset(candidates))
        self._maybe_fail()
        return self.granted if self.same else dict(self.granted)

    async def pulse(self) -> AbstractSet[str]:
        self._maybe_fail()
        return self.silent

    async def drop(self, claim: Claim) -> None:
        if self.drop_fails_with is not None:
            raise self.drop_fails_with
        self.dropped.append(claim)

    async def release(self) -> None:
        self._maybe_fail()
        self.released += 1

    def _maybe_fail(self) -> None:
        if self.fails_with is not None:
            raise self.fails_with


class Bench:
    """A sharer whose followers only say that they run."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.group = group
        self.now = 100.0
        self.leases = FakeLeases()
        self.telemetry = CountingTelemetry()
        self.answers: dict[str, PodAnswer] = {}
        self.running: list[tuple[Claim, EventAddresses]] = []
        self.log: list[str] = []
        self.lost = asyncio.Event()  # set: followers end by themselves
        self.stubborn = asyncio.Event()  # not set while followers refuse to end
        self.stubborn.set()
        self.broken: Stream | None = None  # its followers fail at once
        self.ends_beside: Mapping[Stream, Stream] = {}  # stopped -> whose follower ends with it, by itself
        self.ends: dict[Stream, asyncio.Event] = {}  # of each follower: set, it ends by itself
        self.addresses: Mapping[Stream, EventAddresses] | None = None  # given as they are, None: made of the answers
        self.sharer = StreamSharer(
            leases=self.leases,
            answers=self.answers,
            streams=self._streams,
            telemetry=self.telemetry,
            clock=lambda: self.now,
            stop_seconds=0.01,
        )

    def found(self, ranks: Mapping[str, Mapping[int, EventAddresses]]) -> None:
        self.answers.clear()
        self.answers.update({each: PodAnswer(asked_at=self.now, ranks=of) for each, of in ranks.items()})

    def _streams(self) -> Mapping[Stream, EventAddresses]:
        return known_streams(self.answers) if self.addresses is None else self.addresses

    async def tick(self) -> None:
        """Tick, and let what was started get under way."""
        await self.sharer.tick(self.group, self._follow)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _follow(self, claim: Claim, addresses: EventAddresses) -> None:
        if claim.stream == self.broken:
            raise RuntimeError("a defect of ours")
        self.running.append((claim, addresses))
        self.log.append(f"+{claim.stream.name}/{claim.fence}")
        self.ends[claim.stream] = end = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                ways = [group.create_task(event.wait()) for event in (self.lost, end)]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
        finally:
            if claim.stream in self.ends_beside:
                self.ends[self.ends_beside[claim.stream]].set()
                self.ends_beside = {}
                for _ in range(5):  # the other one ends first
                    await asyncio.sleep(0)
            while not self.stubborn.is_set():
                try:
                    await self.stubborn.wait()
                except asyncio.CancelledError:
                    continue
            self.running.remove((claim, addresses))
            self.log.append(f"-{claim.stream.name}/{claim.fence}")


class EndOfTestError(Exception):
    """How a test leaves its task group."""


@asynccontextmanager
async def bench_with(*claims: Claim, ranks: Mapping[str, Mapping[int, EventAddresses]] = BOTH) -> AsyncIterator[Bench]:
    """A bench after one tick that granted these claims."""
    try:
        async with asyncio.TaskGroup() as group:
            bench = Bench(group)
            bench.found(ranks)
            bench.leases.grant(*claims)
            await bench.tick()
            yield bench
            bench.stubborn.set()
            raise EndOfTestError
    except* EndOfTestError:
        pass


async def test_what_is_granted_is_followed_where_its_pod_publishes_and_nothing_else() -> None:
    async with bench_with(claim(A)) as bench:
        assert bench.leases.candidates == [{A, B}]
        assert bench.running == [(claim(A), AT_A)]
        assert (set(bench.sharer.held), bench.sharer.trouble) == ({A}, "")


async def test_what_stays_granted_is_left_alone() -> None:
    async with bench_with(claim(A), claim(B)) as bench:
        await bench.tick()
        assert bench.log == ["+a:1#0/1", "+b:1#0/1"]


async def test_what_is_granted_to_another_is_no_longer_followed_nor_shown() -> None:
    async with bench_with(claim(A), claim(B)) as bench:
        bench.telemetry.state(A, state=SourceState.LIVE, reason="")
        bench.leases.grant(claim(B))
        await bench.tick()
        assert bench.running == [(claim(B), AT_B)]
        assert (set(bench.sharer.held), bench.telemetry.states) == ({B}, [])


async def test_a_new_fence_starts_a_new_follower_after_the_old_one_has_ended() -> None:
    async with bench_with(claim(A)) as bench:
        bench.leases.grant(claim(A, fence=2))
        await bench.tick()
        assert bench.log == ["+a:1#0/1", "-a:1#0/1", "+a:1#0/2"]


async def test_a_new_address_starts_a_new_follower_under_the_same_claim() -> None:
    async with bench_with(claim(A)) as bench:
        bench.found({"a:1": {0: ELSEWHERE}})
        await bench.tick()
        assert bench.log == ["+a:1#0/1", "-a:1#0/1", "+a:1#0/1"]
        assert bench.running == [(claim(A), ELSEWHERE)]


async def test_a_follower_that_ended_by_itself_is_started_anew_if_the_claim_still_stands() -> None:
    async with bench_with(claim(A)) as bench:
        bench.lost.set()
        await bench.tick()
        bench.lost.clear()
        await bench.tick()
        assert bench.running == [(claim(A), AT_A)]


async def test_a_defect_in_a_follower_ends_neither_the_others_nor_its_stream(caplog: pytest.LogCaptureFixture) -> None:
    async with bench_with(claim(A), claim(B)) as bench:
        bench.broken = A
        bench.leases.grant(claim(A, fence=2), claim(B))
        await bench.tick()
        assert bench.running == [(claim(B), AT_B)]
        assert "following a:1#0 failed" in caplog.text

        bench.broken = None
        await bench.tick()
        assert bench.running == [(claim(B), AT_B), (claim(A, fence=2), AT_A)]


async def test_a_follower_that_ends_while_another_is_being_stopped_is_started_anew_though_nothing_changes() -> None:
    async with bench_with(claim(A), claim(B)) as bench:
        bench.addresses = known_streams(bench.answers)
        bench.leases.same = True
        bench.ends_beside = {B: A}
        bench.leases.grant(claim(A), claim(B, fence=2))
        await bench.tick()
        assert bench.running == [(claim(B, fence=2), AT_B)]
        await bench.tick()
        assert bench.running == [(claim(B, fence=2), AT_B), (claim(A), AT_A)]
        for _ in range(3):
            await bench.tick()
        assert len(bench.log) == 6


async def test_a_follower_that_does_not_end_is_not_doubled_and_holds_up_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench_with(claim(A)) as bench:
        bench.stubborn.clear()
        bench.leases.grant(claim(A, fence=2), claim(B))
        await bench.tick()
        assert bench.running == [(claim(A), AT_A), (claim(B), AT_B)]
        assert "a:1#0: its follower does not end" in caplog.text

        bench.stubborn.set()
        await bench.tick()
        assert bench.running == [(claim(B), AT_B), (claim(A, fence=2), AT_A)]


async def test_while_redis_is_out_of_reach_followers_go_on_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench_with(claim(A)) as bench:
        bench.leases.fails_with = IndexUnavailableError("Redis is away")
        await bench.tick()
        await bench.tick()
        assert (bench.running, bench.sharer.trouble) == ([(claim(A), AT_A)], "Redis is away")
        assert caplog.text.count("the leases cannot be renewed: Redis is away") == 1

        bench.leases.fails_with = None
        bench.leases.grant(claim(B))
        await bench.tick()
        assert (bench.running, bench.sharer.trouble) == ([(claim(B), AT_B)], "")


async def test_a_rank_that_its_pod_has_no_more_is_stopped_and_then_dropped_by_its_owner() -> None:
    async with bench_with(claim(A), claim(A1), ranks={"a:1": {0: AT_A, 1: ELSEWHERE}}) as bench:
        bench.found({"a:1": {0: AT_A}})
        await bench.tick()
        assert bench.running == [(claim(A), AT_A)]
        assert bench.leases.dropped == [claim(A1)]


@pytest.mark.parametrize("error", [IndexUnavailableError("away"), LeaseLostError("late")])
async def test_a_drop_that_fails_is_tried_again_while_the_claim_stands(error: KvIndexerError) -> None:
    async with bench_with(claim(A1), ranks={"a:1": {0: AT_A}}) as bench:
        bench.leases.dropped.clear()
        bench.leases.drop_fails_with = error
        await bench.tick()
        assert bench.leases.dropped == []

        bench.leases.drop_fails_with = None
        await bench.tick()
        assert bench.leases.dropped == [claim(A1)]


async def test_a_registered_rank_that_its_pod_does_not_name_is_asked_for_to_be_dropped() -> None:
    async with bench_with(ranks={"a:1": {0: AT_A}}) as bench:
        bench.sharer.registered([A, A1])
        await bench.tick()
        assert bench.leases.candidates[-1] == {A}  # another indexer may have asked the pod after us

        bench.now += 10
        bench.found({"a:1": {0: AT_A}})
        bench.sharer.registered([A, A1])
        await bench.tick()
        assert bench.leases.candidates[-1] == {A, A1}

        bench.sharer.registered([A])
        await bench.tick()
        assert bench.leases.candidates[-1] == {A}


async def test_at_the_end_everything_is_given_back() -> None:
    async with bench_with(claim(A)) as bench:
        await bench.sharer.release()
        assert bench.leases.released == 1


async def test_an_end_without_redis_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async with bench_with(claim(A)) as bench:
        bench.leases.fails_with = IndexUnavailableError("Redis is away")
        await bench.sharer.release()
        assert "the leases are not given back" in caplog.text


async def test_a_tick_is_due_when_another_indexer_has_just_fallen_silent() -> None:
    async with bench_with() as bench:
        seen = []
        for names in ("", "a", "a", "ab", "b", "", "a"):
            bench.leases.silent = frozenset(names)
            seen.append(await bench.sharer.pulse())
        bench.leases.fails_with = IndexUnavailableError("gone")

        assert (seen, await bench.sharer.pulse()) == ([False, True, False, True, False, False, True], False)
