"""Prefill and decode on different pods: real Envoy, Redis, indexer and picker before simulated pods that hand over.

The simulated pods count reads of blocks that were free by then (`podsim_stale_kv_reads_total`): a real pod cannot
notice them, and answers with other words.
"""

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.stack import Stack, eventually, running_stack, simulated_pods

CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
RACES = "rule: always, raceShare: 1, raceTtftSeconds: 60"
HANDS_OVER = ("--kv-transfer-config", json.dumps(CONNECTOR))  # as docs/guides/disaggregation.md says
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def text(words: int) -> str:
    """Return a text that shares no block with any other."""
    return f"{uuid.uuid4()} " + " ".join(f"the {i}th wave reached the harbour" for i in range(words))


@asynccontextmanager
async def split_stack(
    folder: Path,
    prefill: int,
    decode: int,
    *flags: str,
    policy: str = "rule: always",
    top: str = "",
    one_more: Sequence[str] = (),
) -> AsyncIterator[tuple[Stack, list[str], list[str], dict[str, Any]]]:
    """Start the stack before so many pods of each role; yield it with their addresses and processes.

    `top`: further lines of the policy. `one_more`: the flags of one more prefill pod, which comes first.
    """
    async with AsyncExitStack() as exits:
        pods: dict[str, Any] = {}
        if one_more:
            pods |= await exits.enter_async_context(simulated_pods(1, *HANDS_OVER, *one_more))
            prefill += 1
        alike = prefill + decode - len(pods)
        pods |= await exits.enter_async_context(simulated_pods(alike, *HANDS_OVER, *flags))
        names = list(pods)
        (folder / "policy.yaml").write_text(f"disaggregation: {{enabled: true, {policy}}}\n{top}", encoding="utf-8")
        settings = (
            f"roles: {','.join(f'{name}=prefill' for name in names[:prefill])}\n"
            f"policy: {folder / 'policy.yaml'}\nsample_share: 1.0\nindex_timeout_ms: 2000\n"
        )
        stack = await exits.enter_async_context(running_stack(folder, endpoints=names, settings=settings))
        await eventually(stack.state, lambda state: all(pod["state"] == "ready" for pod in state["endpoints"]))
        yield stack, names[:prefill], names[prefill:], pods


async def page(stack: Stack, pod: str) -> str:
    async with stack.http.get(f"http://{pod}/metrics") as response:
        return await response.text()


async def pods_sum(stack: Stack, pods: Sequence[str], name: str) -> float:
    """Return the sum of a metric over these pods; a pod that is gone counts 0."""
    total = 0.0
    for pod in pods:
        try:
            lines = (await page(stack, pod)).splitlines()
        except aiohttp.ClientError:
            continue
        total += sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[ {{]", line))
    return total


def forms(prompt: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the four forms of one request."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": 12}
    completion = {"model": "tiny", "prompt": prompt, "max_tokens": 12}
    return [(CHAT, chat), (COMPLETIONS, completion), *((p, b | {"stream": True}) for p, b in (
        (CHAT, chat | {"stream_options": {"include_usage": True}}), (COMPLETIONS, completion)
    ))]  # fmt: skip


async def answer(stack: Stack, path: str, body: dict[str, Any], *, pod: str | None = None) -> tuple[int, str, str]:
    """Return status, the pod that answered, and the text of an answer, streamed or not."""
    base = stack.ready["gateway"] if pod is None else f"http://{pod}"
    async with stack.http.post(f"{base}{path}", json=body) as response:
        raw = await response.text()
        served_by = response.headers.get("x-kvmesh-upstream", "")
    if response.status != 200:
        return response.status, served_by, raw
    documents = [raw] if not body.get("stream") else re.findall(r"^data: (\{.*)$", raw, re.MULTILINE)
    choices = [choice for document in documents for choice in json.loads(document)["choices"]]
    return 200, served_by, "".join(
        choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
        for choice in choices
    )  # fmt: skip


async def answers(answered: list[int], least: int) -> None:
    """Wait until there are so many answers."""

    async def count() -> int:
        return len(answered)

    await eventually(count, lambda seen: seen >= least)


async def test_every_form_of_a_request_is_prefilled_on_one_pod_and_decoded_on_another(tmp_path: Path) -> None:
    async with split_stack(tmp_path, 1, 2) as (stack, prefill, decode, _):
        asked = 0
        for number in range(6):
            for path, body in forms(text(20 + number)):
                status, _, words = await answer(stack, path, body)
                whole = await answer(stack, path, body, pod=decode[0])
                assert (status, words) == (200, whole[2])
                asked += 1
        assert await stack.metric("kvmesh_prefill_legs_total") == asked
        assert await pods_sum(stack, prefill, "vllm:request_success_total") == asked
        assert await pods_sum(stack, decode, "vllm:nixl_bytes_transferred_count") == asked
        assert await pods_sum(stack, decode, "podsim_stale_kv_reads_total") == 0
        # vLLM's usage says what the prefill pod held: predicted equals realised
        predicted = await stack.metric("kvmesh_realised_predicted_tokens_total")
        assert predicted == await stack.metric("kvmesh_realised_cached_tokens_total") > 0
        # what was handed over is held by both pods
        known = await stack.indexed(body["prompt"], tokens=64)
        assert known["prefill"]["remote_uncached_tokens"] < known["prompt_tokens"] / 2, known["prefill"]
        await eventually(stack.open_bookings, lambda open_: open_ == 0)


async def test_of_two_pods_that_race_the_slow_one_is_ended_and_its_blocks_are_free_at_once(tmp_path: Path) -> None:
    slow = ("--prefill-tokens-per-second", "20")
    async with split_stack(tmp_path, 1, 1, policy=RACES, one_more=slow) as (stack, (late, quick), (decode,), _):
        asked = 0
        for number in range(3):
            for path, body in forms(text(40 + number)):
                status, _, words = await answer(stack, path, body)
                assert (status, words) == (200, (await answer(stack, path, body, pod=decode))[2])
                asked += 1
        races = await stack.metric("kvmesh_prefill_races_total")
        assert races > 0
        assert await stack.metric(r'kvmesh_prefill_legs_total\{[^}]*outcome="lost"\}') == races
        assert await stack.metric(r'kvmesh_prefill_legs_total\{[^}]*outcome="answered"\}') == asked
        assert await pods_sum(stack, [quick], "vllm:request_success_total") == asked
        await eventually(lambda: pods_sum(stack, [late], "vllm:num_requests_running"), lambda running: running == 0)
        await eventually(lambda: pods_sum(stack, [late], "vllm:kv_cache_usage_perc"), lambda usage: usage == 0.0)
        assert await pods_sum(stack, [late], "vllm:nixl_num_kv_expired_reqs_total") == 0
        assert await pods_sum(stack, [decode], "podsim_stale_kv_reads_total") == 0
        await eventually(stack.open_bookings, lambda open_: open_ == 0)


async def test_what_a_loser_has_computed_to_its_end_is_kept_until_its_lease_is_over(tmp_path: Path) -> None:
    lease = json.dumps(CONNECTOR | {"kv_connector_extra_config": {"kv_lease_duration": 1}})
    flags = ("--kv-transfer-config", lease)  # the last one counts
    async with split_stack(tmp_path, 2, 1, *flags, policy=RACES) as (stack, prefill, decode, _):
        asked = 0
        for number in range(6):
            for path, body in forms(text(20 + number)):
                status, _, words = await answer(stack, path, body)
                assert (status, words) == (200, (await answer(stack, path, body, pod=decode[0]))[2])
                asked += 1
        races = await stack.metric("kvmesh_prefill_races_total")
        assert races > 0
        assert await stack.metric(r'kvmesh_prefill_legs_total\{[^}]*outcome="(late|lost)"\}') == races
        # an answer that is on its way when its connection is closed has left its blocks, too
        late = await stack.metric(r'kvmesh_prefill_legs_total\{[^}]*outcome="late"\}')
        await eventually(lambda: pods_sum(stack, prefill, "vllm:kv_cache_usage_perc"), lambda usage: usage == 0.0)
        assert late <= await pods_sum(stack, prefill, "vllm:nixl_num_kv_expired_reqs_total") <= races
        assert await pods_sum(stack, decode, "vllm:nixl_bytes_transferred_count") == asked
        assert await pods_sum(stack, decode, "podsim_stale_kv_reads_total") == 0


async def test_a_prefill_pod_that_dies_costs_no_client_an_error(tmp_path: Path) -> None:
    async with split_stack(tmp_path, 2, 2) as (stack, prefill, decode, processes):
        answered: list[int] = []

        async def load(number: int) -> None:
            while len(answered) < 60 + number:
                path, body = forms(text(200))[number % 4]
                status, _, _ = await answer(stack, path, body)
                answered.append(status)

        async with asyncio.TaskGroup() as tasks:
            for number in range(6):
                tasks.create_task(load(number))
            await eventually(lambda: pods_sum(stack, prefill, "vllm:request_success_total"), lambda sum_: sum_ > 5)
            for pod in prefill:
                processes[pod].kill()
                await answers(answered, len(answered) + 10)
        assert set(answered) == {200}
        await eventually(stack.open_bookings, lambda open_: open_ == 0)
        assert await pods_sum(stack, decode, "podsim_stale_kv_reads_total") == 0


async def test_a_client_that_leaves_ends_the_leg_in_the_engine(tmp_path: Path) -> None:
    async with split_stack(tmp_path, 1, 1, "--prefill-tokens-per-second", "50") as (stack, (prefill,), _, _p):
        path, body = forms(text(200))[0]
        task = asyncio.create_task(answer(stack, path, body))
        await eventually(lambda: pods_sum(stack, [prefill], "vllm:num_requests_running"), lambda running: running == 1)
        task.cancel()
        await eventually(lambda: pods_sum(stack, [prefill], "vllm:num_requests_running"), lambda running: running == 0)
        await eventually(lambda: pods_sum(stack, [prefill], "vllm:kv_cache_usage_perc"), lambda usage: usage == 0.0)
        await eventually(stack.open_bookings, lambda open_: open_ == 0)
