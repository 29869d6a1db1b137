"""Mixed requests to two real vLLM servers as clients send them: no answer finds less in the cache than was predicted.

Unlike `test_prediction.py`, nothing waits for the index, caches evict, and a third of the requests have forms for which
the cache is skipped, refused, left early or asked for several answers. `MIXED_REQUESTS=850` sends more.
"""

import json
import os
import random
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.pools.plan_response import PREDICTED_HEADER
from tests.e2e.stack import Stack, running_stack
from tests.vllm.checked_client import CHAT, COMPLETION, RESPONSES, read_events, usage_of
from tests.vllm.mixed_requests import MixedRequests
from tests.vllm.servers import BLOCK_SIZE, MAX_MODEL_LEN, MODEL_NAME, VllmPod

REQUESTS = int(os.environ.get("MIXED_REQUESTS", "200"))
SETTINGS = "index_timeout_ms: 2000\nsample_share: 1.0\n"
LONG = 40 * BLOCK_SIZE  # tokens of a document; a dozen of them fill a pod's cache
FORMS = (
    *("prompt_logprobs", "echo with logprobs", "chat echo", "refused", "too long", "left", "two answers"),
    *("best of", "kept response", "long document", "long document", "long document", "unknown adapter"),
)


class Forms:
    """Makes the further requests; `unique` sets their prompts apart from those of all other runs."""

    def __init__(self, *, seed: int, unique: str) -> None:
        self._draw = random.Random(seed)
        self._text = f"{unique} the tide comes in and the boats rise. " * 8
        self._ids = [[self._draw.randrange(300, 4000) for _ in range(LONG)] for _ in range(30)]
        self.kept: str | None = None

    def next(self) -> tuple[str, str, dict[str, Any]]:
        """Return the kind, the path and the fields of the next request."""
        kind, ids = self._draw.choice(FORMS), self._draw.choice(self._ids)
        completion: dict[str, Any] = {"prompt": self._text, "max_tokens": 2}
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": self._text}], "max_tokens": 2}
        kept = {"previous_response_id": self.kept} if self.kept is not None else {}
        path, fields = {
            "prompt_logprobs": (COMPLETION, completion | {"prompt_logprobs": 0}),
            "echo with logprobs": (COMPLETION, completion | {"echo": True, "logprobs": 1}),
            "chat echo": (CHAT, chat | {"echo": True}),
            "refused": (COMPLETION, {"prompt": ids, "temperature": "warm"}),
            "too long": (COMPLETION, {"prompt": [7] * (MAX_MODEL_LEN + 1), "max_tokens": 1}),
            "left": (COMPLETION, {"prompt": ids, "max_tokens": 100, "stream": True}),
            "two answers": (CHAT, chat | {"n": 2, "temperature": 0.5}),
            "best of": (COMPLETION, completion | {"n": 2, "temperature": 0.5}),
            "kept response": (RESPONSES, {"input": self._text, "max_output_tokens": 1, "store": True} | kept),
            "unknown adapter": (COMPLETION, completion | {"model": "no-such-adapter"}),
            "long document": (COMPLETION, {"prompt": ids, "max_tokens": 2}),
        }[kind]
        return kind, path, fields


async def leave_early(stack: Stack, body: dict[str, Any]) -> None:
    """Begin a stream and close it at its first bytes."""
    async with stack.http.post(f"{stack.ready['gateway']}{COMPLETION}", json=body) as response:
        await response.content.readany()


@pytest.mark.timeout(900)  # of a thousand requests
async def test_no_prediction_is_too_high(vllm_pods: tuple[VllmPod, ...], tmp_path: Path) -> None:
    unique, draw = str(uuid.uuid4()), random.Random(11)
    flags = ("--model", MODEL_NAME, "--tokenizer", str(vllm_pods[0].model_folder))
    endpoints = [pod.address for pod in vllm_pods]
    seen: Counter[str] = Counter()
    too_high: list[tuple[str, int, int]] = []
    async with running_stack(tmp_path, *flags, settings=SETTINGS, endpoints=endpoints) as stack:
        mixed, forms = MixedRequests(seed=5, unique=unique), Forms(seed=6, unique=unique)
        for _ in range(REQUESTS):
            kind, path, fields = forms.next() if draw.random() < 1 / 3 else mixed.next()
            body = {"model": MODEL_NAME, "temperature": 0} | fields
            if kind == "left":
                await leave_early(stack, body)
                seen["left"] += 1
                continue
            try:
                answer = await stack.send("POST", path, json=body)
            except aiohttp.ClientError as error:
                raise AssertionError(f"{kind}: {error!r}") from error
            if answer.status != 200:
                assert kind in ("refused", "too long", "unknown adapter", "chat echo", "kept response"), answer.body
                seen[f"{kind}: {answer.status}"] += 1
                continue
            read = read_events(answer.body) if body.get("stream") else json.loads(answer.body)
            if kind == "kept response":
                forms.kept = read["id"]
            if path == CHAT and kind not in ("two answers", "chat echo"):
                mixed.answered(
                    str(read["choices"][0].get("message", {}).get("content") or read["choices"][0].get("text"))
                )
            predicted = answer.headers.get(PREDICTED_HEADER)
            if predicted is None or kind in ("batch", "two answers", "best of"):
                seen["not compared"] += 1
                continue
            _, cached = usage_of(read)
            exact = "equal" if int(predicted) == cached else "too low" if int(predicted) < cached else "too high"
            seen[exact] += 1
            if exact == "too high":
                too_high.append((kind, int(predicted), cached))
    print(REQUESTS, "requests:", dict(seen))
    assert too_high == [], dict(seen)
    assert seen["equal"] > REQUESTS / 2
