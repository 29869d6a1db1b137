"""A pod that knows what it holds, and whose events can be lost in every way: real sockets, real HTTP pages."""

import asyncio
import random
import time
from collections import deque
from contextlib import suppress
from enum import Enum, auto
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

MODEL = "faults"
BLOCK = 4  # tokens
PROMPTS = 12
BLOCKS = 80  # of a prompt: more than the 64 that a picker has Redis report changes of
BUFFER = 10_000
STEP_SECONDS = 0.02
AWAY_SECONDS = 12.0  # that evicted blocks stay away: stored again sooner, they would hide how long they were claimed
BIND_SECONDS = 5.0
END = b"\xff" * 8


class Way(Enum):
    """What becomes of a batch."""

    SENT = auto()
    LOST = auto()  # on the way: a replay has it
    SKIPPED = auto()  # its number is used up, and nobody has it: it could not be encoded


class Replay(Enum):
    """What the replay socket does."""

    ANSWERS = auto()
    HANGS = auto()
    REFUSES = auto()


def tokens_of(prompt: int) -> list[int]:
    """Return the tokens of a prompt, whole blocks."""
    return [prompt * 10_000 + at for at in range(BLOCKS * BLOCK)]


class Pod:
    """One pod; `truth` is what it holds at this moment: prompt -> leading blocks."""

    def __init__(self, name: str, *, ports: tuple[int, int, int], has_replay: bool = True, seed: int = 0) -> None:
        self.name = name
        self.endpoint = f"127.0.0.1:{ports[0]}"
        self.truth = dict.fromkeys(range(PROMPTS), 0)
        self.way = Way.SENT
        self.replay = Replay.ANSWERS
        self.send_limit = 0  # batches that may wait for a slow consumer; 0: none is dropped
        self._ports = ports
        self._has_replay = has_replay
        self._random = random.Random(seed)
        self._context = zmq.asyncio.Context()
        self._live: zmq.asyncio.Socket | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=BUFFER)
        self._seq = 0
        self._started_at = time.time()
        self._away_until: dict[int, float] = {}  # prompt -> until when it is not stored again

    def open(self) -> None:
        """Bind the sockets."""
        self._live, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._live.sndhwm = self.send_limit
        for socket, port in ((self._live, self._ports[1]), (self._router, self._ports[2])):
            socket.linger = 0
            _bind(socket, port)

    def close(self) -> None:
        """Be gone."""
        for socket in (self._live, self._router):
            if socket is not None:
                socket.close(linger=0)
        self._live = self._router = None

    def restart(self) -> None:
        """Be another process with an empty cache, on the same addresses and without faults."""
        self.close()
        self.way, self.replay = Way.SENT, Replay.ANSWERS
        self.truth = dict.fromkeys(range(PROMPTS), 0)
        self._buffer.clear()
        self._seq = 0
        self._started_at = time.time()
        self.open()

    def refuse_replay(self) -> None:
        """Close the replay socket."""
        self.replay = Replay.REFUSES
        if self._router is not None:
            self._router.close(linger=0)

    async def work(self, seconds: float, *, pause: float = STEP_SECONDS) -> None:
        """Store and evict at the pace of an engine's steps."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await self.step()
            await asyncio.sleep(pause)

    async def step(self) -> None:
        """Make one batch: a prompt grows to its end, or loses some of its end."""
        prompt = self._random.randrange(PROMPTS)
        if time.monotonic() < self._away_until.get(prompt, 0.0):
            await self.evict(prompt, self._random.choice((0, 0, 1)))
        elif self.truth[prompt] == BLOCKS:
            self._away_until[prompt] = time.monotonic() + AWAY_SECONDS
            await self.evict(prompt, self._random.choice((1, 4, 16, BLOCKS)))
        else:
            await self._fill(prompt)

    async def fill(self) -> None:
        """Hold all prompts."""
        for prompt in self.truth:
            await self._fill(prompt)

    async def _fill(self, prompt: int) -> None:
        held = self.truth[prompt]
        if held < BLOCKS:
            self.truth[prompt] = BLOCKS
            await self._publish(_stored(prompt, held))

    async def clear(self) -> None:
        """Drop all."""
        self.truth = dict.fromkeys(range(PROMPTS), 0)
        await self._publish({"type": "AllBlocksCleared"})

    async def evict(self, prompt: int, count: int) -> None:
        """Drop so many blocks from a prompt's end."""
        held = self.truth[prompt]
        self.truth[prompt] = max(held - count, 0)
        hashes = [_hash(prompt, at) for at in range(self.truth[prompt], held)]
        await self._publish({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0})

    async def chatter(self, batches: int, *, bytes_each: int) -> None:
        """Publish so many batches at once that change nothing but have a size."""
        ballast = [{"type": "Chatter", "text": "x" * bytes_each}]
        for number in range(batches):
            await self._publish(*ballast)
            if number % 100 == 99:
                await asyncio.sleep(0)

    async def _publish(self, *events: dict[str, Any]) -> None:
        seq, payload = self._seq, msgspec.msgpack.encode([time.time(), list(events), 0])
        self._seq += 1
        if self.way is not Way.SKIPPED:
            self._buffer.append((seq, payload))
        if self.way is Way.SENT and self._live is not None:
            await self._live.send_multipart([b"", seq.to_bytes(8, "big"), payload])

    async def serve_replay(self) -> None:
        """Answer replay requests as vLLM does."""
        while True:
            router = self._router
            if router is None or self.replay is not Replay.ANSWERS:
                await asyncio.sleep(0.01)
                continue
            with suppress(zmq.ZMQError):
                if not int(router.get(zmq.EVENTS)) & zmq.POLLIN:  # no wait that the end of the socket would cancel
                    await asyncio.sleep(0.005)
                    continue
                client, _, start = await router.recv_multipart()
                for seq, payload in [each for each in self._buffer if each[0] >= int.from_bytes(start, "big")]:
                    await router.send_multipart([client, b"", b"", seq.to_bytes(8, "big"), payload])
                await router.send_multipart([client, b"", b"", END, b""])

    def application(self) -> web.Application:
        """Return its HTTP pages."""
        source: dict[str, Any] = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://*:{self._ports[1]}",
            "replay_endpoint": f"tcp://*:{self._ports[2]}" if self._has_replay else None,
        }

        async def answer(request: web.Request) -> web.Response:
            if request.path == "/metrics":
                return web.Response(text=f"process_start_time_seconds {self._started_at}\n")
            if request.path == "/kv_event_sources":
                return web.json_response({"0": source})
            return web.json_response({"data": [{"id": MODEL}]})

        pages = web.Application()
        pages.router.add_get("/{path:.*}", answer)
        return pages


def _hash(prompt: int, at: int) -> int:
    return prompt * 1000 + at + 1


def _stored(prompt: int, held: int) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [_hash(prompt, at) for at in range(held, BLOCKS)],
        "parent_block_hash": _hash(prompt, held - 1) if held else None,
        "token_ids": tokens_of(prompt)[held * BLOCK :],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def _bind(socket: zmq.asyncio.Socket, port: int) -> None:
    """Bind, also where the socket before has just been closed."""
    deadline = time.monotonic() + BIND_SECONDS
    while True:
        try:
            socket.bind(f"tcp://127.0.0.1:{port}")
            return
        except zmq.ZMQError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
