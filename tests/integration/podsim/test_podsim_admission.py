"""A pod refuses with 503 beyond its queue limits, as vLLM does, counts it, and tells how long its phases took."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic

import aiohttp
import openai
import pytest

from kvmesh.pods.engine_metrics import parse_load
from kvmesh.pods.page_steps import at_once
from kvmesh.pods.pod_report import EndpointLoad
from podsim.core.scheduler import EngineSettings
from podsim.model_folder import TINY_MODEL, load_model_folder
from podsim.pod import PodSettings
from podsim.publisher import PublisherSettings
from podsim.server import RunningPod, running_pods

FOLDER = load_model_folder(TINY_MODEL)
SLOW = EngineSettings(total_blocks=400, max_running=1, prefill_tokens_per_second=10_000.0, inter_token_seconds=0.01)
DEADLINE_SECONDS = 10.0


@asynccontextmanager
async def pod_and_client(
    *, requests: int | None = None, tokens: int | None = None
) -> AsyncIterator[tuple[RunningPod, openai.AsyncOpenAI]]:
    settings = PodSettings(max_model_len=4096, max_queued_requests=requests, max_queued_tokens=tokens, engine=SLOW)
    async with (
        running_pods(settings, folder=FOLDER, publisher=PublisherSettings(host="127.0.0.1")) as [pod],
        openai.AsyncOpenAI(
            base_url=f"{pod.base_url}/v1", api_key="none", timeout=DEADLINE_SECONDS, max_retries=0
        ) as client,
    ):
        yield pod, client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


async def metrics_page(pod: RunningPod) -> bytes:
    async with aiohttp.ClientSession() as session, session.get(f"{pod.base_url}/metrics") as response:
        return await response.read()


async def load_of(pod: RunningPod) -> EndpointLoad:
    load = at_once(parse_load(await metrics_page(pod), reported_at=monotonic()))
    assert load is not None
    return load


def generate(client: openai.AsyncOpenAI, prompt: str, *, tokens: int) -> asyncio.Task[object]:
    async def run() -> object:
        return await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=tokens, extra_body={"ignore_eos": True}
        )

    return asyncio.create_task(run())


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_beyond_the_most_is_refused_in_vllms_words_before_anything_is_answered(streamed: bool) -> None:
    async with pod_and_client(requests=2) as (pod, client):
        open_ones = [generate(client, "abc", tokens=60) for _ in range(2)]
        await until(lambda: pod.pod.scheduler.running + pod.pod.scheduler.waiting == 2)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="tiny", prompt="abc", stream=streamed)
        assert caught.value.status_code == 503
        assert caught.value.body == {
            "message": "The engine is currently busy and cannot accept new requests. "
            "Please try again later or on a different instance.",
            "type": "Service Unavailable",
            "param": None,
            "code": 503,
        }
        assert caught.value.response.headers["content-type"].startswith("application/json")
        assert b'vllm:admission_rejections_total{model_name="tiny",reason="max_num_queued_reqs"} 1.0' in (
            await metrics_page(pod)
        )
        await asyncio.gather(*open_ones)
        await client.completions.create(model="tiny", prompt="abc", max_tokens=1)


async def test_prompts_that_are_not_computed_yet_close_a_pod_with_a_limit_for_them() -> None:
    async with pod_and_client(tokens=1000) as (pod, client):
        first = generate(client, "word " * 3000, tokens=1)
        await until(lambda: pod.pod.scheduler.running == 1)
        with pytest.raises(openai.InternalServerError, match="prefill token backlog limit"):
            await client.completions.create(model="tiny", prompt="abc")
        await first
        await client.completions.create(model="tiny", prompt="abc", max_tokens=1)
        assert pod.pod.metrics.rejections == {"max_num_queued_reqs": 0, "max_num_queued_tokens": 1}


async def test_the_phases_of_a_request_are_told_as_the_picker_reads_them() -> None:
    async with pod_and_client() as (pod, client):
        await generate(client, "word " * 1000, tokens=11)
        load = await load_of(pod)
        assert (load.prefill_count, load.first_token_count, load.inter_token_count) == (1, 1, 10)
        assert load.prefill_computed_tokens == load.prefix_query_tokens > 1000
        assert load.prefill_seconds_sum >= load.prefill_computed_tokens / 10_000 * 0.9
        assert load.inter_token_seconds_sum >= 0.09
        assert load.first_token_seconds_sum >= load.prefill_seconds_sum
