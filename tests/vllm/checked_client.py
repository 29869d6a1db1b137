"""A client that sends request after request through the real stack and holds what was predicted against what vLLM says.

Used by `test_prediction.py` and `test_lora.py`. Each request is sent once the index has what the one before left in a
pod's cache, so that a prediction cannot fail for an event that is still on its way.
"""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.stack import Stack, eventually
from tests.vllm.servers import BLOCK_SIZE, MODEL_NAME, VllmPod

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request: what was predicted for it, and what vLLM counted."""

    kind: str
    model: str
    pod: str
    prompts: int
    prompt_tokens: int  # as predicted
    counted_tokens: int  # as vLLM counts them
    predicted: int  # cached tokens
    cached: int  # of the only prompt; vLLM tells of no others
    text: str


@dataclass(slots=True)
class CheckedClient:
    """Sends, and keeps what became of it."""

    stack: Stack
    pods: Mapping[str, VllmPod]
    outcomes: list[Outcome] = field(default_factory=list)
    block_size: int = BLOCK_SIZE

    async def send(self, kind: str, path: str, **fields: Any) -> Outcome:
        """Send one request of the default model or of `model`; the output is short, and one token for later APIs."""
        body: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0} | fields
        answer = await self.stack.send("POST", path, json=body)
        assert answer.status == 200, (kind, answer.body)
        read = read_events(answer.body) if body.get("stream") else answer.json
        decision = (await self.stack.state())["decisions"][0]
        assert (decision["degraded"], decision["endpoint"], decision["path"]) == ([], answer.upstream, path), kind
        prompts = await asyncio.to_thread(rendered, self.pods[answer.upstream], path, body)
        counted, cached = usage_of(read)
        outcome = Outcome(
            kind=kind,
            model=body["model"],
            pod=answer.upstream,
            prompts=len(prompts),
            prompt_tokens=decision["prompt_tokens"],
            counted_tokens=counted,
            predicted=decision["matched_tokens"],
            cached=cached,
            text=text_of(read),
        )
        assert counted == sum(map(len, prompts)), kind
        self.outcomes.append(outcome)
        for prompt, output in zip(prompts, generated(read, len(prompts)), strict=True):
            await self._indexed([*prompt, *output], body, pod=outcome.pod)
        return outcome

    async def _indexed(self, tokens: Sequence[int], body: Mapping[str, Any], *, pod: str) -> None:
        """Wait until the index has every block that vLLM filled; it never computes the last token it generated."""
        filled = (len(tokens) - 1) // self.block_size * self.block_size
        question = {name: body[name] for name in ("model", "cache_salt") if name in body} | {"prompt": [*tokens, 0]}

        def complete(explanation: Any) -> bool:
            (held,) = [each for each in explanation["candidates"] if each["endpoint"] == pod]
            # other groups of a hybrid model may hold less
            reported = re.search(r"full attention holds (\d+) tokens", held["held_back"] or "")
            return int(reported[1]) >= filled if reported else bool(held["indexed_tokens"] >= filled)

        await eventually(lambda: self.stack.explain(question), complete)


def rendered(pod: VllmPod, path: str, body: Mapping[str, Any]) -> list[list[int]]:
    """Return the token ids that vLLM itself makes of the request's prompts."""
    question = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    status, answer = pod.post(path + "/render", question)
    assert status == 200, answer
    return [prompt["token_ids"] for prompt in (answer if isinstance(answer, list) else [answer])]


def usage_of(answer: Any) -> tuple[int, int]:
    """Return prompt tokens and cached tokens, in whichever API's words."""
    usage = answer["usage"]
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    cached, created = usage["cache_read_input_tokens"], usage.get("cache_creation_input_tokens") or 0
    return usage["input_tokens"] + cached + created, cached


def generated(answer: Any, prompts: int) -> list[list[int]]:
    """Return each prompt's output tokens; APIs that do not tell them were asked for one token, which is enough."""
    choices = answer.get("choices")
    return [choice["token_ids"] for choice in choices] if choices else [[0]] * prompts


def text_of(answer: Any) -> str:
    """Return the first text that was generated."""
    if not (choices := answer.get("choices")):
        return ""
    return str(choices[0]["message"]["content"] if "message" in choices[0] else choices[0]["text"])


def read_events(stream: bytes) -> dict[str, Any]:
    """Put the events of a streamed chat or completion together to what it would be without streaming."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for line in stream.decode().splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        usage = event.get("usage") or usage
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"token_ids": [], "text": ""})
            choice["token_ids"] += part.get("token_ids") or []
            choice["text"] += part.get("text") or part.get("delta", {}).get("content") or ""
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}
