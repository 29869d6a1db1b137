"""Asking pods where they publish: what is kept, what is said, how often."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TypeVar

import pytest

from kv_indexer.pools.find_streams import DiscoveryPolicy, StreamFinder
from kv_indexer.pools.members import PodAnswer
from kvmesh.blocks.source import EventAddresses, SourceState
from kvmesh.errors import FeedLostError, KvIndexerError, NoEventSourceError
from tests.unit.kv_indexer_follow.kv_fakes import CountingTelemetry

POD = "a:1"
HERE, THERE = {0: EventAddresses(events="tcp://a:1")}, {0: EventAddresses(events="tcp://a:2")}
DOWN, SILENT = FeedLostError("a:1 is down"), NoEventSourceError("a:1 publishes no KV events")
T = TypeVar("T")
WELL_SECONDS, LOST_SECONDS = 10.0, 0.5


class EndOfTestError(Exception):
    """The pod has said all."""


class Bench:
    """A finder that asks a scripted pod."""

    def __init__(self, *script: Mapping[int, EventAddresses] | KvIndexerError) -> None:
        self.script = list(script)
        self.models: list[set[str] | KvIndexerError] = []
        self.model_questions = 0
        self.telemetry = CountingTelemetry()
        self.slept: list[float] = []
        self.changes = 0
        self.is_lost = False
        self.now = 0.0
        self.slowdown = 1.0
        self.registered: set[str] = set()  # endpoints
        self.finder = StreamFinder(
            endpoints=(POD,),
            model="tiny",
            telemetry=self.telemetry,
            is_lost=lambda _: self.is_lost,
            changed=self._changed,
            policy=DiscoveryPolicy(well_seconds=WELL_SECONDS, lost_seconds=LOST_SECONDS),
            sleep=self._sleep,
            clock=lambda: self.now,
            slowdown=lambda: self.slowdown,
            is_registered=lambda stream: stream.endpoint in self.registered,
        )

    async def run(self, endpoint: str = POD) -> None:
        with pytest.raises(EndOfTestError):
            await self.finder.watch(endpoint, self)

    async def say(self, endpoint: str, answer: Mapping[int, EventAddresses]) -> None:
        """Have a pod answer once."""
        self.script = [answer]
        await self.run(endpoint)

    @property
    def publishers(self) -> dict[str, list[str]]:
        """Where each pod publishes, by endpoint."""
        return {name: [each.events for each in answer.ranks.values()] for name, answer in self.finder.answers.items()}

    async def find(self, endpoint: str) -> Mapping[int, EventAddresses]:
        return _give(self.script.pop(0))

    async def served_models(self, endpoint: str) -> AbstractSet[str]:
        self.model_questions += 1
        return _give(self.models.pop(0) if self.models else {"tiny"})

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        if not self.script:
            raise EndOfTestError

    def _changed(self) -> None:
        self.changes += 1


def _give(step: T | KvIndexerError) -> T:
    if isinstance(step, KvIndexerError):
        raise step
    return step


async def test_an_answer_is_kept_with_the_time_of_its_question_and_told_when_it_differs() -> None:
    bench = Bench(HERE, HERE, THERE)
    await bench.run()

    assert bench.finder.answers == {POD: PodAnswer(asked_at=2 * WELL_SECONDS, ranks=THERE)}
    assert (bench.changes, bench.slept) == (2, [WELL_SECONDS] * 3)
    assert bench.finder.waiting == {}


async def test_a_pod_that_stops_answering_keeps_what_it_said_and_is_asked_more_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(HERE, DOWN, DOWN)
    await bench.run()

    assert bench.finder.answers == {POD: PodAnswer(asked_at=0.0, ranks=HERE)}
    assert (bench.changes, bench.slept) == (1, [WELL_SECONDS, LOST_SECONDS, LOST_SECONDS])
    assert (caplog.text.count("a:1 is down"), bench.telemetry.states) == (1, [])


async def test_a_pod_whose_events_are_lost_is_asked_more_often() -> None:
    bench = Bench(HERE)
    bench.is_lost = True
    await bench.run()

    assert bench.slept == [LOST_SECONDS]


async def test_a_pod_that_says_it_publishes_nothing_has_no_streams_any_more() -> None:
    bench = Bench(HERE, SILENT)
    await bench.run()

    assert bench.finder.answers == {POD: PodAnswer(asked_at=WELL_SECONDS, ranks={})}
    assert bench.changes == 2


@pytest.mark.parametrize("trouble", [DOWN, SILENT])
async def test_a_pod_without_any_known_stream_is_shown_lost_until_it_has_one(trouble: KvIndexerError) -> None:
    bench = Bench(trouble)
    assert bench.finder.waiting == {POD: "not asked yet"}
    await bench.run()
    assert bench.telemetry.states == [(SourceState.LOST, trouble.reason)]
    assert bench.finder.waiting == {}

    bench.script = [HERE]
    await bench.run()
    assert bench.telemetry.states == []


async def test_the_model_is_compared_once_and_again_after_the_pod_was_away(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(HERE, HERE, DOWN, HERE)
    bench.models = [{"tiny", "other"}, {"other", "another"}]
    await bench.run()

    assert bench.model_questions == 2
    assert caplog.text.count("a:1 does not serve --model tiny but another, other: nothing will match") == 1


async def test_a_pod_that_does_not_tell_its_models_is_followed_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(HERE)
    bench.models = [FeedLostError("no answer")]
    await bench.run()

    assert bench.finder.answers[POD].ranks == HERE
    assert "cannot compare the model name with what the pod serves: no answer" in caplog.text


async def test_a_pod_of_a_large_fleet_is_asked_the_more_rarely_the_longer_it_says_the_same() -> None:
    bench = Bench(*[HERE] * 6, THERE, THERE, DOWN, THERE)
    bench.slowdown = 10.0
    await bench.run()
    assert [slept / WELL_SECONDS for slept in bench.slept] == [10, 20, 40, 80, 100, 100, 10, 20, 0.05, 20]


# --- an address belongs to one endpoint -------------------------------------------------------------------------------

MINE = {0: EventAddresses(events="tcp://a:1", replay="tcp://a:2", announced=True)}


@pytest.mark.parametrize(
    "stolen",
    [
        {0: EventAddresses(events="tcp://a:1", announced=True)},
        {0: EventAddresses(events="tcp://a:9", replay="tcp://a:2", announced=True)},
        {7: EventAddresses(events="tcp://a:2", announced=True)},
    ],
    ids=["its events", "its replay", "its replay as events"],
)
async def test_a_pod_that_announces_where_another_publishes_gets_nothing(stolen: dict[int, EventAddresses]) -> None:
    bench = Bench()
    await bench.say("a:8000", MINE)
    before = bench.changes
    await bench.say("a:8001", stolen)
    assert bench.publishers == {"a:8000": ["tcp://a:1"], "a:8001": []}
    assert bench.changes == before + 1
    assert list(bench.finder.streams.values()) == list(MINE.values())

    await bench.say("a:8000", MINE)  # whatever the other one says
    assert bench.publishers == {"a:8000": ["tcp://a:1"], "a:8001": []}


async def test_what_the_index_knows_goes_before_what_has_only_come_first() -> None:
    bench = Bench()
    await bench.say("a:8001", MINE)
    bench.registered = {"a:8000"}
    await bench.say("a:8000", MINE)
    assert bench.publishers == {"a:8001": [], "a:8000": ["tcp://a:1"]}
    await bench.say("a:8001", MINE)
    assert bench.publishers == {"a:8001": [], "a:8000": ["tcp://a:1"]}


async def test_what_is_configured_goes_before_what_is_announced() -> None:
    bench = Bench()
    bench.registered = {"a:8001"}
    await bench.say("a:8001", MINE)
    configured = {0: EventAddresses(events="tcp://a:1")}
    await bench.say("a:8000", configured)
    assert bench.publishers == {"a:8001": [], "a:8000": ["tcp://a:1"]}
    await bench.say("a:8002", configured)  # whoever has configured both must know
    assert bench.publishers == {"a:8001": [], "a:8000": ["tcp://a:1"], "a:8002": ["tcp://a:1"]}


async def test_an_address_that_its_pod_gives_up_may_be_anothers() -> None:
    bench = Bench()
    await bench.say("a:8000", MINE)
    await bench.say("a:8000", {0: EventAddresses(events="tcp://a:5", announced=True)})
    await bench.say("a:8001", MINE)
    bench.finder.forget("a:8000")
    await bench.say("a:8002", {0: EventAddresses(events="tcp://a:5", announced=True)})
    assert bench.publishers == {"a:8001": ["tcp://a:1"], "a:8002": ["tcp://a:5"]}
