"""A pod that says what an attack wants: its pages, and one KV event stream a data-parallel rank, with replay."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from tests.attack.target import Target

END = b"\xff" * 8
BUFFER_STEPS = 64  # batches that a replay gives again
MASK = (1 << 64) - 1
RANKS = 2  # of two, each may send messages of 16 MB
BLOCK = 16  # tokens, as the innocent pods have


def engine_hash(number: int) -> int:
    """Return one of many hashes."""
    return (number + 1) * 0x9E3779B97F4A7C15 & MASK


def stored(first: int, count: int, *, parent: int | None = None, **more: Any) -> dict[str, Any]:
    """Return a store of blocks `first` and the ones after it."""
    return {
        "type": "BlockStored",
        "block_hashes": [engine_hash(first + i) for i in range(count)],
        "parent_block_hash": parent,
        "token_ids": [(first + i) % 30_000 for i in range(count * BLOCK)],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        **more,
    }


def removed(first: int, count: int) -> dict[str, Any]:
    """Return a removal of blocks `first` and the ones after it."""
    hashes = [engine_hash(first + i) for i in range(count)]
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}


CLEARED = {"type": "AllBlocksCleared"}


class HostilePod:
    """One pod; each rank is an own sequence of batches."""

    def __init__(self, *, first_port: int) -> None:
        self._context = zmq.asyncio.Context()
        self._live = [self._context.socket(zmq.XPUB) for _ in range(RANKS)]
        self._routers = [self._context.socket(zmq.ROUTER) for _ in range(RANKS)]
        self._buffers: list[list[tuple[int, bytes]]] = [[] for _ in range(RANKS)]
        self._seqs = [0] * RANKS
        self.answers_replay = True
        self._ports: list[tuple[int, int]] = []
        for rank, (live, router) in enumerate(zip(self._live, self._routers, strict=True)):
            live.sndhwm = 16
            live.linger = router.linger = 0
            pair = first_port + 2 * rank, first_port + 2 * rank + 1
            live.bind(f"tcp://127.0.0.1:{pair[0]}")
            router.bind(f"tcp://127.0.0.1:{pair[1]}")
            self._ports.append(pair)

    async def subscribed(self, ranks: int) -> None:
        """Return when an indexer listens to so many ranks."""
        for live in self._live[:ranks]:
            await live.recv()

    async def publish(self, events: Sequence[Mapping[str, Any]], *, rank: int = 0) -> None:
        """Publish one batch."""
        await self.publish_raw(msgspec.msgpack.encode([time.time(), events, rank]), rank=rank)

    async def publish_raw(self, payload: bytes, *, rank: int = 0) -> None:
        """Publish what may be a batch."""
        seq = self._seqs[rank]
        self._seqs[rank] += 1
        self._buffers[rank].append((seq, payload))
        del self._buffers[rank][:-BUFFER_STEPS]
        await self._live[rank].send_multipart([b"", seq.to_bytes(8, "big"), payload])

    def skip(self, *, rank: int = 0) -> None:
        """Use a number up for nothing, as vLLM does for a batch that it cannot encode."""
        self._seqs[rank] += 1

    async def serve_replay(self, rank: int) -> None:
        """Answer replay requests for ever."""
        router = self._routers[rank]
        while True:
            client, _, start = await router.recv_multipart()
            if not self.answers_replay:
                continue
            for seq, payload in self._buffers[rank]:
                if seq >= int.from_bytes(start, "big"):
                    await router.send_multipart([client, b"", b"", seq.to_bytes(8, "big"), payload])
            await router.send_multipart([client, b"", b"", END, b""])

    def pages(self) -> web.Application:
        """Return what it answers over HTTP."""
        sources = {
            str(rank): {
                "endpoint": f"tcp://127.0.0.1:{events}",
                "replay_endpoint": f"tcp://127.0.0.1:{replay}",
                "enable_kv_cache_events": True,
                "publisher": "zmq",
            }
            for rank, (events, replay) in enumerate(self._ports)
        }

        async def kv_event_sources(_: web.Request) -> web.Response:
            return web.json_response(sources)

        async def models(_: web.Request) -> web.Response:
            return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

        pages = web.Application()
        pages.add_routes([web.get("/kv_event_sources", kv_event_sources), web.get("/v1/models", models)])
        return pages


@asynccontextmanager
async def hostile_pod(target: Target, *, ranks: int = 1) -> AsyncIterator[HostilePod]:
    """Open a pod where the mesh looks for one; it is ready once an indexer follows the `ranks` that are used."""
    host, port = target.hostile_address()
    # ranks and ports are the same for each attack, so that an indexer need not ask for them first; below free ports
    pod = HostilePod(first_port=2000 + port % 100 * 80)
    runner = web.AppRunner(pod.pages(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    replays = [asyncio.create_task(pod.serve_replay(rank)) for rank in range(RANKS)]
    try:
        await pod.subscribed(ranks)
        target.begin()
        yield pod
    finally:
        for task in replays:
            task.cancel()
        await runner.cleanup()
