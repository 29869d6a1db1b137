"""Sends a pod's KV events: a ZMQ PUB socket and the replay ROUTER, like vLLM's ZmqEventPublisher.

The pod publishes one batch per engine step; `serve_replay` runs as a task at the same time.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from podsim.core.events import CacheEvent
from podsim.errors import PortInUseError
from podsim.wire.kv_events import EventGeneration, encode_batch

log = logging.getLogger(__name__)

_END_OF_REPLAY = b"\xff" * 8
_LIVE_HIGH_WATER_MARK = 100_000  # batches; vLLM's default. The ROUTER keeps ZMQ's 1000, as in vLLM
_MAX_QUEUE = 100_000
_BATCHES_BETWEEN_PAUSES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSettings:
    """Where and how to publish events."""

    host: str
    port: int = 0  # 0: the OS chooses it; otherwise replay uses the next port
    topic: str = ""
    generation: EventGeneration = EventGeneration.G5
    buffer_steps: int = 10_000  # batches kept for replay


class EventPublisher:
    """Live events and replay of one pod. Close it to free its ports."""

    def __init__(self, context: zmq.asyncio.Context, settings: PublisherSettings, *, advertised_host: str) -> None:
        self._settings = settings
        self._topic = settings.topic.encode()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=settings.buffer_steps)
        self._next_sequence = 0
        self._live: zmq.Socket[bytes] = zmq.Context(context).socket(zmq.PUB)  # the plain kind, whose send cannot block
        self._live.set_hwm(_LIVE_HIGH_WATER_MARK)
        self._replay = context.socket(zmq.ROUTER)
        replay_port = settings.port + 1 if settings.port else 0
        try:
            self.events_endpoint = _bind(self._live, settings.host, settings.port, advertised_host)
            self.replay_endpoint = _bind(self._replay, settings.host, replay_port, advertised_host)
        except PortInUseError:
            self.close()
            raise

    def publish(self, events: Sequence[CacheEvent], *, timestamp: float) -> None:
        """Send one engine step's events; `timestamp` is unix seconds."""
        payload = encode_batch(events, generation=self._settings.generation, timestamp=timestamp)
        sequence = self._next_sequence
        self._next_sequence += 1
        self._live.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))
        self._buffer.append((sequence, payload))

    async def serve_replay(self) -> None:
        """Answer replay requests until cancelled."""
        while True:
            await self._answer(await self._replay.recv_multipart())

    def config(self) -> dict[str, Any]:
        """Return vLLM's KVEventsConfig with the addresses in use."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events_endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": self._settings.buffer_steps,
            "hwm": _LIVE_HIGH_WATER_MARK,
            "max_queue_size": _MAX_QUEUE,
            "topic": self._settings.topic,
        }

    def close(self) -> None:
        """Close both sockets at once and drop any unsent messages."""
        self._live.close(linger=0)
        self._replay.close(linger=0)

    async def _answer(self, request: list[bytes]) -> None:
        if len(request) != 3:
            log.warning("ignored a replay request of %d frames", len(request))
            return
        client, _, start_bytes = request
        start = int.from_bytes(start_bytes, "big")
        prefix = [client, b"", self._topic] if self._settings.generation.replay_has_topic else [client, b""]
        for count, (sequence, payload) in enumerate(tuple(self._buffer), start=1):
            if sequence >= start:
                # like vLLM's, this ROUTER silently drops messages when a slow peer's queue is full
                await self._replay.send_multipart([*prefix, sequence.to_bytes(8, "big"), payload])
            if count % _BATCHES_BETWEEN_PAUSES == 0:
                await asyncio.sleep(0)
        end_prefix = [client, b"", b""] if self._settings.generation.replay_has_topic else [client, b""]
        await self._replay.send_multipart([*end_prefix, _END_OF_REPLAY, b""])


def _bind(socket: Any, host: str, port: int, advertised_host: str) -> str:
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(f"tcp://{_bracketed(host)}:{port}")
    except zmq.ZMQError as error:
        raise PortInUseError(f"cannot bind {host}:{port} for KV events: {os.strerror(error.errno or 0)}") from error
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return f"tcp://{_bracketed(advertised_host)}:{bound.rpartition(':')[2]}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
