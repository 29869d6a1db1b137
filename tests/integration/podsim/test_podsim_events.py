"""Live KV events and replay over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from podsim.core.scheduler import EngineSettings
from podsim.model_folder import TINY_MODEL, load_model_folder
from podsim.pod import PodSettings
from podsim.publisher import PublisherSettings
from podsim.server import RunningPod, running_pods
from podsim.wire.kv_events import EventGeneration

FOLDER = load_model_folder(TINY_MODEL)
SETTINGS = PodSettings(
    max_model_len=1024,
    engine=EngineSettings(total_blocks=80, prefill_tokens_per_second=1e6, inter_token_seconds=0.001),
)
DEADLINE_SECONDS = 10.0
END = b"\xff" * 8


@asynccontextmanager
async def one_pod(
    *, generation: EventGeneration = EventGeneration.G5, buffer_steps: int = 100, topic: str = ""
) -> AsyncIterator[tuple[RunningPod, aiohttp.ClientSession, zmq.asyncio.Context]]:
    publisher = PublisherSettings(host="127.0.0.1", generation=generation, buffer_steps=buffer_steps, topic=topic)
    context = zmq.asyncio.Context()
    async with running_pods(SETTINGS, folder=FOLDER, publisher=publisher) as [pod]:
        timeout = aiohttp.ClientTimeout(total=DEADLINE_SECONDS)
        async with aiohttp.ClientSession(pod.base_url, timeout=timeout) as session:
            try:
                yield pod, session, context
            finally:
                context.destroy(linger=0)


async def complete(session: aiohttp.ClientSession, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 1, **fields}
    async with session.post("/v1/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def subscribe(context: zmq.asyncio.Context, pod: RunningPod, session: aiohttp.ClientSession) -> Any:
    """A SUB socket that is known to be connected: it has seen a batch."""
    socket = context.socket(zmq.SUB)
    socket.connect(pod.events_endpoint)
    socket.subscribe(b"")
    async with asyncio.timeout(DEADLINE_SECONDS):
        for attempt in range(1000):
            await complete(session, [3000 + attempt] * 16)
            if await socket.poll(50):
                await socket.recv_multipart()
                return socket
    raise AssertionError("no event arrived")


async def receive(socket: Any) -> list[bytes]:
    async with asyncio.timeout(DEADLINE_SECONDS):
        frames: list[bytes] = await socket.recv_multipart()
        return frames


async def replay(context: zmq.asyncio.Context, pod: RunningPod, start: int) -> list[list[bytes]]:
    """All frames of a replay, the end marker included."""
    socket = context.socket(zmq.DEALER)
    socket.connect(pod.replay_endpoint)
    await socket.send_multipart([b"", start.to_bytes(8, "big")])
    replies = [await receive(socket)]
    while replies[-1][-2] != END:
        replies.append(await receive(socket))
    socket.close(linger=0)
    return replies


async def test_a_completed_prompt_is_published_with_its_tokens_in_the_order_of_steps() -> None:
    async with one_pod(topic="kv@pod@tiny") as (pod, session, context):
        socket = await subscribe(context, pod, session)
        await complete(session, list(range(40)))
        await complete(session, list(range(40, 57)))
        first, second = await receive(socket), await receive(socket)
        assert (first[0], second[0]) == (b"kv@pod@tiny", b"kv@pod@tiny")
        assert int.from_bytes(second[1], "big") == int.from_bytes(first[1], "big") + 1
        timestamp, events, rank = msgspec.msgpack.decode(first[2])
        assert (timestamp > 1e9, rank, len(events)) == (True, 0, 1)
        assert {key: events[0][key] for key in ("type", "token_ids", "parent_block_hash", "block_size")} == {
            "type": "BlockStored",
            "token_ids": list(range(32)),
            "parent_block_hash": None,
            "block_size": 16,
        }


async def test_a_reset_is_published_with_the_next_step_only() -> None:
    async with one_pod() as (pod, session, context):
        socket = await subscribe(context, pod, session)
        async with session.post("/reset_prefix_cache") as response:
            assert await response.json() == {"success": True}
        assert not await socket.poll(50)
        answer = await complete(session, [1, 2, 3])
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        [event] = msgspec.msgpack.decode((await receive(socket))[2])[1]
        assert event == {"type": "AllBlocksCleared"}


async def test_replay_streams_the_buffered_batches_from_the_wanted_one_and_ends() -> None:
    async with one_pod(topic="t", buffer_steps=3) as (pod, session, context):
        for number in range(5):
            await complete(session, [number] * 16)
        replies = await replay(context, pod, 0)
        assert [reply[:-1] for reply in replies] == [
            [b"", b"t", (2).to_bytes(8, "big")],
            [b"", b"t", (3).to_bytes(8, "big")],
            [b"", b"t", (4).to_bytes(8, "big")],
            [b"", b"", END],
        ]
        assert msgspec.msgpack.decode(replies[0][-1])[1][0]["token_ids"] == [2] * 16
        assert [reply[-2] for reply in await replay(context, pod, 4)] == [(4).to_bytes(8, "big"), END]
        assert [reply[-2] for reply in await replay(context, pod, 99)] == [END]


async def test_older_generations_replay_without_a_topic_frame() -> None:
    async with one_pod(generation=EventGeneration.G4B, topic="t") as (pod, session, context):
        await complete(session, [7] * 16)
        assert [reply[:-1] for reply in await replay(context, pod, 0)] == [[b"", bytes(8)], [b"", END]]


async def test_a_malformed_replay_request_is_ignored_and_the_next_one_is_served() -> None:
    async with one_pod() as (pod, _, context):
        socket = context.socket(zmq.DEALER)
        socket.connect(pod.replay_endpoint)
        await socket.send_multipart([b"just one frame"])
        await socket.send_multipart([b"", b"more", b"frames"])
        socket.close(linger=1000)
        assert await replay(context, pod, 0) == [[b"", b"", END, b""]]


@pytest.mark.parametrize("generation", list(EventGeneration))
async def test_every_generation_can_be_published(generation: EventGeneration) -> None:
    async with one_pod(generation=generation) as (pod, session, context):
        socket = await subscribe(context, pod, session)
        await complete(session, list(range(32)))
        [event] = msgspec.msgpack.decode((await receive(socket))[2])[1]
        assert isinstance(event, dict) == (generation is EventGeneration.G5)
        assert (event["type"] if isinstance(event, dict) else event[0]) == "BlockStored"


async def test_the_event_sources_tell_vllms_configuration_with_the_bound_addresses() -> None:
    async with one_pod(topic="t") as (pod, session, _), session.get("/kv_event_sources") as response:
        assert await response.json() == {
            "0": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": pod.events_endpoint,
                "replay_endpoint": pod.replay_endpoint,
                "buffer_steps": 100,
                "hwm": 100_000,
                "max_queue_size": 100_000,
                "topic": "t",
            }
        }
