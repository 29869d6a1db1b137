"""The ZMQ adapters against real sockets: holes, silence, end markers, lost connections, malformed messages."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zmq
import zmq.asyncio

from kv_indexer.events.sequence import Frame, History, ReplayAnswer
from kv_indexer.events.zmq_sockets import ZmqLiveEvents, ZmqReplaySource, limits
from kvmesh.errors import FeedLostError
from tests.integration.kv_publisher import ScriptedPod, running_pod
from tests.integration.kv_redis import free_port
from tests.unit.kv_indexer_follow.kv_fakes import stored

RANKS = 128


@pytest.fixture
async def pod() -> AsyncIterator[ScriptedPod]:
    async with running_pod() as pod:
        yield pod


@pytest.fixture
def context() -> Any:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


class Malformed:
    """Counts what could not be read."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def address(pod: ScriptedPod, which: str) -> str:
    found: str = pod.config()["0"][which]
    return found.replace("*", "127.0.0.1")


def replay_source(context: Any, pod: ScriptedPod) -> ZmqReplaySource:
    return ZmqReplaySource(
        context=context,
        address=address(pod, "replay_endpoint"),
        on_malformed=Malformed(),
        first_answer_seconds=1.0,
        silence_seconds=0.1,
    )


def batch(pod: ScriptedPod, *numbers: int) -> tuple[Frame, ...]:
    return tuple(Frame(seq=number, payload=pod.buffer[number][1]) for number in numbers)


@pytest.mark.parametrize("with_topic", [True, False])
async def test_a_replay_gives_everything_from_its_start_to_the_end(
    pod: ScriptedPod, context: Any, with_topic: bool
) -> None:
    pod.replies_with_topic = with_topic
    for number in range(5):
        await pod.publish(stored(number + 1))

    assert await replay_source(context, pod).replay(2) == ReplayAnswer(frames=batch(pod, 2, 3, 4), ended=True)
    assert await replay_source(context, pod).replay(5) == ReplayAnswer(frames=(), ended=True)


async def test_a_replay_asks_again_for_what_was_dropped_and_keeps_the_rest(pod: ScriptedPod, context: Any) -> None:
    for number in range(6):
        await pod.publish(stored(number + 1))
    pod.lost_replies = {2, 4}

    assert await replay_source(context, pod).replay(0) == ReplayAnswer(frames=batch(pod, *range(6)), ended=True)
    assert pod.requests == [0, 2]


async def test_a_replay_is_cut_at_a_hole_that_nothing_fills(pod: ScriptedPod, context: Any) -> None:
    for number in range(6):
        await pod.publish(stored(number + 1))
    pod.lost_for_good = {2, 4}

    assert await replay_source(context, pod).replay(0) == ReplayAnswer(
        frames=batch(pod, 0, 1), ended=False, next_seq=3, whole_from=5
    )
    assert pod.requests == [0, 2, 2]
    pod.lost_for_good = {0, 1}
    assert await replay_source(context, pod).replay(0) == ReplayAnswer(frames=(), ended=False, next_seq=2, whole_from=2)


async def test_a_router_that_drops_a_third_of_everything_is_drained_in_a_few_rounds(
    pod: ScriptedPod, context: Any
) -> None:
    pod.buffer = [(number, bytes(100)) for number in range(3000)]
    pod.drop_share = 0.35
    source, got, ended = replay_source(context, pod), 0, False
    while not ended:
        answer = await source.replay(got)
        got, ended = got + len(answer.frames), answer.ended
        assert len(pod.requests) < 60

    assert got == 3000


async def test_a_slow_publisher_is_waited_for_and_not_asked_ever_more_often(pod: ScriptedPod, context: Any) -> None:
    for number in range(8):
        await pod.publish(stored(number + 1))
    pod.answer_seconds = 0.15  # a message; longer than the usual silence
    source, got, ended = replay_source(context, pod), 0, False
    while not ended:
        answer = await source.replay(got)
        got, ended = got + len(answer.frames), answer.ended

    assert (got, len(pod.requests) <= 4) == (8, True)


async def test_a_replay_of_nothing_but_old_numbers_ends_by_itself(context: Any) -> None:
    router = zmq.asyncio.Context().socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")

    async def repeat_for_ever() -> None:
        client, _, _ = await router.recv_multipart()
        while True:
            await router.send_multipart([client, b"", b"", (3).to_bytes(8, "big"), b"x"])
            await asyncio.sleep(0)  # a send that need not wait gives nobody a turn

    task = asyncio.create_task(repeat_for_ever(), name="liar")
    source = ZmqReplaySource(
        context=context, address=f"tcp://127.0.0.1:{port}", on_malformed=Malformed(), first_answer_seconds=0.2
    )
    async with asyncio.timeout(10):
        assert await source.replay(9) == ReplayAnswer(frames=(), ended=False)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    router.close(linger=0)


def test_two_different_batches_under_one_number_are_another_process_and_nothing_is_believed() -> None:
    history = History(0)
    for frame in (Frame(seq=0, payload=b"a"), Frame(seq=2, payload=b"c"), Frame(seq=2, payload=b"C")):
        history.add(frame)

    assert history.answer() == ReplayAnswer(frames=(), ended=False)


def test_a_history_ends_with_its_last_hole() -> None:
    history = History(5)
    assert [history.add(Frame(seq=seq, payload=b"")) for seq in (4, 5, 7, 9, 10, 7)] == [
        False,
        True,
        True,
        True,
        True,
        False,
    ]
    assert (history.next_seq, history.last_hole(), history.is_complete) == (6, None, False)
    history.ended = True
    assert (history.last_hole(), history.answer().next_seq) == (8, 7)


async def test_an_end_that_was_lost_is_asked_for_again(pod: ScriptedPod, context: Any) -> None:
    await pod.publish(stored(1))
    pod.loses_end = True

    assert await replay_source(context, pod).replay(0) == ReplayAnswer(frames=batch(pod, 0), ended=True)
    assert pod.requests == [0, 1]


async def test_a_replay_socket_that_is_not_there_gives_nothing(context: Any) -> None:
    nowhere = f"tcp://127.0.0.1:{free_port()}"
    source = ZmqReplaySource(context=context, address=nowhere, on_malformed=Malformed(), first_answer_seconds=0.1)

    assert await source.replay(0) == ReplayAnswer(frames=(), ended=False)


async def test_ten_thousand_large_batches_arrive_however_much_the_router_drops(pod: ScriptedPod, context: Any) -> None:
    pod.buffer = [(number, bytes(4000)) for number in range(10_000)]
    source = replay_source(context, pod)
    got, attempts = 0, 0
    while True:
        answer = await source.replay(got)
        attempts += 1
        assert [frame.seq for frame in answer.frames] == list(range(got, got + len(answer.frames)))
        got += len(answer.frames)
        if answer.ended:
            break
        assert attempts < 40

    assert got == 10_000


async def test_live_batches_are_received_and_malformed_messages_counted(context: Any) -> None:
    publisher = zmq.asyncio.Context().socket(zmq.XPUB)
    publisher.linger = 0
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    malformed = Malformed()
    live = ZmqLiveEvents(context=context, address=f"tcp://127.0.0.1:{port}", on_malformed=malformed)
    await live.connect()
    assert await asyncio.wait_for(publisher.recv(), 5) == b"\x01"  # the subscription to everything

    one = (1).to_bytes(8, "big")
    for parts in ([b"", one, b"x"], [b"", b"\0\0\1", b"x"], [one, b"x"], [b"t", one, b"y"]):
        await publisher.send_multipart(parts)
    frames: list[Frame] = []
    async with asyncio.timeout(5):
        while len(frames) < 2:
            frames += await live.receive(timeout_seconds=0.5)

    assert (frames, malformed.count) == ([Frame(seq=1, payload=b"x"), Frame(seq=1, payload=b"y")], 2)
    live.close()
    publisher.close(linger=0)


async def test_what_waits_unread_is_bounded_in_bytes_and_later_batches_still_come(context: Any) -> None:
    publisher = zmq.asyncio.Context().socket(zmq.XPUB)
    publisher.linger, publisher.sndhwm = 0, 0
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    malformed = Malformed()
    address = f"tcp://127.0.0.1:{port}"
    live = ZmqLiveEvents(context=context, address=address, on_malformed=malformed, ranks=RANKS)
    await live.connect()
    assert await asyncio.wait_for(publisher.recv(), 5) == b"\x01"
    _, queue_bytes = limits(RANKS)
    part = bytes(queue_bytes // 8)

    for seq in range(40):
        await publisher.send_multipart([b"", seq.to_bytes(8, "big"), part])
    await publisher.send_multipart([b"no batch"])
    async with asyncio.timeout(10):
        while malformed.count == 0:  # all has been taken from the socket, though nobody has received
            await asyncio.sleep(0.01)
    frames: list[Frame] = []
    while more := await live.receive(timeout_seconds=0.0):
        frames += more
    assert [frame.seq for frame in frames] == list(range(8))  # the oldest; then there is a gap

    await publisher.send_multipart([b"", (40).to_bytes(8, "big"), b"x"])
    async with asyncio.timeout(10):
        while not (more := await live.receive(timeout_seconds=0.5)):
            pass
    assert more == [Frame(seq=40, payload=b"x")]
    live.close()
    publisher.close(linger=0)


def test_ranks_of_a_pod_share_what_it_may_send() -> None:
    (message, queue), (each_message, each_queue) = limits(1), limits(RANKS)
    assert (each_message < message, each_queue * RANKS <= 8 * queue) == (True, True)
    assert each_message >= 5 << 20  # a step that fills a cache of a million tokens


async def test_a_publisher_that_goes_away_is_noticed(pod: ScriptedPod, context: Any) -> None:
    live = ZmqLiveEvents(context=context, address=address(pod, "endpoint"), on_malformed=Malformed())
    await live.connect()
    assert await live.receive(timeout_seconds=0.01) == []
    pod.close()

    with pytest.raises(FeedLostError, match="closed by the pod"):
        async with asyncio.timeout(5):
            while True:
                await live.receive(timeout_seconds=1.0)
    live.close()


async def test_a_flood_of_malformed_messages_is_no_silence_and_no_batch(context: Any) -> None:
    publisher = zmq.asyncio.Context().socket(zmq.XPUB)
    publisher.linger = 0
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    live = ZmqLiveEvents(context=context, address=f"tcp://127.0.0.1:{port}", on_malformed=Malformed())
    await live.connect()
    assert await asyncio.wait_for(publisher.recv(), 5) == b"\x01"

    async def flood() -> None:
        while True:
            await publisher.send_multipart([b"no batch"])
            await asyncio.sleep(0)

    task = asyncio.create_task(flood(), name="flood")
    started = asyncio.get_running_loop().time()
    assert await live.receive(timeout_seconds=0.2) == []
    assert asyncio.get_running_loop().time() - started >= 0.19  # whoever asks often must be told "nothing" rarely
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    live.close()
    publisher.close(linger=0)


async def test_a_lost_connection_is_seen_by_a_look_without_reading(pod: ScriptedPod, context: Any) -> None:
    live = ZmqLiveEvents(context=context, address=address(pod, "endpoint"), on_malformed=Malformed())
    await live.connect()
    live.check()
    pod.close()

    with pytest.raises(FeedLostError):
        async with asyncio.timeout(5):
            while True:
                live.check()
                await asyncio.sleep(0)
    live.close()


async def test_a_publisher_that_is_not_there_is_an_error_in_bounded_time(context: Any) -> None:
    for nowhere in (f"tcp://127.0.0.1:{free_port()}", "tcp://no-such-host.invalid:1", "nonsense"):
        live = ZmqLiveEvents(context=context, address=nowhere, on_malformed=Malformed(), connect_timeout_seconds=0.5)
        with pytest.raises(FeedLostError):
            async with asyncio.timeout(5):
                await live.connect()
        live.close()


async def test_a_wait_for_batches_ends_at_once_when_it_is_interrupted(pod: ScriptedPod, context: Any) -> None:
    events = ZmqLiveEvents(context=context, address=address(pod, "endpoint"), on_malformed=Malformed())
    await events.connect()
    waiting = asyncio.create_task(events.receive(timeout_seconds=60.0))
    await asyncio.sleep(0)
    events.interrupt()
    async with asyncio.timeout(5):
        assert await waiting == []
    events.close()
