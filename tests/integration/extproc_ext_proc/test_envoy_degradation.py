"""A real Envoy and the real `openai` client: what is taken from a request under pressure, and what its answer tells.

In both body modes: FULL_DUPLEX_STREAMED, where a second filter may have the response's body, and BUFFERED.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from extproc.admission.degradation import NO_MEASURES, Measures, measures_of, took, words_of
from extproc.admission.output_cap import body_changes, caps
from extproc.answers.response_plan import PASS_PLAN, ResponsePlan
from extproc.choosing.endpoint_health import Outcome
from extproc.disaggregation.transfer_protocols import removed_headers
from extproc.errors import PickError, RequestShedError
from extproc.ext_proc.exchange import RequestFacts
from extproc.ext_proc.grpc_server import ExtProcServer
from extproc.ledger.facts import Read
from extproc.ledger.ledger import Ledger
from extproc.pods.inflight import Booking
from extproc.policy.priority import DegradationStep, StepKind
from extproc.pools.booked_exchange import BookedExchange, ReadResponse
from extproc.requests.json_edit import JsonObject, replace_top_level
from extproc.requests.openai import parse_request
from operate.local.envoy_config import SocketAddress, fill_in, read_template
from operate.local.ports import pick_free_port
from operate.local.processes import HttpReady, ProcessSpec, Supervisor, find_envoy

HOST = "127.0.0.1"
DEADLINE_SECONDS = 30.0
BOTH = ("local.yaml", "buffered.yaml")
STEPS = measures_of(
    (
        DegradationStep(step=StepKind.CAP_OUTPUT, enter=1.0, leave=0.5, tokens=200),
        DegradationStep(step=StepKind.NO_REMOTE_PREFILL, enter=1.0, leave=0.5),
    )
)
DEGRADED, LIMIT = "x-kvmesh-degraded", "x-ratelimit-limit-requests"
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}


@dataclass(kw_only=True)
class Picker:
    """Picks one pod, takes what the measures say, and tells the client."""

    endpoint: str = ""
    measures: Measures = NO_MEASURES
    told: Mapping[str, str] = field(default_factory=dict)
    plan: ResponsePlan = PASS_PLAN
    refusal: PickError | None = None
    misses: list[str] = field(default_factory=list)
    ledger: Ledger = field(init=False)
    reading: dict[tuple[float, str], BookedExchange] = field(default_factory=dict)
    response_key: bytes = b""

    def __post_init__(self) -> None:
        self.ledger = Ledger(listeners={Read: (self.read,)})

    async def pick(self, facts: RequestFacts, body: bytes | None) -> BookedExchange:
        if self.refusal is not None:
            raise self.refusal
        plain = body or b""
        request = parse_request(method=facts.method, path=facts.path, body=body)
        changes = body_changes(request, JsonObject(plain), measures=self.measures, priority=None)
        words = words_of(took(self.measures, capped=caps(changes), model_changed=False))
        return BookedExchange(
            books=self,
            endpoints=(self.endpoint,),
            booking=Booking(endpoint=self.endpoint, booked_at=0.0),
            body=replace_top_level(plain, changes) if changes else None,
            removed_headers=removed_headers(facts.headers),
            response_headers={**self.told, DEGRADED: words} if words else self.told,
            plan=self.plan,
        )

    def response(self, plan: ResponsePlan) -> ReadResponse:
        return ReadResponse(books=self, plan=plan)

    def knows(self, endpoint: str) -> bool:
        return endpoint == self.endpoint

    def rebook(self, booking: Booking, endpoint: str) -> Booking:
        raise AssertionError("there is one pod")

    def computes_itself(self, booking: Booking, uncached_tokens: int) -> Booking:
        raise AssertionError("no prompt is computed by another pod")

    def release_leg(self, booking: Booking) -> None:
        raise AssertionError("no prompt is computed by another pod")

    def endpoint_answered(self, endpoint: str, *, failed: bool) -> None: ...

    def endpoint_full(self, endpoint: str) -> None: ...

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
    ) -> None: ...

    def keeps(self, response_id: str, endpoint: str) -> None: ...

    def generated(self, note: Any, tokens: int) -> None: ...

    def read(self, fact: Read) -> None:
        self.misses += fact.missed


@dataclass(kw_only=True)
class Mesh:
    picker: Picker
    client: openai.AsyncOpenAI
    received: list[tuple[dict[str, str], bytes]]  # what the pod got


@asynccontextmanager
async def mesh(file: str, tmp_path: Path, *, alive: bool = True) -> AsyncIterator[Mesh]:
    """A real Envoy with that file, our gRPC server, and one pod, which answers chats if it is alive."""
    picker = Picker()
    server = ExtProcServer(picks=picker, max_body_bytes=1 << 20)
    ports = {picker_port := await server.start(host=HOST, port=0)}
    for _ in range(3):
        ports.add(pick_free_port(host=HOST, avoid=ports))
    gateway, admin, dead = (SocketAddress(host=HOST, port=port) for port in sorted(ports - {picker_port}))
    received: list[tuple[dict[str, str], bytes]] = []
    runner = await start_pod(received)
    pod = SocketAddress(host=HOST, port=runner.addresses[0][1]) if alive else dead
    address = SocketAddress(host=HOST, port=picker_port)
    config = fill_in(read_template(file), gateway=gateway, admin=admin, picker=address, pods=[pod])
    path = tmp_path / "envoy.json"
    path.write_text(json.dumps(config))
    picker.endpoint = str(pod)
    try:
        async with (
            running_envoy(path, ready_url=f"http://{admin}/ready"),
            openai.AsyncOpenAI(
                base_url=f"http://{gateway}/v1", api_key="none", max_retries=0, timeout=DEADLINE_SECONDS
            ) as client,
        ):
            yield Mesh(picker=picker, client=client, received=received)
    finally:
        await server.stop(grace_seconds=0)
        await runner.cleanup()


@asynccontextmanager
async def running_envoy(path: Path, *, ready_url: str) -> AsyncIterator[None]:
    argv = (str(find_envoy()), "-c", str(path), "--disable-hot-restart", "--concurrency", "1")
    envoy = ProcessSpec(name="envoy", argv=argv, ready=(HttpReady(url=ready_url),))
    ready = asyncio.Event()

    async def when_ready() -> None:
        ready.set()
        await asyncio.Event().wait()

    run = asyncio.create_task(
        Supervisor(log_directory=path.parent).run([[envoy]], environment=os.environ, when_ready=when_ready)
    )
    try:
        began = asyncio.create_task(ready.wait())
        await asyncio.wait({run, began}, timeout=DEADLINE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        began.cancel()
        if run.done():
            run.result()
        yield
    finally:
        run.cancel()
        with suppress(asyncio.CancelledError):
            await run


async def start_pod(received: list[tuple[dict[str, str], bytes]]) -> web.AppRunner:
    """A pod that says of itself what only the picker may say, and ends at its limit."""

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        received.append(({name.lower(): value for name, value in request.headers.items()}, body))
        asked = json.loads(body)
        choice = {"index": 0, "finish_reason": "length" if "max_tokens" in asked else "stop"}
        answer = {"id": "c", "created": 1, "model": "internal"}
        own = {LIMIT: "1"}
        if not asked.get("stream"):
            message = {"message": {"role": "assistant", "content": "a"}, **choice}
            return web.json_response({**answer, "object": "chat.completion", "choices": [message]}, headers=own)
        chunk = {**answer, "object": "chat.completion.chunk", "choices": [{"delta": {"content": "a"}, **choice}]}
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **own})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    async def models(_: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": []})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    return runner


@pytest.mark.parametrize("file", BOTH)
async def test_under_pressure_a_chat_is_capped_loses_its_prefiller_and_its_answer_says_so(
    file: str, tmp_path: Path
) -> None:
    async with mesh(file, tmp_path) as running:
        running.picker.measures = STEPS
        running.picker.told = {LIMIT: "60", "x-ratelimit-reset-requests": "1s"}

        raw = await running.client.chat.completions.with_raw_response.create(
            **CHAT,
            extra_body={"min_tokens": 500},
            extra_headers={"x-prefiller-host-port": "10.0.0.9:8000", "x-other": "stays"},
        )

        ((headers, body),) = running.received
        assert json.loads(body) == {**CHAT, "min_tokens": 200, "max_tokens": 200}
        assert ("x-prefiller-host-port" in headers, headers["x-other"]) == (False, "stays")
        assert raw.headers[DEGRADED] == "cap-output, no-remote-prefill"
        assert raw.headers.get_list(LIMIT) == ["60"]  # not the pod's
        assert raw.headers["x-ratelimit-reset-requests"] == "1s"
        assert raw.parse().choices[0].finish_reason == "length"


@pytest.mark.parametrize("file", BOTH)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_is_told_also_where_the_response_is_rewritten(file: str, stream: bool, tmp_path: Path) -> None:
    async with mesh(file, tmp_path) as running:
        running.picker.measures = STEPS
        running.picker.plan = ResponsePlan(requested_model="m")

        raw = await running.client.chat.completions.with_raw_response.create(**CHAT, stream=stream)

        answer: Any = raw.parse()
        models = [chunk.model async for chunk in answer] if stream else [answer.model]
        assert (models, raw.headers[DEGRADED]) == (["m"], "cap-output, no-remote-prefill")
        assert "content-length" not in raw.headers
        assert running.picker.misses == []


@pytest.mark.parametrize("file", BOTH)
async def test_without_pressure_all_passes_but_the_prefiller_that_a_client_names(file: str, tmp_path: Path) -> None:
    async with mesh(file, tmp_path) as running:
        raw = await running.client.chat.completions.with_raw_response.create(
            **CHAT, extra_headers={"x-prefiller-host-port": "10.0.0.9:8000"}
        )

        ((headers, body),) = running.received
        assert (json.loads(body), "x-prefiller-host-port" in headers) == (CHAT, False)
        assert (DEGRADED in raw.headers, raw.headers[LIMIT]) == (False, "1")
        assert raw.headers["content-length"] == str(len(raw.content))


@pytest.mark.parametrize("file", BOTH)
@pytest.mark.parametrize("alive", [True, False])
async def test_requests_without_body_and_answers_of_envoys_own_are_told_too(
    file: str, alive: bool, tmp_path: Path
) -> None:
    async with mesh(file, tmp_path, alive=alive) as running:
        running.picker.told = {"x-kvmesh-priority": "gr\u00f6\u00dfe\n1"}
        try:
            answer = (await running.client.models.with_raw_response.list()).http_response
        except openai.InternalServerError as error:
            answer = error.response

        assert answer.status_code == (200 if alive else 503)
        assert dict(answer.headers.raw)[b"x-kvmesh-priority"] == "gr\u00f6\u00dfe?1".encode()


@pytest.mark.parametrize("file", BOTH)
async def test_a_refusal_carries_its_headers_and_message_into_the_clients_error(file: str, tmp_path: Path) -> None:
    async with mesh(file, tmp_path) as running:
        for status, error in ((503, openai.InternalServerError), (429, openai.RateLimitError)):
            running.picker.refusal = RequestShedError(
                "come back later",
                retry_after_seconds=7,
                headers={"x-kvmesh-priority": "sheddable"},
                http_status=status,
            )
            with pytest.raises(error, match="come back later") as refused:
                await running.client.chat.completions.create(**CHAT)
            headers = refused.value.response.headers
            assert {name: headers[name] for name in ("x-kvmesh-priority", "x-kvmesh-reason", "retry-after")} == {
                "x-kvmesh-priority": "sheddable",
                "x-kvmesh-reason": "shed",
                "retry-after": "7",
            }
        assert running.received == []
