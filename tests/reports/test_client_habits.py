"""Clients and proxies with habits of their own are served like others, through a real Envoy in each body mode."""

import asyncio
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from tests.e2e.echo_pod import MODEL, echo_pod
from tests.e2e.stack import Stack, eventually, free_ports, running_stack
from tests.reports.test_two_way import raw

STEP_SECONDS = 0.03  # of an engine; the access log cannot have what is over at once (docs/limits.md)
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
TOKEN = {"model": MODEL, "choices": [{"index": 0, "delta": {"content": "x"}}]}
LAST = {"model": MODEL, "choices": [], "usage": USAGE}
DOCUMENT = {"model": MODEL, "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}}], "usage": USAGE}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
BODY = json.dumps(CHAT).encode()

pytestmark = pytest.mark.asyncio(loop_scope="module")


def as_it_is(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def in_lines(document: Any, newline: str = "\n") -> bytes:
    lines = json.dumps(document, indent=1).split("\n")
    return "".join([*(f"data: {line}{newline}" for line in lines), newline]).encode()


FORMS = {
    "plain": as_it_is,
    "lines": in_lines,
    "crlf": lambda document: in_lines(document, "\r\n"),
    "mark": as_it_is,
}


async def answer(request: web.Request) -> web.StreamResponse:
    """Answer a chat in the form that the header `x-form` names, compressed as `x-coding` says."""
    if request.method != "POST":
        return web.Response(status=404)
    form, coding = request.headers.get("x-form", "plain"), request.headers.get("x-coding")
    is_stream = (await request.json()).get("stream")
    headers = {"content-type": "text/event-stream" if is_stream else "application/json"}
    response = web.StreamResponse(headers=headers | ({"content-encoding": coding} if coding else {}))
    await response.prepare(request)
    parts = [*(FORMS[form](each) for each in (TOKEN, TOKEN, LAST)), b"data: [DONE]\n\n"]
    if form == "mark":
        parts.insert(0, b"\xef\xbb\xbf")
    packer = zlib.compressobj(wbits=31)
    for part in parts if is_stream else [json.dumps(DOCUMENT).encode()]:
        await asyncio.sleep(STEP_SECONDS)
        await response.write(packer.compress(part) + packer.flush(zlib.Z_SYNC_FLUSH) if coding else part)
    if coding:
        await response.write(packer.flush())
    return response


@pytest.fixture(scope="module")
def access_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "access.log"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["duplex", "buffered"])
async def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, access_log: Path
) -> AsyncIterator[Stack]:
    (port,) = free_ports(1)
    settings = json.dumps({"sample_share": 1.0, "access_log": str(access_log), "policy": {}})
    async with (
        echo_pod("127.0.0.1", port, answer),
        running_stack(
            tmp_path_factory.mktemp("stack"),
            *("--model", MODEL, "--body-mode", request.param),
            settings=settings,
            endpoints=[f"127.0.0.1:{port}"],
        ) as running,
    ):
        yield running


def post(version: str, *headers: str, body: bytes = BODY) -> bytes:
    lines = (f"POST /v1/chat/completions HTTP/{version}", "Content-Type: application/json", *headers)
    return "\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body


@pytest.mark.parametrize("headers", [(), ("Host: llm",), ("Host: llm", "Connection: close")])
async def test_http_1_0_is_answered_and_closed(stack: Stack, headers: tuple[str, ...]) -> None:
    head, _, body = (await raw(stack.ready["gateway"], post("1.0", *headers))).partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == b"200", head
    assert json.loads(body) == DOCUMENT


async def test_http_1_0_gets_a_stream_without_chunks(stack: Stack) -> None:
    request = post("1.0", "Host: llm", body=json.dumps(CHAT | {"stream": True}).encode())
    head, _, body = (await raw(stack.ready["gateway"], request)).partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == b"200", head
    assert body == as_it_is(TOKEN) * 2 + as_it_is(LAST) + b"data: [DONE]\n\n"


async def test_http_1_0_with_keep_alive_is_answered(stack: Stack) -> None:
    # as of `ab -k`
    head = await raw(stack.ready["gateway"], post("1.0", "Host: llm", "Connection: Keep-Alive"), until_close=False)
    assert head.split(b" ")[1] == b"200", head


@pytest.mark.parametrize(
    "offer",
    [
        ("Upgrade: TLS/1.2", "Connection: Upgrade"),  # Apache's HttpClient 5.4
        ("Upgrade: TLS/1.2, TLS/1.3", "Connection: Upgrade"),
        ("Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__", "Connection: Upgrade, HTTP2-Settings"),  # Java's
        ("Upgrade: HTTP/2.0", "Connection: upgrade, close"),
    ],
)
async def test_an_offer_of_another_protocol_is_ignored(stack: Stack, offer: tuple[str, ...]) -> None:
    head = await raw(stack.ready["gateway"], post("1.1", "Host: llm", *offer), until_close=False)
    assert head.split(b" ")[1] == b"200", head


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("coding", [None, "gzip"])
async def test_the_usage_of_a_rewritten_stream_is_read(
    stack: Stack, access_log: Path, form: str, coding: str | None
) -> None:
    headers = {"x-form": form} | ({"x-coding": coding} if coding else {})
    await assert_read(stack, access_log, CHAT | {"stream": True}, headers)


async def test_the_usage_of_a_compressed_document_is_read(stack: Stack, access_log: Path) -> None:
    await assert_read(stack, access_log, CHAT, {"x-coding": "gzip"})


async def assert_read(stack: Stack, access_log: Path, body: dict[str, Any], headers: dict[str, str]) -> None:
    """Send a request, and wait for the pod's figures in its record."""
    found = await stack.send("POST", "/v1/chat/completions", json=body, headers=headers)
    assert (found.status, b'"usage"' in found.body) == (200, True)

    async def record() -> Any:
        lines = [json.loads(line) for line in access_log.read_text().splitlines()]
        decision = found.headers["x-kvmesh-decision-id"]
        return next((line for line in lines if line.get("decision_id") == decision and "status" in line), None)

    seen = await eventually(record, lambda line: line is not None)
    assert seen.get("stream_failed", False) is False
    assert seen["output_tokens"] == 2
