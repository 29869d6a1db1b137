"""Replays requests that a real vLLM 0.32 answered against a pod with the same settings."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from podsim.core.scheduler import EngineSettings
from podsim.model_folder import TINY_MODEL, load_model_folder
from podsim.pod import PodSettings
from podsim.publisher import PublisherSettings
from podsim.server import running_pods

EXCHANGES = json.loads((Path(__file__).parents[2] / "data" / "podsim_vllm_exchanges.json").read_text())["exchanges"]
FOLDER = load_model_folder(TINY_MODEL)
SETTINGS = PodSettings(
    max_model_len=2048,
    engine=EngineSettings(
        block_size=32, total_blocks=80, max_running=4, prefill_tokens_per_second=1e6, inter_token_seconds=0.001
    ),
)
# told by a model, a clock, a random number or an address; of all else the value must be vLLM's
UNEQUAL = frozenset(
    {"id", "created", "root", "system_fingerprint", "request_id", "content", "text", "token_ids", "endpoint"}
    | {"replay_endpoint", "finish_reason", "stop_reason", "completion_tokens", "total_tokens"}
)


@pytest.fixture
async def pod_url() -> AsyncIterator[str]:
    async with running_pods(SETTINGS, folder=FOLDER, publisher=PublisherSettings(host="127.0.0.1")) as [pod]:
        yield pod.base_url


def comparable(value: Any, key: str = "") -> Any:
    """The value with what may differ replaced by its type."""
    if key in UNEQUAL:
        return type(value).__name__
    if isinstance(value, dict):
        return {name: comparable(element, name) for name, element in value.items()}
    if isinstance(value, list):
        return [comparable(element) for element in value]
    return value


def chunk_shapes(stream: list[Any]) -> list[str]:
    """The distinct chunks of a stream, sorted: choices that are generated at the same time interleave freely."""
    return sorted({json.dumps(comparable(chunk)) for chunk in stream})


def is_validation_text(response: Any) -> bool:
    """pydantic's description of a fault: its place and its type must be equal, its words need not be."""
    return "validation error" in response.get("error", {}).get("message", "")


def without_message(response: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in response["error"].items() if key not in ("message", "param")}


async def test_every_recorded_request_gets_an_answer_of_vllms_shape(pod_url: str) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        for recorded in EXCHANGES:
            await check(session, pod_url, recorded)


async def check(session: aiohttp.ClientSession, url: str, recorded: dict[str, Any]) -> None:
    name = recorded["name"]
    data = recorded.get("raw_request")
    if data is None and "request" in recorded:
        data = json.dumps(recorded["request"])
    headers = {"Content-Type": recorded.get("content_type", "application/json")}
    async with session.request(recorded["method"], url + recorded["path"], data=data, headers=headers) as response:
        text = await response.text()
        assert (response.status, response.headers.get("Content-Type")) == (
            recorded["status"],
            recorded["response_content_type"],
        ), f"{name}: {text}"
    if "stream" in recorded:
        lines = [line.removeprefix("data: ") for line in text.split("\n") if line]
        chunks = [line if line == "[DONE]" else json.loads(line) for line in lines]
        assert chunk_shapes(chunks) == chunk_shapes(recorded["stream"]), name
        assert chunks[-1] == "[DONE]", name
        return
    answer, expected = json.loads(text), recorded["response"]
    if isinstance(expected, dict) and is_validation_text(expected):
        assert without_message(answer) == without_message(expected), name
        assert answer["error"]["param"] is None or answer["error"]["param"].startswith("body"), name
    elif recorded["path"] == "/tokenize" or recorded["path"].endswith("/render"):
        assert strip_ids(answer) == strip_ids(expected), name
    else:
        assert comparable(answer) == comparable(expected), name
        assert list(answer) == list(expected), f"{name}: the order of keys"


def strip_ids(value: Any) -> Any:
    """Rendered prompts must be equal token by token; only their request ids are random."""
    if isinstance(value, list):
        return [strip_ids(element) for element in value]
    return {key: element for key, element in value.items() if key != "request_id"}
