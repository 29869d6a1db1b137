"""A pod over HTTP: conversations, streams, load, clients that vanish; also as the openai client sees it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
from prometheus_client.parser import text_string_to_metric_families

from podsim.core.scheduler import EngineSettings
from podsim.model_folder import TINY_MODEL, load_model_folder
from podsim.pod import PodSettings
from podsim.publisher import PublisherSettings
from podsim.server import RunningPod, running_pods

FOLDER = load_model_folder(TINY_MODEL)
FAST = EngineSettings(total_blocks=200, prefill_tokens_per_second=1e6, inter_token_seconds=0.001)
SLOW = EngineSettings(total_blocks=200, max_running=1, prefill_tokens_per_second=1e6, inter_token_seconds=0.02)
DEADLINE_SECONDS = 10.0


@asynccontextmanager
async def pod_and_client(
    engine: EngineSettings = FAST,
) -> AsyncIterator[tuple[RunningPod, openai.AsyncOpenAI]]:
    settings = PodSettings(max_model_len=2048, engine=engine)
    publisher = PublisherSettings(host="127.0.0.1")
    async with (
        running_pods(settings, folder=FOLDER, publisher=publisher) as [pod],
        openai.AsyncOpenAI(
            base_url=f"{pod.base_url}/v1", api_key="none", timeout=DEADLINE_SECONDS, max_retries=0
        ) as client,
    ):
        yield pod, client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


async def metric(pod: RunningPod, name: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{pod.base_url}/metrics") as response:
        text = await response.text()
    [value] = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    ]
    return value


def cached_tokens(usage: Any) -> int:
    return int(usage.prompt_tokens_details.cached_tokens)


async def test_the_second_turn_of_a_conversation_finds_the_first_one_in_the_cache_generated_tokens_included() -> None:
    async with pod_and_client() as (pod, client):
        chat: list[Any] = [{"role": "user", "content": "Tell me about the block pool. " * 20}]
        first = await client.chat.completions.create(model="tiny", messages=chat)
        assert first.choices[0].finish_reason == "stop"
        chat += [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "More."},
        ]
        second = await client.chat.completions.create(model="tiny", messages=chat, max_tokens=4)
        assert first.usage is not None
        assert second.usage is not None
        # the last token of the first turn was never computed, so it is in no block
        assert cached_tokens(second.usage) == (first.usage.total_tokens - 1) // 16 * 16
        assert cached_tokens(first.usage) == 0
        assert await metric(pod, "vllm:prefix_cache_hits_total") == cached_tokens(second.usage)
        assert (
            await metric(pod, "vllm:prefix_cache_queries_total")
            == first.usage.prompt_tokens + second.usage.prompt_tokens
        )


async def test_an_exact_repeat_is_answered_equally_and_hits_at_most_all_tokens_but_one() -> None:
    async with pod_and_client() as (_, client):
        prompt = list(range(100, 164))
        first = await client.completions.create(model="tiny", prompt=prompt, max_tokens=8)
        again = await client.completions.create(model="tiny", prompt=prompt, max_tokens=8)
        assert first.choices[0].text == again.choices[0].text != ""
        assert cached_tokens(again.usage) == 48


async def test_a_stream_says_the_same_as_the_whole_answer_token_by_token() -> None:
    async with pod_and_client() as (_, client):
        chat: list[Any] = [{"role": "user", "content": "Stream, please."}]
        whole = await client.chat.completions.create(model="tiny", messages=chat, max_tokens=20)
        stream = await client.chat.completions.create(
            model="tiny", messages=chat, max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
        assert "".join(text or "" for text in texts) == whole.choices[0].message.content
        assert len(texts) == 21, "one chunk for the role, then one for each token"
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-2:] == [None, "length"]
        assert chunks[-1].usage is not None
        assert whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 20


async def test_several_prompts_and_choices_come_back_in_their_order() -> None:
    async with pod_and_client() as (_, client):
        both = await client.completions.create(model="tiny", prompt=["abc", "defg"], n=2, max_tokens=9)
        alone = [
            await client.completions.create(model="tiny", prompt=prompt, n=2, max_tokens=9)
            for prompt in ("abc", "defg")
        ]
        expected = [choice.text for answer in alone for choice in answer.choices]
        assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in both.choices] == expected
        assert len(set(expected)) == 4
        stream = await client.completions.create(model="tiny", prompt=["abc", "defg"], n=2, max_tokens=9, stream=True)
        texts = ["", "", "", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == expected


async def test_a_stop_string_ends_the_answer_before_it() -> None:
    async with pod_and_client() as (_, client):
        whole = await client.completions.create(model="tiny", prompt="abc", max_tokens=30)
        word = whole.choices[0].text.split()[5]
        cut = await client.completions.create(model="tiny", prompt="abc", max_tokens=30, stop=[word])
        assert cut.choices[0].finish_reason == "stop"
        assert cut.choices[0].text == whole.choices[0].text[: whole.choices[0].text.index(word)]


async def test_a_request_beyond_the_slots_waits_and_is_seen_waiting() -> None:
    async with pod_and_client(SLOW) as (pod, client), asyncio.TaskGroup() as tasks:
        requests = [
            tasks.create_task(
                client.completions.create(
                    model="tiny", prompt=f"{number}", max_tokens=20, extra_body={"ignore_eos": True}
                )
            )
            for number in range(2)
        ]
        await until(lambda: pod.pod.scheduler.waiting == 1)
        assert await metric(pod, "vllm:num_requests_running") == 1
        assert await metric(pod, "vllm:num_requests_waiting") == 1
        assert await metric(pod, "vllm:kv_cache_usage_perc") > 0
        for request in requests:
            answer = await request
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 20


async def test_a_client_that_goes_away_frees_its_slot_and_its_blocks() -> None:
    async with pod_and_client(SLOW) as (pod, _), aiohttp.ClientSession() as session:
        for streamed in (True, False):
            body = {"prompt": "abc", "max_tokens": 1500, "ignore_eos": True, "stream": streamed}
            request = asyncio.create_task(read_all(session, f"{pod.base_url}/v1/completions", body))
            await until(lambda: pod.pod.scheduler.running == 1)
            request.cancel()
            await until(lambda: pod.pod.scheduler.running == 0)
            assert pod.pod.scheduler.pool.usage == 0.0
        assert pod.pod.metrics.finished["abort"] == 2


async def read_all(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> bytes:
    async with session.post(url, json=body) as response:
        return await response.read()


async def test_the_openai_client_understands_the_refusals() -> None:
    async with pod_and_client() as (_, client):
        for model, prompt, expected in (
            ("nope", "abc", openai.NotFoundError),
            ("tiny", "", openai.BadRequestError),
            ("tiny", "word " * 3000, openai.BadRequestError),
        ):
            try:
                await client.completions.create(model=model, prompt=prompt)
            except openai.APIStatusError as error:
                assert isinstance(error, expected)
                assert isinstance(error.body, dict)
                assert error.body["code"] == error.status_code
            else:
                raise AssertionError(f"{model} {prompt[:9]!r} was served")


async def test_the_openai_client_lists_the_model() -> None:
    async with pod_and_client() as (_, client):
        [card] = (await client.models.list()).data
        assert (card.id, card.object, card.owned_by) == ("tiny", "model", "vllm")


async def test_pods_of_one_process_have_ports_and_caches_of_their_own() -> None:
    settings = PodSettings(max_model_len=1024, engine=FAST)
    publisher = PublisherSettings(host="127.0.0.1")
    async with running_pods(settings, folder=FOLDER, publisher=publisher, count=2) as pods:
        addresses = {(pod.base_url, pod.events_endpoint, pod.replay_endpoint) for pod in pods}
        assert len({part for address in addresses for part in address}) == 6
        async with aiohttp.ClientSession() as session:
            for pod in pods:
                body = {"prompt": list(range(64)), "max_tokens": 1}
                answer = await read_all(session, f"{pod.base_url}/v1/completions", body)
                assert b'"cached_tokens":0' in answer
