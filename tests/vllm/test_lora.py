"""Real LoRA adapters on two real vLLM servers that hold one adapter each at a time: requests go where theirs is."""

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import Stack, eventually, running_stack
from tests.vllm.checked_client import COMPLETION, CheckedClient
from tests.vllm.environment import VllmEnvironment
from tests.vllm.servers import MODEL_NAME, VllmPod, running_pods
from tests.vllm.tiny_adapters import RANK, write_adapter

ADA, BEE = "ada", "bee"
SETTINGS = "index_timeout_ms: 2000\nsample_share: 1.0\n"  # patient: the servers fill this machine's cores


@pytest.fixture(scope="module")
def lora_pods(
    vllm_environment: VllmEnvironment, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmPod, ...]]:
    """Two servers that know both adapters and have one slot each."""
    folder = tmp_path_factory.mktemp("adapters")
    modules = [f"{name}={write_adapter(folder, name=name)}" for name in (ADA, BEE)]
    flags = ("--enable-lora", "--max-loras", "1", "--max-lora-rank", str(RANK), "--lora-modules", *modules)
    logs = tmp_path_factory.mktemp("lora")
    with running_pods(2, environment=vllm_environment, model_folder=tiny_model, logs=logs, extra_flags=flags) as pods:
        yield pods


@asynccontextmanager
async def stack_before(pods: tuple[VllmPod, ...], folder: Path) -> AsyncIterator[Stack]:
    flags = ("--model", MODEL_NAME, "--tokenizer", str(pods[0].model_folder))
    async with running_stack(folder, *flags, settings=SETTINGS, endpoints=[pod.address for pod in pods]) as stack:
        await eventually(stack.state, lambda state: all(pod["adapters"] == [ADA, BEE] for pod in state["endpoints"]))
        yield stack


def text(words: int) -> str:
    """Return a text that shares no block with any other."""
    return f"{uuid.uuid4()} " + " ".join(f"the {i}th wave reached the harbour" for i in range(words))


async def both_rate(stack: Stack, adapter: str, scores: Mapping[str, float]) -> None:
    """Wait until the picker knows both pods' load and rates them so for a request of this adapter."""

    def holds(explanation: Any) -> bool:
        candidates = explanation["candidates"]
        rated = {each["endpoint"]: each["scores"]["lora"] for each in candidates}
        return rated == scores and all(each["running"] is not None for each in candidates)

    await eventually(lambda: stack.explain({"model": adapter, "prompt": text(1)}), holds)


@asynccontextmanager
async def kept_generating(pod: VllmPod, adapter: str, stack: Stack) -> AsyncIterator[None]:
    """Have the pod generate with the adapter; past the picker, which can learn of it from the pod's report only."""
    body = {"model": adapter, "prompt": text(4), "max_tokens": 3500, "ignore_eos": True, "stream": True}

    async def generate() -> None:
        while True:  # the model is so small that an answer may end before the test does
            async with stack.http.post(f"{pod.url}{COMPLETION}", json=body) as stream:
                assert stream.status == 200
                await stream.read()

    task = asyncio.create_task(generate(), name="keep a pod generating")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))
    assert task.cancelled(), task.exception()


def adapters_seen(pod: VllmPod, *, since: float) -> set[str]:
    """Return the adapters that the pod has had requests for since then (unix seconds): a series' value is its time."""
    series = re.findall(r"^vllm:lora_requests_info\{(.*)\} (\S+)$", pod.get_text("/metrics"), re.MULTILINE)
    lists = [
        found for labels, at in series if float(at) > since for found in re.findall(r'_adapters="([^"]*)"', labels)
    ]
    return {name for names in lists for name in names.split(",")} - {""}


async def test_requests_follow_their_adapter_to_the_pod_that_has_loaded_it(
    lora_pods: tuple[VllmPod, ...], tmp_path: Path
) -> None:
    idle, busy = lora_pods
    started = time.time()
    async with stack_before(lora_pods, tmp_path) as stack:
        async with kept_generating(busy, ADA, stack):
            await both_rate(stack, BEE, {idle.address: 0.8, busy.address: 0.0})
            await both_rate(stack, ADA, {idle.address: 0.8, busy.address: 1.0})
            # a server that has no core for seconds reports nothing meanwhile, and loses its requests rightly
            for model, pod, scores in (
                (BEE, idle, {idle.address: 0.8, busy.address: 0.0}),
                (ADA, busy, {idle.address: 0.8, busy.address: 1.0}),
                (ADA, busy, {idle.address: 0.8, busy.address: 1.0}),
                (BEE, idle, {idle.address: 1.0, busy.address: 0.0}),
            ):
                await both_rate(stack, model, scores)
                answer = await stack.complete(text(3), model=model)
                assert (answer.status, answer.upstream) == (200, pod.address)
        # both are loaded and nothing runs: each stays where it is
        for _ in range(6):
            for model, pod, other in ((ADA, busy, idle), (BEE, idle, busy)):
                await both_rate(stack, model, {pod.address: 1.0, other.address: 0.8})
                assert (await stack.complete(text(3), model=model)).upstream == pod.address
    assert adapters_seen(idle, since=started) == {BEE}
    assert adapters_seen(busy, since=started) == {ADA}


async def test_one_prompt_is_another_for_every_adapter_and_predicted_so(
    lora_pods: tuple[VllmPod, ...], tmp_path: Path
) -> None:
    async with stack_before(lora_pods, tmp_path) as stack:
        client = CheckedClient(stack, {pod.address: pod for pod in lora_pods})
        prompt = text(30)
        for turn in range(4):
            for model in (ADA, MODEL_NAME, BEE):
                body = {"prompt": f"{prompt} {text(turn)}", "max_tokens": 4, "return_token_ids": True}
                await client.send(model, COMPLETION, model=model, **body)
        metrics = {
            name: await stack.metric(f"kvmesh_realised_{name}_total") for name in ("predicted_tokens", "cached_tokens")
        }
    outcomes = client.outcomes
    assert [each.predicted for each in outcomes] == [each.cached for each in outcomes]
    assert [each.cached > 0 for each in outcomes] == [False] * 3 + [True] * 9
    for model in (ADA, BEE):
        assert len({each.pod for each in outcomes if each.model == model}) == 1
    cached = sum(each.cached for each in outcomes)
    assert metrics == {"predicted_tokens": cached, "cached_tokens": cached}
