"""Leases of prefill legs' blocks, in virtual time, and what a reader is told."""

import asyncio
from dataclasses import dataclass, field

import pytest

from bench.virtual_loop import run
from podsim.core.generate import prompt_seed
from podsim.core.scheduler import EngineSettings, Generation, Scheduler
from podsim.kv_transfer import KvSource
from podsim.transfer_link import TransferLink
from podsim.wire.kv_transfer import KvTransferConfig
from podsim.wire.nixl_metrics import NixlMetrics
from podsim.wire.side_channel import Heartbeat, Hello, Read, Release, Reply

PROMPT = list(range(10))  # with blocks of 4 tokens: two full ones and one of two tokens


@dataclass
class Prefiller:
    """A pod's source, with one ended leg named "leg" in blocks 1, 2 and 3."""

    scheduler: Scheduler = field(default_factory=lambda: Scheduler(EngineSettings(block_size=4, total_blocks=9)))
    metrics: NixlMetrics = field(default_factory=lambda: NixlMetrics(labels='engine="0",model_name="m"'))
    wakes: int = 0
    source: KvSource = field(init=False)

    def __post_init__(self) -> None:
        self.source = KvSource(
            engine_id="ours",
            model="m",
            config=KvTransferConfig(kv_lease_duration=30),
            block_bytes=100,
            link=TransferLink(100.0),
            scheduler=self.scheduler,
            metrics=self.metrics,
            on_free=self._wake,
        )
        leg = Generation(token_ids=[*PROMPT, 99], prompt_tokens=10, arrived_at=0.0, keeps_blocks=True)
        self.scheduler.add(leg)
        step = self.scheduler.begin_step(0.0)
        assert step is not None
        self.scheduler.finish_step(step, 0.0)
        self.source.keep(leg, "leg")

    def _wake(self) -> None:
        self.wakes += 1

    @property
    def kept(self) -> int:
        return 8 - self.scheduler.pool.free_blocks


def read(*, blocks: tuple[int, ...] = (1, 2, 3), first: int = 0, prompt: list[int] = PROMPT, leg: str = "leg") -> Read:
    return Read(
        engine_id="ours",
        request_id=leg,
        first_block=first,
        block_ids=blocks,
        prompt_tokens=len(prompt),
        prompt_checksum=prompt_seed(prompt, seed=0),
    )


def test_a_lease_that_nobody_renews_ends_after_its_time() -> None:
    async def story() -> None:
        pod = Prefiller()
        await asyncio.sleep(29.9)
        assert (pod.kept, pod.metrics.expired_leases) == (3, 0)
        await asyncio.sleep(0.2)
        assert (pod.kept, pod.metrics.expired_leases, pod.wakes) == (0, 1, 1)

    run(story())


def test_heartbeats_renew_a_lease_for_two_thirds_of_its_time() -> None:
    async def story() -> None:
        pod = Prefiller()
        heartbeat = Heartbeat(engine_id="ours", request_ids=["leg", "unknown"])
        await pod.source.answer(heartbeat)  # early: shortens nothing
        await asyncio.sleep(25)
        await pod.source.answer(heartbeat)
        await asyncio.sleep(19.9)
        assert pod.kept == 3
        await asyncio.sleep(0.2)
        assert (pod.kept, pod.metrics.expired_leases) == (0, 1)

    run(story())


def test_a_release_frees_the_blocks_once(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        pod = Prefiller()
        release = Release(engine_id="ours", request_id="leg")
        assert await pod.source.answer(release) == Reply(valid=True)
        assert (pod.kept, pod.wakes) == (0, 1)
        assert await pod.source.answer(release) == Reply(valid=False)
        assert pod.metrics.late_notifications == 1
        await asyncio.sleep(60)
        assert pod.metrics.expired_leases == 0
        assert [record.name for record in caplog.records] == ["podsim.kv_transfer"]  # no timer has failed

    run(story())


def test_a_read_takes_the_time_of_its_bytes_and_says_whether_the_blocks_hold_the_prompt() -> None:
    async def story() -> None:
        pod = Prefiller()
        loop = asyncio.get_running_loop()
        assert await pod.source.answer(read()) == Reply(valid=True)
        assert loop.time() == 3.0  # 300 bytes at 100 bytes/s
        assert await pod.source.answer(read(blocks=(3,), first=2)) == Reply(valid=True)
        assert loop.time() == 4.0
        for wrong in (
            read(blocks=(2, 3), first=0),  # not at their places
            read(leg="unknown"),
            read(prompt=[*PROMPT[:9], 77]),
            read(prompt=[*PROMPT, 99]),  # the token that was generated has no KV yet
        ):
            assert await pod.source.answer(wrong) == Reply(valid=False)

    run(story())


def test_pods_that_do_not_fit_are_told_so() -> None:
    async def story() -> None:
        pod = Prefiller()
        assert await pod.source.answer(Hello(engine_id="ours", model="m", block_size=4)) == Reply()
        for hello, words in (
            (Hello(engine_id="theirs", model="m", block_size=4), "engine ID mismatch"),
            (Hello(engine_id="ours", model="other", block_size=4), "compatibility hash mismatch"),
            (Hello(engine_id="ours", model="m", block_size=16), "compatibility hash mismatch"),
        ):
            assert words in ((await pod.source.answer(hello)).error or "")

    run(story())
