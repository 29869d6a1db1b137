"""One real vLLM with two data-parallel ranks behind one port: documents return to their rank, predicted as cached."""

import asyncio
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from extproc.pools.plan_response import PREDICTED_HEADER
from tests.e2e.stack import Answer, eventually, running_stack
from tests.vllm.environment import VllmEnvironment
from tests.vllm.servers import BLOCK_SIZE, MODEL_NAME, VllmPod, running_pods

SETTINGS = "index_timeout_ms: 2000\nsample_share: 1.0\n"  # patient: the ranks fill this machine's cores
DOCUMENTS = 10


@pytest.fixture(scope="module")
def ranked_pod(
    vllm_environment: VllmEnvironment, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmPod]:
    logs, flags = tmp_path_factory.mktemp("ranks"), ("--data-parallel-size", "2")
    with running_pods(1, environment=vllm_environment, model_folder=tiny_model, logs=logs, extra_flags=flags) as [pod]:
        yield pod


def hits(pod: VllmPod) -> dict[str, int]:
    """Return each rank's prompt tokens from its cache."""
    found = re.findall(r'(?m)^vllm:prefix_cache_hits_total\{engine="(\d)"[^}]*\} (\S+)$', pod.get_text("/metrics"))
    return {rank: int(float(count)) for rank, count in found}


def predicted(answer: Answer) -> int:
    return int(answer.headers[PREDICTED_HEADER])


async def test_documents_return_to_their_rank(ranked_pod: VllmPod, tmp_path: Path) -> None:
    flags = ("--model", MODEL_NAME, "--tokenizer", str(ranked_pod.model_folder))
    ranks = [f"{ranked_pod.address}#{rank}" for rank in (0, 1)]
    async with running_stack(tmp_path, *flags, settings=SETTINGS, endpoints=[ranked_pod.address]) as stack:
        await eventually(
            stack.state,
            lambda state: [each["address"] for each in state["endpoints"] if each["index_state"] == "live"] == ranks,
        )
        texts = [f"{uuid.uuid4()} " + "the wave reached the harbour " * 30 for _ in range(DOCUMENTS)]

        async def ask(text: str, turn: int) -> Answer:
            if turn % 2:
                body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
                return await stack.send("POST", "/v1/chat/completions", json=body)
            return await stack.complete(text, model=MODEL_NAME)

        first = await asyncio.gather(*(ask(text, turn) for turn, text in enumerate(texts)))
        assert [answer.status for answer in first] == [200] * DOCUMENTS
        for text in texts[::2]:
            await stack.indexed(text, tokens=5 * BLOCK_SIZE, model=MODEL_NAME)
        before = hits(ranked_pod)
        for _ in range(2):
            for turn, text in enumerate(texts):
                answer = await ask(text, turn)
                assert (answer.status, predicted(answer)) == (200, answer.cached_tokens)
                assert answer.cached_tokens > 5 * BLOCK_SIZE
        gained = {rank: count - before[rank] for rank, count in hits(ranked_pod).items()}
        assert min(gained.values()) > 0, f"both ranks hold some: {gained}"
