"""A scripted vLLM pod: its HTTP answers, a real PUB socket, a real replay ROUTER with every fault on demand."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import zmq
import zmq.asyncio
from aiohttp import web

from tests.integration.kv_redis import free_port
from tests.unit.kv_indexer_follow.kv_fakes import payload

BIND_DEADLINE_SECONDS = 5.0
MOST_ADDRESSES = 20
END = b"\xff" * 8


class ScriptedPod:
    """One pod; `restart` makes it another process on the same addresses."""

    def __init__(self, *, replies_with_topic: bool = True, has_replay: bool = True, publishes: bool = True) -> None:
        self.replies_with_topic = replies_with_topic
        self.has_replay = has_replay
        self.publishes = publishes
        self.buffer: list[tuple[int, bytes]] = []
        self.buffer_steps = 10_000
        self.requests: list[int] = []
        self.lost_replies: set[int] = set()  # batches that the next replay drops
        self.lost_for_good: set[int] = set()  # batches that every replay drops, as if they could not be encoded
        self.drop_share = 0.0  # of all replay messages, end markers included
        self.loses_end = False  # the next replay has no end marker
        self.answers_replay = True
        self.answer_seconds = 0.0  # before each message of a replay
        self.models = ["tiny"]
        self.endpoint = ""  # HOST:PORT of the API, once it is open
        self.started_at: float | None = 1000.0  # as /metrics say; None: they do not
        self.metrics_delay_seconds = 0.0
        self.random = random.Random(7)
        self._seq = 0
        self._ts = 1000.0
        self._context = zmq.asyncio.Context()
        self._live: zmq.asyncio.Socket | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._live_address = self._replay_address = ""

    async def publish(self, *events: Mapping[str, Any], lost: bool = False, copies: int = 1) -> None:
        """Publish one batch; a lost one is only in the replay buffer."""
        self._ts += 1.0
        data = payload(*events, ts=self._ts)
        for _ in range(0 if lost else copies):
            await self.say(self._seq, data)
        self.buffer.append((self._seq, data))
        del self.buffer[: -self.buffer_steps]
        self._seq += 1

    async def say(self, seq: int, data: bytes) -> None:
        """Publish anything under any number, and keep nothing of it."""
        assert self._live is not None
        await self._live.send_multipart([b"kv@pod", seq.to_bytes(8, "big"), data])

    def open(self, *, patience_seconds: float = BIND_DEADLINE_SECONDS) -> None:
        """Bind the sockets, on the addresses of before."""
        self._live, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        for socket in (self._live, self._router):
            socket.linger = 0
        bind(self._live, self._live_address, patience_seconds=patience_seconds)
        bind(self._router, self._replay_address, patience_seconds=patience_seconds)

    def open_elsewhere(self) -> None:
        """Bind the sockets on new addresses: another process may take a free port before we do."""
        for _ in range(MOST_ADDRESSES):
            # not ports of the kernel's choice: while this pod is gone, an outgoing connection could take one of those
            self._live_address, self._replay_address = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
            try:
                self.open(patience_seconds=0.0)
            except zmq.ZMQError:
                self.close()
            else:
                return
        raise OSError("all ports are taken before they can be bound")

    def close(self) -> None:
        """Be gone."""
        for socket in (self._live, self._router):
            if socket is not None:
                socket.close(linger=0)
        self._live = self._router = None

    def restart(self, *, seconds_back: float = 0.0) -> None:
        """Come back as a new process with an empty cache, perhaps with a clock that was set back."""
        self._end_process(seconds_back)
        self.open()

    def forget_quietly(self) -> None:
        """Be another process while the connections stand, as behind a proxy."""
        self.buffer, self._seq = [], 0

    def move(self) -> None:
        """Come back elsewhere, as another process; /kv_event_sources says where."""
        self._end_process()
        self.open_elsewhere()

    def _end_process(self, seconds_back: float = 0.0) -> None:
        self.close()
        self.buffer, self._seq = [], 0
        self._ts -= seconds_back
        if self.started_at is not None:
            self.started_at += 100.0

    def config(self) -> dict[str, Any]:
        """The answer of GET /kv_event_sources; the host is a wildcard, as vLLM's default is."""
        replay = self._replay_address.replace("127.0.0.1", "*")
        events = self._live_address.replace("127.0.0.1", "*")
        source = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events, "buffer_steps": 10_000}
        return {"0": {**source, "replay_endpoint": replay if self.has_replay else None}} if self.publishes else {}

    def metrics(self) -> str:
        """The answer of GET /metrics, as far as it matters here."""
        lines = ["# TYPE process_start_time_seconds gauge", "process_resident_memory_bytes 1.0e+09"]
        if self.started_at is not None:
            lines.append(f"process_start_time_seconds {self.started_at!r}")
        return "\n".join([*lines, 'vllm:num_requests_running{model_name="tiny"} 0.0', ""])

    async def serve_replay(self) -> None:
        """Answer replay requests as vLLM does, faults included."""
        while True:
            try:
                assert self._router is not None
                client, _, start = await self._router.recv_multipart()
                self.requests.append(int.from_bytes(start, "big"))
                await self._answer(client, int.from_bytes(start, "big"))
            except (asyncio.CancelledError, zmq.ZMQError):
                # closing a socket cancels who waits for it; a restart has opened another one by now
                current = asyncio.current_task()
                if current is None or current.cancelling():
                    raise

    async def _answer(self, client: bytes, start: int) -> None:
        if not self.answers_replay:
            return
        lost, self.lost_replies = self.lost_replies | self.lost_for_good, set()
        router = self._router
        for seq, data in list(self.buffer):
            if seq >= start and seq not in lost:
                topic = [b"kv@pod"] if self.replies_with_topic else []
                await self._reply(router, [client, b"", *topic, seq.to_bytes(8, "big"), data])
        if self.loses_end:
            self.loses_end = False
            return
        topic = [b""] if self.replies_with_topic else []
        await self._reply(router, [client, b"", *topic, END, b""])

    async def _reply(self, router: zmq.asyncio.Socket | None, parts: list[bytes]) -> None:
        if self.answer_seconds:
            await asyncio.sleep(self.answer_seconds)
        if self.random.random() >= self.drop_share:
            assert router is not None
            await router.send_multipart(parts)

    def destroy(self) -> None:
        """Free everything."""
        self.close()
        self._context.destroy(linger=0)


def bind(socket: zmq.asyncio.Socket, address: str, *, patience_seconds: float = BIND_DEADLINE_SECONDS) -> None:
    """Bind; the port of a socket just closed is given back by a thread of libzmq, a moment later."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(0.001)
        else:
            return


@asynccontextmanager
async def running_pod(**options: Any) -> AsyncIterator[ScriptedPod]:
    """A pod whose sockets and HTTP server are open."""
    pod = ScriptedPod(**options)
    pod.open_elsewhere()

    async def sources(_: web.Request) -> web.Response:
        return web.json_response(pod.config())

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name} for name in pod.models]})

    async def metrics(_: web.Request) -> web.Response:
        await asyncio.sleep(pod.metrics_delay_seconds)
        return web.Response(text=pod.metrics())

    app = web.Application()
    app.add_routes([web.get("/kv_event_sources", sources), web.get("/v1/models", models), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pod.endpoint = f"127.0.0.1:{runner.addresses[0][1]}"
    replay = asyncio.create_task(pod.serve_replay(), name="scripted-replay")
    try:
        yield pod
    finally:
        replay.cancel()
        await asyncio.gather(replay, return_exceptions=True)
        await runner.cleanup()
        pod.destroy()
