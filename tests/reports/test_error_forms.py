"""Each client gets the picker's refusal in the form of the API that it has called, through a real Envoy."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from tests.e2e.stack import Stack, free_ports, running_stack

LONG = "a" * 20_000
WORDS = "the request body is larger than 10000 bytes; shorten the prompt or ask the operator to raise max_body_bytes"
OPENAI = {
    "error": {"message": WORDS, "type": "invalid_request_error", "param": None, "code": "body_too_large"},
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with running_stack(tmp_path_factory.mktemp("stack"), pods=1, settings="max_body_bytes: 10000\n") as running:
        yield running


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/chat/completions", OPENAI),
        ("/score", OPENAI),
        ("/rerank", {"message": WORDS}),
    ],
)
async def test_json_apis(stack: Stack, path: str, expected: Any) -> None:
    answer = await stack.send("POST", path, json={"model": "tiny", "prompt": LONG})
    assert (answer.status, answer.headers["content-type"], answer.json) == (413, "application/json", expected)


async def test_anthropics_messages(stack: Stack) -> None:
    answer = await stack.send("POST", "/v1/messages", json={"model": "tiny", "prompt": LONG})
    expected = {"type": "error", "error": {"type": "request_too_large", "message": WORDS}}
    assert answer.json == expected | {"request_id": answer.headers["x-request-id"]}


async def test_an_unknown_path(stack: Stack) -> None:
    answer = await stack.send("POST", "/upload", data=LONG)
    assert (answer.status, answer.headers["content-type"]) == (413, "text/plain; charset=utf-8")
    assert answer.body.decode() == f"{WORDS}\n"


async def test_grpc(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with (
        running_stack(tmp_path, "--model", "tiny", endpoints=[f"127.0.0.1:{port}"]) as without_pods,
        grpc.aio.insecure_channel(without_pods.ready["gateway"].removeprefix("http://")) as channel,
    ):
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call(LONG.encode(), timeout=10.0)
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
    assert refusal.value.details()
