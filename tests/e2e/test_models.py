"""Rewritten models in a running mesh: clients see their own name, prefixes are found, predictions come true."""

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import Stack, eventually, running_stack

RULES = {
    "rules": [
        {"model": "gpt-x", "targets": [{"model": "tiny"}]},
        {"model": "gone", "targets": [{"model": "no-such"}], "fallbacks": ["tiny"]},
    ]
}


def chat(**fields: Any) -> dict[str, Any]:
    story = " ".join(f"word{i} of a story about the sea" for i in range(120))
    messages = [{"role": "user", "content": f"{uuid.uuid4()} {story}"}]
    return {"model": "gpt-x", "max_tokens": 3, "messages": messages, **fields}


async def events(stack: Stack, body: dict[str, Any]) -> list[Any]:
    """The JSON of each event."""
    answer = await stack.send("POST", "/v1/chat/completions", json=body)
    lines = [line.removeprefix("data: ") for line in answer.body.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("body_mode", ["duplex", "buffered"])
async def test_a_client_sees_its_own_name_and_predictions_come_true(
    body_mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMESH_POLICY", json.dumps({"models": RULES}))
    async with running_stack(tmp_path, f"--body-mode={body_mode}", pods=2, settings="sample_share: 0") as stack:
        body = chat()
        first = await stack.send("POST", "/v1/chat/completions", json=body)
        assert (first.status, first.json["model"]) == (200, "gpt-x")
        await eventually(
            lambda: stack.explain(body, path="/v1/chat/completions"), lambda answer: answer["matched_tokens"] > 0
        )
        again = await stack.send("POST", "/v1/chat/completions", json=body)
        streamed = await events(stack, body | {"stream": True})

        assert (again.upstream, again.json["model"]) == (first.upstream, "gpt-x")
        assert again.cached_tokens > 0
        assert {event["model"] for event in streamed} == {"gpt-x"}
        await eventually(stack.open_bookings, lambda open_bookings: open_bookings == 0)
        assert await stack.metric("kvmesh_realised_requests_total") == 2
        assert await stack.metric("kvmesh_realised_cached_tokens_total") == again.cached_tokens
        assert await stack.metric("kvmesh_realised_predicted_tokens_total") == again.cached_tokens
        assert await stack.metric("kvmesh_responses_missed_total") == 0
        assert await stack.metric("kvmesh_model_requests_total") == 3
        fallen_back = await stack.send("POST", "/v1/chat/completions", json=body | {"model": "gone"})
        assert (fallen_back.status, fallen_back.json["model"]) == (200, "gone")
