"""A stream that fails after good headers is a failure: in SLO figures, in the access log, and for `kvmesh load`."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from operate.load.streamed_answer import BadAnswerError, StreamedAnswer, problem_of
from tests.e2e.echo_pod import MODEL, echo_pod
from tests.e2e.stack import Stack, eventually, free_ports, running_stack

TOKEN = {"choices": [{"index": 0, "delta": {"content": "x"}}]}
ERROR = {"error": {"message": "engine dead", "type": "InternalServerError", "code": 500}}
STEP_SECONDS = 0.03  # of an engine; the access log cannot have what is over at once (docs/limits.md)
STREAMS: dict[str, list[Any]] = {
    "whole": [TOKEN, TOKEN],
    "error": [ERROR],
    "late error": [TOKEN, ERROR],
    "empty": [],
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def answer(request: web.Request) -> web.StreamResponse:
    if request.method != "POST":
        return web.Response(status=404)
    events = STREAMS[(await request.json())["messages"][0]["content"]]
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await asyncio.sleep(STEP_SECONDS)
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await asyncio.sleep(STEP_SECONDS)
    await response.write(b"data: [DONE]\n\n")
    return response


@pytest.fixture(scope="module")
def access_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "access.log"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory, access_log: Path) -> AsyncIterator[Stack]:
    (port,) = free_ports(1)
    settings = json.dumps({"sample_share": 1.0, "access_log": str(access_log), "policy": {}})
    async with (
        echo_pod("127.0.0.1", port, answer),
        running_stack(
            tmp_path_factory.mktemp("stack"), "--model", MODEL, settings=settings, endpoints=[f"127.0.0.1:{port}"]
        ) as running,
    ):
        yield running


async def outcomes(stack: Stack) -> dict[str, float]:
    """Return how many requests were judged with which outcome, over all targets together."""
    async with stack.http.get(f"{stack.ready['admin']}/metrics") as response:
        page = await response.text()
    return {
        sample.labels["outcome"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "kvmesh_slo_requests_total" and sample.labels["target"] == "all"
    }


async def test_no_failed_stream_meets_an_slo(stack: Stack, access_log: Path) -> None:
    for index, content in enumerate(STREAMS):
        body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": content}]}
        headers = {"x-request-id": str(index)}
        assert (await stack.send("POST", "/v1/chat/completions", json=body, headers=headers)).status == 200
    await eventually(lambda: outcomes(stack), lambda found: sum(found.values()) == len(STREAMS))
    assert await outcomes(stack) == {"met": 1, "failed": 3}

    async def ends() -> list[bool]:
        lines = [json.loads(line) for line in access_log.read_text().splitlines()]
        return [line.get("stream_failed", False) for line in lines if "status" in line]

    assert await eventually(ends, lambda found: len(found) == len(STREAMS)) == [False, True, True, True]


@pytest.mark.parametrize(
    ("content", "fails"), [("whole", False), ("error", True), ("late error", True), ("empty", True)]
)
async def test_the_load_generator_counts_it_as_a_failure(stack: Stack, content: str, fails: bool) -> None:
    body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": content}]}
    found = await stack.send("POST", "/v1/chat/completions", json=body)
    read = StreamedAnswer(status=found.status)
    try:
        read.feed(found.body, at=1.0)
        problem = problem_of(read)
    except BadAnswerError as error:
        problem = str(error)
    assert (problem is not None) is (content != "whole")
