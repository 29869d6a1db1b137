"""Prefill and decode on different pods, as vLLM 0.32's NixlConnector does it: both legs, and what goes wrong."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.pods.engine_metrics import parse_load
from kvmesh.pods.page_steps import at_once
from podsim import kv_loader
from podsim.core.generate import prompt_seed
from podsim.core.link import LinkSettings
from podsim.core.scheduler import EngineSettings
from podsim.errors import PeerError
from podsim.model_folder import TINY_MODEL, load_model_folder
from podsim.pod import PodSettings
from podsim.publisher import PublisherSettings
from podsim.server import RunningPod, running_pods
from podsim.side_channel import Listener, connected
from podsim.wire.kv_transfer import KvTransferConfig, LoadFailurePolicy
from podsim.wire.side_channel import Heartbeat, Hello, Message, Read, Release, Reply

FOLDER = load_model_folder(TINY_MODEL)
FAST = EngineSettings(total_blocks=201, prefill_tokens_per_second=1e6, inter_token_seconds=0.001)
LINK = LinkSettings(bytes_per_token=1000, bytes_per_second=1e9, fixed_seconds=0.0)
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PROMPT = list(range(100, 200))  # 100 tokens: six full blocks and one of four tokens
FAILURE = {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}}
DEADLINE_SECONDS = 20.0


def settings(role: str, *, engine: EngineSettings = FAST, link: LinkSettings = LINK, **config: Any) -> PodSettings:
    return PodSettings(
        max_model_len=2048, engine=engine, kv_link=link, kv_transfer=KvTransferConfig(kv_role=role, **config)
    )


@asynccontextmanager
async def pods(*each: PodSettings) -> AsyncIterator[tuple["Client", ...]]:
    """A pod for each, whatever its role."""
    async with (
        asyncio.timeout(DEADLINE_SECONDS * 2),
        aiohttp.ClientSession() as http,
        running_pods(each, folder=FOLDER, publisher=PublisherSettings(host="127.0.0.1")) as running,
    ):
        yield tuple([Client(pod, http) for pod in running])


class Client:
    """One pod as its clients see it."""

    def __init__(self, pod: RunningPod, http: aiohttp.ClientSession) -> None:
        self.pod = pod
        self._http = http

    async def post(self, path: str = "/v1/completions", **body: Any) -> tuple[int, Any]:
        async with self._http.post(self.pod.base_url + path, json=body) as response:
            return response.status, await response.json()

    async def complete(self, prompt: Sequence[int] = PROMPT, **body: Any) -> Any:
        status, answer = await self.post(prompt=prompt, **body)
        assert status == 200, answer
        return answer

    async def prefill(self, prompt: Sequence[int] = PROMPT, **body: Any) -> dict[str, Any]:
        answer = await self.complete(prompt, **{"max_tokens": 1, "kv_transfer_params": PREFILL, **body})
        params: dict[str, Any] = answer["kv_transfer_params"]
        return params

    async def page(self) -> str:
        async with self._http.get(f"{self.pod.base_url}/metrics") as response:
            return await response.text()

    async def metric(self, name: str, **labels: str) -> float:
        [value] = [
            sample.value
            for family in text_string_to_metric_families(await self.page())
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return value

    async def metrics(self, *names: str) -> tuple[float, ...]:
        return tuple([await self.metric(name) for name in names])

    @property
    def used_blocks(self) -> int:
        pool = self.pod.pod.scheduler.pool
        return pool.total_blocks - 1 - pool.free_blocks


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


async def until_metric(client: Client, name: str, value: float, **labels: str) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while await client.metric(name, **labels) != value:
            await asyncio.sleep(0.005)


def text(answer: Any) -> str:
    told = answer["choices"][0]["text"]
    assert isinstance(told, str)
    return told


def without(params: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != key}


async def test_a_prefill_leg_answers_with_vllms_fields_and_its_blocks_stay_in_use() -> None:
    async with pods(settings("kv_producer")) as (prefiller,):
        answer = await prefiller.complete(max_tokens=1, kv_transfer_params=PREFILL, request_id="abc")
        params = answer["kv_transfer_params"]
        request_id = params.pop("remote_request_id")
        assert request_id.startswith("cmpl-abc-0-")
        transfer = prefiller.pod.pod.kv_transfer
        assert transfer is not None
        assert params == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]],
            "remote_engine_id": transfer.engine_id,
            "remote_host": "127.0.0.1",
            "remote_port": transfer.side_channel_port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": 100,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }
        assert await prefiller.metric("vllm:kv_cache_usage_perc") == pytest.approx(7 / 200)
        # a repetition shares the six cached blocks and keeps a seventh of its own
        again = await prefiller.prefill()
        assert (again["remote_block_ids"], again["remote_prefill_cached_tokens"]) == ([[1, 2, 3, 4, 5, 6, 8]], 96)
        assert await prefiller.metrics("vllm:external_prefix_cache_queries_total") == (104.0,)


async def test_a_longer_prefill_leg_tells_all_that_was_computed_and_not_what_was_cached() -> None:
    async with pods(settings("kv_producer")) as (prefiller,):
        params = await prefiller.prefill(list(range(96)), max_tokens=3, ignore_eos=True)
        assert (params["remote_num_tokens"], len(params["remote_block_ids"][0])) == (98, 7)
        assert "remote_prefill_cached_tokens" not in params


async def test_chats_name_their_engine_request_as_vllm_does() -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "kv_transfer_params": PREFILL}
    async with pods(settings("kv_both")) as (pod,):
        _, one = await pod.post("/v1/chat/completions", request_id="x", **chat)
        _, two = await pod.post("/v1/chat/completions", request_id="x", n=2, **chat)
        assert one["kv_transfer_params"]["remote_request_id"].startswith("chatcmpl-x-")
        assert two["kv_transfer_params"]["remote_request_id"].startswith("1_chatcmpl-x-")
        assert len(one["kv_transfer_params"]["remote_request_id"]) == len("chatcmpl-x-") + 8


async def test_the_decode_leg_fetches_the_prompt_says_what_one_pod_would_and_frees_the_prefill_pods_blocks() -> None:
    async with pods(settings("kv_producer"), settings("kv_consumer"), settings("kv_both")) as (
        prefiller,
        decoder,
        alone,
    ):
        params = await prefiller.prefill()
        answer = await decoder.complete(max_tokens=12, kv_transfer_params=params)
        assert text(answer) == text(await alone.complete(max_tokens=12))
        assert answer["kv_transfer_params"] is None
        # what the prefill pod had cached, not the 100 tokens that were loaded
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert prefiller.used_blocks == 0
        assert await decoder.metrics(
            "vllm:prefix_cache_queries_total",
            "vllm:prefix_cache_hits_total",
            "vllm:external_prefix_cache_queries_total",
            "vllm:external_prefix_cache_hits_total",
            "vllm:prompt_tokens_cached_total",
            "vllm:nixl_xfer_time_seconds_count",
            "vllm:nixl_bytes_transferred_sum",
            "vllm:nixl_num_descriptors_sum",
            "vllm:nixl_num_failed_transfers_total",
            "podsim_stale_kv_reads_total",
        ) == (100, 0, 100, 100, 100, 1, 7 * 16 * 1000, 7, 0, 0)
        assert await decoder.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == 100
        assert await prefiller.metrics(
            "vllm:nixl_num_kv_expired_reqs_total", "vllm:nixl_num_notifications_after_expiry_total"
        ) == (0, 0)
        # what came is cached: only the last block is fetched for the same prompt, since its last token is computed
        params = await prefiller.prefill()
        again = await decoder.complete(
            max_tokens=12, kv_transfer_params=without(params, "remote_prefill_cached_tokens")
        )
        assert text(again) == text(answer)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 100
        assert await decoder.metrics(
            "vllm:prefix_cache_hits_total",
            "vllm:external_prefix_cache_queries_total",
            "vllm:external_prefix_cache_hits_total",
            "vllm:nixl_bytes_transferred_sum",
            "podsim_stale_kv_reads_total",
        ) == (96, 104, 104, 8 * 16 * 1000, 0)


SLOW_LINK = replace(LINK, bytes_per_second=100.0)


@pytest.mark.parametrize(("there", "here"), [(SLOW_LINK, LINK), (LINK, SLOW_LINK)], ids=["slow there", "slow here"])
async def test_a_request_waits_as_deferred_while_its_prompt_is_on_its_way(
    there: LinkSettings, here: LinkSettings
) -> None:
    async with pods(settings("kv_producer", link=there), settings("kv_consumer", link=here)) as (prefiller, decoder):
        params = await prefiller.prefill()
        request = asyncio.create_task(decoder.complete(max_tokens=1, kv_transfer_params=params))
        await until_metric(decoder, "vllm:num_requests_kv_fetch_by_stage", 1, stage="in_progress")
        assert await decoder.metrics("vllm:num_requests_waiting", "vllm:num_requests_running") == (1, 0)
        assert await decoder.metric("vllm:num_requests_waiting_by_reason", reason="deferred") == 1
        load = at_once(parse_load((await decoder.page()).encode(), reported_at=0.0))
        assert load is not None
        assert (load.waiting_requests, load.fetching_requests) == (0, 1)  # it is in no queue
        assert await decoder.metric("vllm:kv_cache_usage_perc") == pytest.approx(7 / 200)
        # others are not held up by it
        await decoder.complete(list(range(50)), max_tokens=3)
        assert prefiller.used_blocks == 7
        # the client leaves: vLLM has the blocks over there freed at once, those here are written to until the load ends
        request.cancel()
        await until_metric(decoder, "vllm:num_requests_waiting", 0)
        await until(lambda: prefiller.used_blocks == 0)
        assert decoder.used_blocks == 7


async def test_what_is_read_for_a_client_that_has_left_is_not_counted_as_stale() -> None:
    slow = replace(LINK, bytes_per_second=200_000.0)  # half a second
    async with pods(settings("kv_producer", link=slow), settings("kv_consumer", link=slow)) as (prefiller, decoder):
        params = await prefiller.prefill()
        request = asyncio.create_task(decoder.complete(max_tokens=1, kv_transfer_params=params))
        await until_metric(decoder, "vllm:num_requests_kv_fetch_by_stage", 1, stage="in_progress")
        request.cancel()
        await until_metric(prefiller, "vllm:nixl_num_notifications_after_expiry_total", 1)
        await until(lambda: decoder.used_blocks == 0)
        assert await decoder.metric("podsim_stale_kv_reads_total") == 0


async def test_a_lease_ends_without_a_decode_leg_and_a_late_one_reads_stale_blocks_without_a_word() -> None:
    async with pods(settings("kv_producer", kv_lease_duration=0.05), settings("kv_consumer")) as (prefiller, decoder):
        params = await prefiller.prefill()
        await until(lambda: prefiller.used_blocks == 0)
        assert await prefiller.metric("vllm:nixl_num_kv_expired_reqs_total") == 1
        await decoder.complete(max_tokens=2, kv_transfer_params=params)
        assert await decoder.metrics("podsim_stale_kv_reads_total", "vllm:nixl_num_failed_transfers_total") == (1, 0)
        assert await prefiller.metric("vllm:nixl_num_notifications_after_expiry_total") == 1


async def test_the_lease_of_a_decode_leg_that_waits_for_a_slot_is_renewed_by_heartbeats() -> None:
    heard: list[Message] = []

    async def answer(message: Message) -> Reply:
        heard.append(message)
        return Reply()

    one_slot = replace(FAST, max_running=1, inter_token_seconds=0.05)
    consumer = settings("kv_consumer", engine=one_slot, kv_lease_duration=0.06)
    async with pods(consumer) as (decoder,), asyncio.TaskGroup() as tasks:
        listener = Listener(answer, spawn=tasks.create_task)
        await listener.bind("127.0.0.1")
        running = asyncio.create_task(decoder.complete([7] * 50, max_tokens=2000, ignore_eos=True))
        await until_metric(decoder, "vllm:num_requests_running", 1)
        params = {
            "do_remote_prefill": True,
            "remote_engine_id": "theirs",
            "remote_request_id": "leg",
            "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]],
            "remote_host": "127.0.0.1",
            "remote_port": listener.port,
        }
        request = asyncio.create_task(decoder.complete(max_tokens=2, kv_transfer_params=params))
        heartbeat = Heartbeat(engine_id="theirs", request_ids=["leg"])
        await until(lambda: heard.count(heartbeat) > 2)
        running.cancel()
        await request
        assert [message for message in heard if message != heartbeat] == [
            Hello(engine_id="theirs", model="tiny", block_size=16),
            Read(
                engine_id="theirs",
                request_id="leg",
                first_block=0,
                block_ids=[1, 2, 3, 4, 5, 6, 7],
                prompt_tokens=100,
                prompt_checksum=prompt_seed(PROMPT, seed=0),
            ),
            Release(engine_id="theirs", request_id="leg"),
        ]
        listener.close()


async def test_an_aborted_prefill_leg_keeps_nothing() -> None:
    slow = replace(FAST, prefill_tokens_per_second=10.0)
    async with pods(settings("kv_producer", engine=slow)) as (prefiller,):
        request = asyncio.create_task(prefiller.prefill())
        await until_metric(prefiller, "vllm:num_requests_running", 1)
        request.cancel()
        await until(lambda: prefiller.used_blocks == 0)
        assert await prefiller.metric("vllm:request_success_total", finished_reason="abort") == 1


async def test_a_prefill_leg_that_a_stop_string_ends_early_keeps_nothing() -> None:
    async with pods(settings("kv_producer")) as (prefiller,):
        word = text(await prefiller.complete(max_tokens=1))
        answer = await prefiller.complete(max_tokens=9, stop=[word], kv_transfer_params=PREFILL)
        assert (answer["kv_transfer_params"], prefiller.used_blocks) == (None, 0)
        assert (await prefiller.prefill(stop=[word]))["remote_num_tokens"] == 100  # ended by its length all the same


async def test_a_refused_decode_leg_frees_the_blocks_over_there_at_once() -> None:
    async with pods(settings("kv_producer"), settings("kv_consumer")) as (prefiller, decoder):
        params = await prefiller.prefill()
        assert prefiller.used_blocks == 7
        status, _ = await decoder.post(prompt=PROMPT, max_tokens=9999, kv_transfer_params=params)
        assert status == 400
        await until(lambda: prefiller.used_blocks == 0)
        assert await prefiller.metric("vllm:nixl_num_notifications_after_expiry_total") == 0


async def test_a_decode_leg_whose_client_leaves_before_its_load_frees_the_blocks_over_there() -> None:
    one_slot = replace(FAST, max_running=1, inter_token_seconds=0.05)
    async with pods(settings("kv_producer"), settings("kv_consumer", engine=one_slot)) as (prefiller, decoder):
        running = asyncio.create_task(decoder.complete([7] * 50, max_tokens=2000, ignore_eos=True))
        await until_metric(decoder, "vllm:num_requests_running", 1)
        params = await prefiller.prefill()
        request = asyncio.create_task(decoder.complete(max_tokens=2, kv_transfer_params=params, stream=True))
        await until_metric(decoder, "vllm:num_requests_kv_fetch_by_stage", 1, stage="waiting_to_start")
        request.cancel()
        running.cancel()
        await until(lambda: prefiller.used_blocks == 0)
        assert await prefiller.metric("vllm:nixl_num_notifications_after_expiry_total") == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(
    "change",
    [
        lambda: {"remote_engine_id": "another", "remote_port": free_port()},
        lambda: {"remote_engine_id": "another"},
        lambda: {"remote_host": None, "remote_port": None, "remote_engine_id": None},
    ],
    ids=["nobody listens", "another engine", "nulls"],
)
async def test_a_prompt_that_cannot_be_fetched_fails_its_request_as_vllms_default_policy_does(
    change: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_loader, "HANDSHAKE_SECONDS", 0.2)
    async with pods(settings("kv_producer"), settings("kv_consumer")) as (prefiller, decoder):
        params = await prefiller.prefill() | change()
        assert await decoder.post(prompt=PROMPT, max_tokens=2, kv_transfer_params=params) == (500, FAILURE)
        # vLLM shakes hands once more to have the blocks freed
        await until_metric(decoder, "vllm:nixl_num_failed_transfers_total", 2)
        assert await decoder.metric("vllm:request_success_total", finished_reason="error") == 1
        assert decoder.used_blocks == 0
        await decoder.complete(max_tokens=2)


async def test_a_stream_that_fails_says_so_in_its_last_event() -> None:
    async with pods(settings("kv_producer"), settings("kv_consumer")) as (prefiller, decoder):
        params = await prefiller.prefill() | {"remote_engine_id": "another"}
        body = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "kv_transfer_params": params}
        for choices, roles in ((1, 1), (2, 2)):
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{decoder.pod.base_url}/v1/chat/completions", json=body | {"n": choices}) as response,
            ):
                events = (await response.text()).split("\n\n")
            assert response.status == 200
            assert ['"role":"assistant"' in event for event in events[:roles]] == [True] * roles
            assert json.loads(events[roles].removeprefix("data: ")) == FAILURE
            assert events[roles + 1 :] == ["data: [DONE]", ""]


async def test_the_policy_recompute_computes_what_does_not_come() -> None:
    recompute = settings("kv_consumer", kv_load_failure_policy=LoadFailurePolicy.RECOMPUTE)
    async with pods(settings("kv_producer"), recompute) as (prefiller, decoder):
        expected = text(await prefiller.complete(max_tokens=4))
        params = await prefiller.prefill() | {"remote_engine_id": "another"}
        for _ in range(2):  # with nothing cached, and with all but the last block
            answer = await decoder.complete(max_tokens=4, kv_transfer_params=params)
            assert text(answer) == expected
        assert await decoder.metric("vllm:request_success_total", finished_reason="error") == 0
        assert decoder.used_blocks == 0


async def test_a_prefill_pod_that_dies_in_the_middle_of_a_transfer_fails_the_request() -> None:
    async with pods(settings("kv_consumer", link=SLOW_LINK)) as (decoder,):
        async with pods(settings("kv_producer", link=SLOW_LINK)) as (prefiller,):
            params = await prefiller.prefill()
            request = asyncio.create_task(decoder.post(prompt=PROMPT, max_tokens=2, kv_transfer_params=params))
            await until_metric(decoder, "vllm:num_requests_kv_fetch_by_stage", 1, stage="in_progress")
        status, _ = await request
        assert status == 500
        assert decoder.used_blocks == 0


async def test_who_asks_a_pod_that_is_going_is_told_so_and_waits_for_nothing() -> None:
    async def answer(message: Message) -> Reply:
        raise AssertionError(message)

    async with asyncio.timeout(DEADLINE_SECONDS):
        listener = Listener(answer, spawn=lambda work: work.close())  # as a pod does when its tasks end
        await listener.bind("127.0.0.1")
        async with connected("127.0.0.1", listener.port) as served, connected("127.0.0.1", listener.port) as too_late:
            asked = asyncio.create_task(served.ask(Hello(engine_id="a", model="tiny", block_size=16), seconds=None))
            await asyncio.sleep(0)
            listener.close()
            for question in (asked, too_late.ask(Heartbeat(engine_id="a", request_ids=[]), seconds=None)):
                with pytest.raises(PeerError):
                    await question


@pytest.mark.parametrize("leg", ["another prompt", "longer prefill leg"])
async def test_kv_of_something_else_is_counted_as_stale(leg: str) -> None:
    async with pods(settings("kv_producer"), settings("kv_consumer")) as (prefiller, decoder):
        if leg == "another prompt":
            params = await prefiller.prefill([1, *PROMPT[1:]])
        else:  # vLLM pairs blocks by their end: one more over there, and each is the wrong one
            params = await prefiller.prefill([*PROMPT, *range(12)], max_tokens=3, ignore_eos=True)
        await decoder.complete(max_tokens=2, kv_transfer_params=params)
        assert await decoder.metric("podsim_stale_kv_reads_total") == 1


@pytest.mark.parametrize(
    "change", [{"remote_block_ids": None}, {"remote_block_ids": [[1, 2]]}], ids=["no blocks", "too few blocks"]
)
async def test_what_would_kill_a_real_engine_is_counted(change: dict[str, Any]) -> None:
    async with pods(settings("kv_producer"), settings("kv_consumer")) as (prefiller, decoder):
        params = await prefiller.prefill() | change
        status, answer = await decoder.post(prompt=PROMPT, max_tokens=2, kv_transfer_params=params)
        assert (status, answer["error"]["message"][:22]) == (500, "EngineCore encountered")
        assert await decoder.metric("podsim_engine_deaths_total") == 1
        await decoder.complete(max_tokens=2)


async def test_a_decode_leg_that_lacks_a_key_hangs_until_its_client_leaves_and_then_the_engine_would_die() -> None:
    async with pods(settings("kv_producer"), settings("kv_consumer")) as (prefiller, decoder):
        params = without(await prefiller.prefill(), "remote_request_id")
        request = asyncio.create_task(decoder.complete(max_tokens=2, kv_transfer_params=params))
        await until_metric(decoder, "vllm:num_requests_waiting", 1)
        assert await decoder.metric("podsim_engine_deaths_total") == 0
        request.cancel()
        await until_metric(decoder, "podsim_engine_deaths_total", 1)
        assert decoder.used_blocks == 7  # for ever


async def test_without_a_connector_the_parameters_change_nothing() -> None:
    async with pods(PodSettings(max_model_len=2048, engine=FAST)) as (pod,):
        plain = await pod.complete(max_tokens=2)
        for params in (PREFILL, {"do_remote_prefill": True, "remote_block_ids": [[1]]}):
            answer = await pod.complete(max_tokens=2, kv_transfer_params=params)
            assert (text(answer), answer["kv_transfer_params"]) == (text(plain), None)
        assert pod.used_blocks == 0


async def test_parameters_that_are_no_object_are_refused() -> None:
    async with pods(settings("kv_both")) as (pod,):
        status, answer = await pod.post(prompt=PROMPT, kv_transfer_params="x")
        assert (status, answer["error"]["param"]) == (400, "body.kv_transfer_params")
