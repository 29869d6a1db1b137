"""Promises before a real vLLM server: its streams are judged token by token, and its histograms beside them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from extproc.answers.response_usage import usage_reader_for
from tests.e2e.stack import eventually, running_stack
from tests.e2e.test_promises import OBJECTIVE, counted, judged
from tests.vllm.servers import MODEL_NAME, VllmPod

TOKENS = 12
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me of the sea."}], "max_tokens": TOKENS}
WITH_USAGE = {"stream_options": {"include_usage": True}}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", MESSAGES),
    "chat-usage": ("/v1/chat/completions", MESSAGES | WITH_USAGE),
    "completion": ("/v1/completions", {"prompt": "The sea", "max_tokens": TOKENS}),
    "completion-usage": ("/v1/completions", {"prompt": "The sea", "max_tokens": TOKENS} | WITH_USAGE),
    "responses": ("/v1/responses", {"input": "Tell me of the sea.", "max_output_tokens": TOKENS}),
    "messages": ("/v1/messages", MESSAGES),
}
POLICY = {
    "priorities": {
        "trustObjective": True,
        "classes": [
            {"name": "standard", "ttftSeconds": 600, "interTokenSeconds": 60},
            {"name": "hurried", "ttftSeconds": 0.0001, "interTokenSeconds": 0.0001},
        ],
    }
}


async def test_tokens_are_found_in_every_stream_and_both_classes_are_judged(
    fresh_vllm_pods: Callable[..., tuple[VllmPod, ...]], tmp_path: Path
) -> None:
    (pod,) = fresh_vllm_pods(1)
    for name, (path, body) in STREAMS.items():
        events, told = await token_events(pod, path, body)
        assert told in (None, TOKENS), name
        # the engine may give several tokens at once, and a last event without one
        assert TOKENS // 2 <= events <= TOKENS + (12 if name in ("responses", "messages") else 2), (name, events)

    settings = json.dumps({"sample_share": 1.0, "policy": POLICY, "index_timeout_ms": 2000})
    flags = ("--model", MODEL_NAME, "--tokenizer", str(pod.model_folder))
    async with running_stack(tmp_path, *flags, settings=settings, endpoints=[pod.address]) as stack:
        for objective in ("standard", "hurried"):
            for path, body in STREAMS.values():
                for stream in (True, False):
                    fields = body if stream else {key: value for key, value in body.items() if key != "stream_options"}
                    answer = await stack.send(
                        "POST",
                        path,
                        json={"model": MODEL_NAME, "temperature": 0, "stream": stream} | fields,
                        headers={OBJECTIVE: objective},
                    )
                    assert answer.status == 200, answer
        streams = len(STREAMS)
        await judged(stack, 4 * streams)
        outcomes = await counted(stack, "class", "target", "outcome")
        assert outcomes["standard", "ttft", "met"] == outcomes["standard", "inter-token", "met"] == streams
        assert outcomes["standard", "all", "met"] == 2 * streams
        assert outcomes["hurried", "ttft", "late"] == streams
        assert outcomes["hurried", "all", "late"] == 2 * streams
        # the pods call the model as the sample does: the two can be compared
        observed = await eventually(
            lambda: counted(stack, "class", "model", name="kvmesh_slo_pod_observations_total"), bool
        )
        assert set(observed) == {(name, MODEL_NAME) for name in ("standard", "hurried", "critical", "sheddable")}


async def token_events(pod: VllmPod, path: str, body: dict[str, Any]) -> tuple[int, int | None]:
    """Return how many events with tokens were found in a stream, and how many tokens it tells."""
    reader = usage_reader_for("text/event-stream", find_tokens=True)
    assert reader is not None
    request = {"model": MODEL_NAME, "temperature": 0, "stream": True, "ignore_eos": True} | body
    async with aiohttp.ClientSession() as http, http.post(f"{pod.url}{path}", json=request) as response:
        assert response.status == 200, await response.text()
        async for chunk in response.content.iter_any():
            reader.feed(chunk)
    usage = reader.usage()
    return reader.token_events, usage.output_tokens if usage is not None else None
