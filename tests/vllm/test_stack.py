"""The real stack before two real vLLM servers: what is predicted is what vLLM then finds in its cache."""

import asyncio
import itertools
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import Stack, eventually, running_stack
from tests.vllm.servers import BLOCK_SIZE, MODEL_NAME, VllmPod

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SEEN_WITHIN_SECONDS = 2.0  # what is promised of a restart, from the moment the pod serves again


@asynccontextmanager
async def stack_before(pods: Sequence[VllmPod], folder: Path, *, has_tokenizer: bool = True) -> AsyncIterator[Stack]:
    """Start the stack with the pods' addresses, a tokenizer folder, a model name, and more patience than by default.

    Without the folder the pods are asked for tokens.
    """
    flags = ("--model", MODEL_NAME, "--tokenizer", str(pods[0].model_folder)) if has_tokenizer else ()
    # two vLLM servers fill this machine's cores: what is tested here is the prediction, not the deadline of a lookup
    patient = "index_timeout_ms: 2000\nrender_timeout_ms: 5000\n"
    if not has_tokenizer:  # said, because the model's folder is on this machine and would be found
        patient += f"policy: {{models: {{served: [{{name: {MODEL_NAME}, tokens: auto}}]}}}}\n"
    async with running_stack(folder, *flags, settings=patient, endpoints=[pod.address for pod in pods]) as stack:
        yield stack


def text(words: int) -> str:
    """Return a text that shares no block with any other."""
    return f"{uuid.uuid4()} " + " ".join(f"the {i}th wave reached the harbour" for i in range(words))


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request: where it went, what was predicted for it and what vLLM says."""

    pod: str
    predicted: int
    cached: int
    answer: str
    conversation: str


@dataclass(slots=True)
class Client:
    """Sends requests one after the other, each once the index knows what the one before left in the cache."""

    stack: Stack
    served: list[Served] = field(default_factory=list)

    async def send(self, path: str, conversation: str = "", **body: Any) -> Served:
        request = {"model": MODEL_NAME, "temperature": 0, "max_tokens": 6, "return_token_ids": True} | body
        answer = await self.stack.send("POST", path, json=request)
        assert answer.status == 200, answer.body
        (choice,) = answer.json["choices"]
        decision = (await self.stack.state())["decisions"][0]
        assert decision["degraded"] == []
        assert decision["endpoint"] == answer.upstream
        served = Served(
            pod=answer.upstream,
            predicted=decision["matched_tokens"],
            cached=answer.cached_tokens,
            answer=choice["message"]["content"] if path == CHAT else choice["text"],
            conversation=conversation,
        )
        self.served.append(served)
        prompt = answer.json["prompt_token_ids"] if path == CHAT else choice["prompt_token_ids"]
        assert decision["prompt_tokens"] == len(prompt)
        await self._indexed([*prompt, *choice["token_ids"]], pod=served.pod)
        return served

    async def _indexed(self, tokens: list[int], *, pod: str) -> None:
        """Wait until the index has every block that vLLM filled; it never computes the last token it generated."""
        blocks = (len(tokens) - 1) // BLOCK_SIZE
        body = {"model": MODEL_NAME, "prompt": [*tokens, 0]}

        def complete(explanation: Any) -> bool:
            held = {each["endpoint"]: each["matched_blocks"] for each in explanation["candidates"]}
            return bool(held[pod] >= blocks)

        await eventually(lambda: self.stack.explain(body), complete)


def hits_total(pod: VllmPod) -> float:
    """Return the prompt tokens that the pod has found in its cache since it started."""
    series = re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", pod.get_text("/metrics"), re.MULTILINE)
    return sum(map(float, series))


@pytest.mark.parametrize("has_tokenizer", [True, False], ids=["folder", "pods"])
async def test_thirty_mixed_requests_hit_exactly_as_predicted(
    has_tokenizer: bool, vllm_pods: tuple[VllmPod, ...], tmp_path: Path
) -> None:
    before = {pod.address: hits_total(pod) for pod in vllm_pods}
    async with stack_before(vllm_pods, tmp_path, has_tokenizer=has_tokenizer) as stack:
        client = Client(stack)
        chats = {name: [{"role": "system", "content": text(20)}] for name in ("a", "b", "c")}
        shared, repeated = text(40), text(33)
        for turn in range(6):
            for name, messages in chats.items():
                messages.append({"role": "user", "content": f"Question {turn} of {name}: {text(turn * 3)}"})
                served = await client.send(CHAT, name, messages=messages)
                messages.append({"role": "assistant", "content": served.answer})
            await client.send(COMPLETION, prompt=f"{shared} {text(5)}")
            await client.send(COMPLETION, prompt=repeated)
    assert len(client.served) == 30
    assert [each.predicted for each in client.served] == [each.cached for each in client.served]
    assert sum(each.cached > 0 for each in client.served) >= 20
    for name in chats:
        (pod,) = {each.pod for each in client.served if each.conversation == name}
        assert pod in before
    for vllm in vllm_pods:
        predicted = sum(each.predicted for each in client.served if each.pod == vllm.address)
        assert hits_total(vllm) - before[vllm.address] == predicted


async def test_a_prompt_of_whole_blocks_hits_one_block_less(vllm_pods: tuple[VllmPod, ...], tmp_path: Path) -> None:
    async with stack_before(vllm_pods, tmp_path) as stack:
        client = Client(stack)
        tokens = [5 + (int(digit, 16) * 97 + i) % 4000 for i, digit in enumerate(uuid.uuid4().hex * 2)]
        assert len(tokens) == 2 * BLOCK_SIZE
        for _ in range(3):
            await client.send(COMPLETION, prompt=tokens)
    hits = [(each.predicted, each.cached) for each in client.served]
    assert hits == [(0, 0), (BLOCK_SIZE, BLOCK_SIZE), (BLOCK_SIZE, BLOCK_SIZE)]


async def test_a_pod_that_dies_costs_its_clients_no_error(
    fresh_vllm_pods: Callable[[int], tuple[VllmPod, ...]], tmp_path: Path
) -> None:
    pods = await asyncio.to_thread(fresh_vllm_pods, 2)
    async with stack_before(pods, tmp_path) as stack:
        client = Client(stack)
        messages = [{"role": "system", "content": text(30)}, {"role": "user", "content": "Why?"}]
        holder = (await client.send(CHAT, messages=messages)).pod
        victim = next(pod for pod in pods if pod.address == holder)
        survivor = next(pod for pod in pods if pod.address != holder)
        await asyncio.to_thread(victim.kill)
        # a request on a kept connection that Envoy has not seen closing is lost
        await eventually(lambda: stack.upstream_connections(victim.address), lambda count: count == 0)
        body = {"model": MODEL_NAME, "max_tokens": 2, "messages": messages}
        answers = [await stack.send("POST", CHAT, json=body) for _ in range(8)]
        assert [(answer.status, answer.upstream) for answer in answers] == [(200, survivor.address)] * 8
        state = await eventually(
            stack.state, lambda state: any(each["state"] == "unreachable" for each in state["endpoints"])
        )
        assert {each["address"]: each["state"] for each in state["endpoints"]} == {
            victim.address: "unreachable",
            survivor.address: "ready",
        }


async def test_a_restarted_pod_attracts_nothing_by_its_old_blocks(
    fresh_vllm_pods: Callable[..., tuple[VllmPod, ...]], tmp_path: Path
) -> None:
    pods = await asyncio.to_thread(fresh_vllm_pods, 2)
    async with stack_before(pods, tmp_path) as stack:
        client = Client(stack)
        messages = [{"role": "system", "content": text(30)}, {"role": "user", "content": "Why?"}]
        holder = (await client.send(CHAT, messages=messages)).pod
        victim = next(pod for pod in pods if pod.address == holder)
        assert (await client.send(CHAT, messages=messages)).cached > 0

        await asyncio.to_thread(victim.kill)
        await asyncio.to_thread(fresh_vllm_pods, 1, [victim.address])
        healthy_at = time.monotonic()

        def forgotten(explanation: Any) -> bool:
            seen = [
                (each["state"], each["matched_blocks"])
                for each in explanation["candidates"]  # without those that nobody listens at
                if each["endpoint"] == victim.address
            ]
            return (explanation["degraded"], seen) == ([], [("ready", 0)])

        body = {"model": MODEL_NAME, "messages": messages}
        await eventually(lambda: stack.explain(body, path=CHAT), forgotten)
        seen_after_seconds = time.monotonic() - healthy_at
        assert seen_after_seconds < SEEN_WITHIN_SECONDS

        def followed(explanation: Any) -> bool:  # until then a decision for that pod says that its events are missing
            states = {each["endpoint"]: each["index_state"] for each in explanation["candidates"]}
            return states == dict.fromkeys((pod.address for pod in pods), None)

        await eventually(lambda: stack.explain(body, path=CHAT), followed)
        client.served.clear()
        for turn in range(6):
            messages.append({"role": "user", "content": f"Question {turn}: {text(4)}"})
            await client.send(CHAT, messages=messages)
            await client.send(COMPLETION, prompt=text(20 + turn))
        assert [each.predicted for each in client.served] == [each.cached for each in client.served]
        assert {each.pod for each in client.served} == {pod.address for pod in pods}


async def test_awkward_bodies_are_judged_by_vllm_itself(vllm_pods: tuple[VllmPod, ...], tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": -1},
    ]
    async with stack_before(vllm_pods, tmp_path) as stack:
        for body, pod in zip(bodies, itertools.cycle(vllm_pods), strict=False):
            request = {"model": MODEL_NAME} | body
            direct, _ = await asyncio.to_thread(pod.post, CHAT, request)
            through = await stack.send("POST", CHAT, json=request)
            assert (through.status, through.headers.get("x-kvmesh-reason")) == (direct, None)
