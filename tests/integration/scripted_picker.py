"""A real Envoy before our gRPC server with scripted picks, and pods that answer as a test says."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from extproc.answers.realised import Comparison
from extproc.answers.response_plan import PASS_PLAN, Prediction, ResponsePlan
from extproc.choosing.endpoint_health import Outcome
from extproc.ext_proc.exchange import RequestFacts
from extproc.ext_proc.grpc_server import ExtProcServer, Http2Transport, Transport
from extproc.ext_proc.grpc_tls import ServerTls
from extproc.ledger.facts import Read
from extproc.ledger.ledger import Ledger
from extproc.pods.inflight import Booking
from extproc.pools.booked_exchange import BookedExchange, ReadResponse
from extproc.shared.quota import QuotaNote
from operate.local.envoy_config import SocketAddress
from tests.integration.envoy_process import HOST, free_addresses, running_envoy

DEADLINE_SECONDS = 30.0
DUPLEX, BUFFERED = "local.yaml", "buffered.yaml"
BOTH = (DUPLEX, BUFFERED)
REWRITE = ResponsePlan(requested_model="gpt-x")
PUBLIC, INTERNAL = b'"gpt-x"', b'"org/model-a"'

EVENTS = b"".join(
    (
        b'data: {"id":"c1","model":"org/model-a","choices":[{"delta":{"content":'
        b'"say \\"model\\":\\"org/model-a\\""}}]}\n\n',
        b'data: {"id":"c1","model":"org/model-a","choices":[{"delta":{"content":"\xc3\xa9"}}]}\n\n',
        b'data: {"id":"c1","model":"org/model-a","choices":[],"usage":{"prompt_tokens":100,"completion_tokens":2,'
        b'"prompt_tokens_details":{"cached_tokens":64}}}\n\n',
        b"data: [DONE]\n\n",
    )
)
DOCUMENT = (
    b'{"id":"c1","object":"chat.completion","model":"org/model-a","choices":[{"message":{"content":'
    b'"\\"model\\":\\"org/model-a\\""},"model":"org/model-a"}],"usage":{"prompt_tokens":100,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":64}}}'
)


def rewritten(content: bytes) -> bytes:
    """With the client's name in place of the pod's, but not inside strings nor deeper in the document."""
    return content.replace(b'"c1","model":' + INTERNAL, b'"c1","model":' + PUBLIC).replace(
        b'"chat.completion","model":' + INTERNAL, b'"chat.completion","model":' + PUBLIC
    )


def predicted(endpoint: str, **changes: Any) -> ResponsePlan:
    prediction = Prediction(
        model="gpt-x", endpoint=endpoint, prompt_tokens=100, matched_tokens=48, best_matched_tokens=80
    )
    return ResponsePlan(prediction=prediction, **changes)


def comparison(endpoint: str) -> Comparison:
    return Comparison(
        model="gpt-x",
        arm="",
        endpoint=endpoint,
        prompt_tokens=100,
        predicted_tokens=48,
        realised_tokens=64,
        error_tokens=16,
        regret_tokens=32,
        prompt_error_tokens=0,
        generated_tokens=2,
    )


@dataclass(kw_only=True)
class Books:
    """A picker that is told what to pick, and remembers what it was told."""

    endpoints: tuple[str, ...] = ()
    known: frozenset[str] = frozenset()
    change: Callable[[bytes], bytes] | None = None
    removed_headers: tuple[str, ...] = ()
    set_headers: Mapping[str, str] = field(default_factory=dict)
    plan: ResponsePlan = PASS_PLAN
    answered: list[tuple[str, bool]] = field(default_factory=list)
    released: list[tuple[str, int]] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)
    ledger: Ledger = field(init=False)
    reading: dict[tuple[float, str], BookedExchange] = field(default_factory=dict)
    response_key: bytes = b""
    open: int = 0

    def __post_init__(self) -> None:
        self.ledger = Ledger(listeners={Read: (self.read,)})

    async def pick(self, facts: RequestFacts, body: bytes | None) -> BookedExchange:
        self.open += 1
        return BookedExchange(
            books=self,
            endpoints=self.endpoints,
            booking=Booking(endpoint=self.endpoints[0], booked_at=0.0),
            body=self.change(body) if self.change is not None and body is not None else None,
            removed_headers=self.removed_headers,
            set_headers=self.set_headers,
            plan=self.plan,
        )

    def response(self, plan: ResponsePlan) -> ReadResponse:
        return ReadResponse(books=self, plan=plan)

    def knows(self, endpoint: str) -> bool:
        return endpoint in self.known

    def rebook(self, booking: Booking, endpoint: str) -> Booking:
        return Booking(endpoint=endpoint, booked_at=booking.booked_at)

    def computes_itself(self, booking: Booking, uncached_tokens: int) -> Booking:
        raise AssertionError("no prompt is computed by another pod")

    def release_leg(self, booking: Booking) -> None:
        raise AssertionError("no prompt is computed by another pod")

    def endpoint_answered(self, endpoint: str, *, failed: bool) -> None:
        self.answered.append((endpoint, failed))

    def stream_read(self, endpoint: str, outcome: Outcome, *, seconds: float) -> None: ...

    def clock(self) -> float:
        return time.monotonic()

    def release(
        self,
        booking: Booking,
        *,
        status: int,
        unserved: bool,
        answered_at: float,
        is_watched: bool,
        generated: int | None,
    ) -> None:
        self.open -= 1
        self.released.append((booking.endpoint, status))

    def keeps(self, response_id: str, endpoint: str) -> None: ...

    def endpoint_full(self, endpoint: str) -> None:
        raise NotImplementedError("no pod here refuses in vLLM's words")

    def generated(self, note: QuotaNote, tokens: int) -> None:
        raise NotImplementedError("no quota here")

    def read(self, fact: Read) -> None:
        assert fact.judged is None, "nothing is promised"
        self.misses += fact.missed
        if fact.comparison is not None:
            self.comparisons.append(fact.comparison)


Handler = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


@dataclass(kw_only=True)
class Mesh:
    gateway: str
    books: Books
    server: ExtProcServer
    pod: str
    other_pod: str
    dead_pod: str
    admin: str
    received: list[tuple[dict[str, str], bytes]]  # what the pods got

    @asynccontextmanager
    async def post(
        self, body: bytes = b'{"model":"gpt-x"}', *, headers: dict[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=DEADLINE_SECONDS)
        headers = {"content-type": "application/json", "accept-encoding": "identity", **(headers or {})}
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{self.gateway}/v1/chat/completions", data=body, headers=headers) as response,
        ):
            yield response

    async def all_released(self) -> None:
        await until(lambda: not self.books.open and not self.server.open_streams)

    async def streams_started(self, stat_prefix: str) -> int:
        url = f"{self.admin}/stats?filter=ext_proc.*{stat_prefix}\\.streams_started"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return sum(int(line.rpartition(" ")[2]) for line in (await response.text()).splitlines())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def mesh(
    file: str,
    tmp_path: Path,
    answer: Handler,
    *,
    edit: Callable[[dict[str, Any]], None] = lambda manager: None,
    edit_clusters: Callable[[list[dict[str, Any]]], None] = lambda clusters: None,
    tls: ServerTls | None = None,
    transport: type[Transport] = Http2Transport,
) -> AsyncIterator[Mesh]:
    """A real Envoy with that file, our gRPC server with scripted picks, two live pods and a dead one."""
    books = Books()
    received: list[tuple[dict[str, str], bytes]] = []
    server = ExtProcServer(picks=books, max_body_bytes=16 << 20, transport=transport)

    def change(config: dict[str, Any]) -> None:
        edit_clusters(config["static_resources"]["clusters"])
        edit(config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"])

    async with AsyncExitStack() as stack:
        picker_port = await server.start(host=HOST, port=0, tls=tls)
        stack.push_async_callback(server.stop, grace_seconds=0)
        live = [await stack.enter_async_context(pod(answer, received)) for _ in range(2)]
        [dead] = free_addresses(1, avoid={picker_port, *(each.port for each in live)})
        process = await stack.enter_async_context(
            running_envoy(tmp_path, file=file, picker_port=picker_port, pods=[dead, *live], change=change)
        )
        books.endpoints = (str(live[0]),)
        books.known = frozenset(map(str, (dead, *live)))
        yield Mesh(
            gateway=process.gateway,
            books=books,
            server=server,
            pod=str(live[0]),
            other_pod=str(live[1]),
            dead_pod=str(dead),
            admin=process.admin,
            received=received,
        )


@asynccontextmanager
async def pod(answer: Handler, received: list[tuple[dict[str, str], bytes]]) -> AsyncIterator[SocketAddress]:
    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        received.append(({name.lower(): value for name, value in request.headers.items()}, body))
        return await answer(request, body)

    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, 0).start()
        yield SocketAddress(host=HOST, port=runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def document(_: web.Request, __: bytes) -> web.StreamResponse:
    return web.Response(body=DOCUMENT, content_type="application/json")


async def events_in_pieces(request: web.Request, _: bytes) -> web.StreamResponse:
    """The stream cut every 29 bytes, each piece on its way before the next one is made."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for at in range(0, len(EVENTS), 29):
        await response.write(EVENTS[at : at + 29])
        await asyncio.sleep(0.001)
    return response


def as_the_pod_has_it(body: bytes) -> bytes:
    return body.replace(PUBLIC, INTERNAL)
