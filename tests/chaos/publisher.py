"""A pod that can be killed: `python -m tests.chaos.publisher --http PORT --events PORT --replay PORT …`.

Its cache is an LRU of reference-counted blocks, like vLLM's pool: prompts share beginnings, blocks are stored twice
when two prompts compute them at once, the oldest are removed. What it holds is told at /held once it rests (/pause),
and is the truth that the index is compared with. One thread serves PUB and ROUTER, without a high-water mark, as in
vLLM.
"""

import argparse
import hashlib
import json
import random
import struct
import threading
import time
from collections import Counter, OrderedDict, deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import zmq

BLOCK_SIZE = 4
CACHED_BLOCKS = 400  # physical blocks of the pool
PROMPTS = 60  # different ones; each shares its first half with a few others
PROMPT_BLOCKS = 24
CLEAR_EVERY = 900  # batches, on average
END = b"\xff" * 8
IDLE_SECONDS = 10.0


class Pool:
    """Physical blocks with an engine hash each; freed oldest first."""

    def __init__(self, randomness: random.Random) -> None:
        self._random = randomness
        self._blocks: OrderedDict[int, int] = OrderedDict()  # physical block -> engine hash, oldest first
        self._next = 0
        self.held: Counter[int] = Counter()

    def step(self) -> list[dict[str, Any]]:
        """What one engine step says."""
        if self._random.random() < 1 / CLEAR_EVERY:
            self._blocks.clear()
            self.held.clear()
            return [{"type": "AllBlocksCleared"}]
        tokens = prompt(self._random.randrange(PROMPTS))
        hashes = engine_hashes(tokens)
        first = next((i for i, engine_hash in enumerate(hashes) if not self.held[engine_hash]), len(hashes))
        if self._random.random() < 0.2:
            first = min(first, len(hashes) - self._random.randrange(1, 4))  # computed again, in other physical blocks
        events = self._make_room(len(hashes) - first)
        if first < len(hashes):
            events.append(self._store(tokens, hashes, first))
        return events

    def _store(self, tokens: list[int], hashes: list[int], first: int) -> dict[str, Any]:
        for engine_hash in hashes[first:]:
            self._blocks[self._next] = engine_hash
            self._next += 1
            self.held[engine_hash] += 1
        return {
            "type": "BlockStored",
            "block_hashes": hashes[first:],
            "parent_block_hash": hashes[first - 1] if first else None,
            "token_ids": tokens[first * BLOCK_SIZE :],
            "block_size": BLOCK_SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }

    def _make_room(self, wanted: int) -> list[dict[str, Any]]:
        gone = []
        while len(self._blocks) + wanted > CACHED_BLOCKS:
            _, engine_hash = self._blocks.popitem(last=False)
            self.held[engine_hash] -= 1
            gone.append(engine_hash)
        return [{"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU", "group_idx": 0}] if gone else []


def prompt(number: int) -> list[int]:
    """Prompts of one family begin alike."""
    half = PROMPT_BLOCKS * BLOCK_SIZE // 2
    return [number // 4 + 1] * half + [1000 + number] * half


def engine_hashes(tokens: list[int]) -> list[int]:
    """Chained and content-addressed, as vLLM's are; not our own block keys."""
    hashes, parent = [], b"chaos"
    for start in range(0, len(tokens), BLOCK_SIZE):
        block = struct.pack(f"<{BLOCK_SIZE}I", *tokens[start : start + BLOCK_SIZE])
        parent = hashlib.sha256(parent + block).digest()
        hashes.append(int.from_bytes(parent[-8:], "big"))
    return hashes


class Publisher:
    """One process' stream."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._pool = Pool(random.Random(options.seed))
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=10_000)
        self._seq = 0
        self.paused = threading.Event()
        self.idle = threading.Event()  # paused, and the last batch is out
        self.started_at = time.time()

    def serve(self) -> None:
        """Publish and answer replays, for ever."""
        context = zmq.Context()
        live, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        bind(live, self._options.events)
        bind(router, self._options.replay)
        due = time.monotonic()
        while True:
            if router.poll(max(0, int((due - time.monotonic()) * 1000))):
                self._replay(router)
            if self.paused.is_set():
                self.idle.set()
                due = time.monotonic() + 0.02
            elif time.monotonic() >= due:
                self.idle.clear()
                due += 1 / self._options.rate
                self._publish(live)

    def _publish(self, live: "zmq.Socket[bytes]") -> None:
        seq, payload = self._seq.to_bytes(8, "big"), msgspec.msgpack.encode([time.time(), self._pool.step(), 0])
        live.send_multipart([b"", seq, payload])
        self._buffer.append((seq, payload))
        self._seq += 1

    def _replay(self, router: "zmq.Socket[bytes]") -> None:
        client, _, start = router.recv_multipart()
        for seq, payload in self._buffer:
            if seq >= start:
                router.send_multipart([client, b"", b"", seq, payload])
        router.send_multipart([client, b"", b"", END, b""])

    def answer(self, path: str) -> Any:
        """What its HTTP pages say."""
        if path == "/kv_event_sources":
            events, replay = (f"tcp://*:{port}" for port in (self._options.events, self._options.replay))
            return {"0": {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replay}}
        if path == "/v1/models":
            return {"data": [{"id": "chaos"}]}
        if path == "/pause":
            self.paused.set()
            if not self.idle.wait(IDLE_SECONDS):
                raise TimeoutError("the publisher does not come to rest")
            return {}
        if path == "/batches":
            return self._seq
        return {f"{key:016x}": n for key, n in self._pool.held.items() if n}


def bind(socket: "zmq.Socket[bytes]", port: int) -> None:
    """Bind, also where the process before has just died."""
    while True:
        try:
            socket.bind(f"tcp://127.0.0.1:{port}")
            return
        except zmq.ZMQError:
            time.sleep(0.01)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("http", "events", "replay", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--rate", type=float, default=100, help="batches a second")
    options = parser.parse_args()
    publisher = Publisher(options)

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                body = f"process_start_time_seconds {publisher.started_at}\n".encode()
            else:
                body = json.dumps(publisher.answer(self.path)).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *_: object) -> None:  # noqa: A002  (the base class names it so)
            """Say nothing."""

    pages = ThreadingHTTPServer(("127.0.0.1", options.http), Pages)
    threading.Thread(target=pages.serve_forever, name="pages", daemon=True).start()
    publisher.serve()


if __name__ == "__main__":
    main()
