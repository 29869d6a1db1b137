"""SGLang's and TensorRT-LLM's pages are read like vLLM's, by their own names; other pages have no load."""

import pytest

from kvmesh.pods.engine_metrics import parse_latencies, parse_load, parse_pod_report
from kvmesh.pods.engine_profiles import PROFILES
from kvmesh.pods.http_response import HttpResponse
from kvmesh.pods.metrics_page import MetricsPage, why_no_load
from kvmesh.pods.page_steps import at_once
from kvmesh.pods.pod_report import EndpointLoad, EngineCounters, PodReport

SGLANG = b"""# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 3.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 2.0
sglang:num_grammar_queue_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 1.0
sglang:token_usage{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 0.25
sglang:max_total_num_tokens{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 65536.0
sglang:page_size{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 64.0
sglang:num_pages{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 1024.0
sglang:realtime_tokens_total{mode="prefill_compute",model_name="m",tp_rank="0"} 700.0
sglang:realtime_tokens_total{mode="prefill_cache",model_name="m",tp_rank="0"} 300.0
sglang:realtime_tokens_total{mode="decode",model_name="m",tp_rank="0"} 40.0
sglang:num_retracted_requests_total{model_name="m",tp_rank="0"} 4.0
sglang:prompt_tokens_total{engine_type="unified",is_streaming="true",model_name="m"} 500.0
sglang:prompt_tokens_total{engine_type="unified",is_streaming="false",model_name="m"} 100.0
sglang:cached_tokens_total{cache_source="device",engine_type="unified",model_name="m"} 128.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="true",model_name="m"} 30.0
sglang:time_to_first_token_seconds_sum{engine_type="unified",is_streaming="true",model_name="m"} 1.5
sglang:time_to_first_token_seconds_bucket{engine_type="unified",is_streaming="true",le="0.1",model_name="m"} 2.0
sglang:time_to_first_token_seconds_bucket{engine_type="unified",is_streaming="true",le="+Inf",model_name="m"} 5.0
sglang:time_to_first_token_seconds_count{engine_type="unified",is_streaming="true",model_name="m"} 5.0
sglang:inter_token_latency_seconds_sum{engine_type="unified",model_name="m"} 0.3
sglang:inter_token_latency_seconds_bucket{engine_type="unified",le="+Inf",model_name="m"} 30.0
sglang:inter_token_latency_seconds_count{engine_type="unified",model_name="m"} 30.0
"""
TRTLLM = b"""# HELP trtllm_num_requests_running Number of active requests
trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 3.0
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m"} 2.0
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m"} 0.5
trtllm_kv_cache_max_blocks{engine_type="trtllm",model_name="m"} 1000.0
trtllm_kv_cache_tokens_per_block{engine_type="trtllm",model_name="m"} 32.0
trtllm_prompt_tokens_total{engine_type="trtllm",model_name="m"} 600.0
trtllm_prompt_cached_tokens_total{engine_type="trtllm",model_name="m"} 96.0
trtllm_generation_tokens_total{engine_type="trtllm",model_name="m"} 50.0
trtllm_request_prefill_time_seconds_sum{engine_type="trtllm",model_name="m"} 0.7
trtllm_request_prefill_time_seconds_count{engine_type="trtllm",model_name="m"} 4.0
trtllm_time_to_first_token_seconds_sum{engine_type="trtllm",model_name="m"} 0.9
trtllm_time_to_first_token_seconds_count{engine_type="trtllm",model_name="m"} 4.0
trtllm_time_per_output_token_seconds_sum{engine_type="trtllm",model_name="m"} 0.08
trtllm_time_per_output_token_seconds_count{engine_type="trtllm",model_name="m"} 4.0
"""


def load_of(page: bytes) -> EndpointLoad | None:
    return at_once(parse_load(page, reported_at=0.0))


def test_sglang_s_load() -> None:
    assert load_of(SGLANG) == EndpointLoad(
        waiting_requests=3,
        running_requests=3,
        kv_usage=0.25,
        prefix_hit_tokens=300,
        prefix_query_tokens=1000,
        reported_at=0.0,
        kv_capacity_tokens=65536,
        preemptions=4,
        inter_token_seconds_sum=0.3,
        inter_token_count=30,
        first_token_seconds_sum=1.5,
        first_token_count=5,
    )


def test_what_sglang_has_only_counted_at_the_end_of_requests_stands_in_for_what_it_computes_now() -> None:
    old = b"\n".join(line for line in SGLANG.split(b"\n") if b"realtime_tokens" not in line)
    load = load_of(old)
    assert load is not None
    assert (load.prefix_hit_tokens, load.prefix_query_tokens) == (128, 600)


def test_sglang_s_ranks_that_hold_the_same_count_once_and_data_parallel_ones_each() -> None:
    ranks = SGLANG + SGLANG.replace(b'tp_rank="0"', b'tp_rank="1"')
    load = load_of(ranks)
    assert load is not None
    assert (load.running_requests, load.waiting_requests, load.kv_usage) == (3, 3, 0.25)
    first = SGLANG.replace(b'tp_rank="0"', b'dp_rank="0",tp_rank="0"')
    load = load_of(first + SGLANG.replace(b'tp_rank="0"', b'dp_rank="1",tp_rank="1"'))
    assert load is not None
    assert (load.running_requests, load.waiting_requests, load.kv_capacity_tokens) == (6, 6, 131072)


def test_sglang_s_priorities_are_parts_of_the_total() -> None:
    whole = SGLANG.replace(b'pp_rank="0"', b'pp_rank="0",priority=""')
    part = b'sglang:num_queue_reqs{model_name="m",priority="5",tp_rank="0"} 2.0\n'
    load = load_of(whole + part)
    assert load is not None
    assert load.waiting_requests == 3


def test_sglang_s_requests_whose_cache_is_on_its_way_are_in_no_queue() -> None:
    load = load_of(SGLANG + b'sglang:num_decode_transfer_queue_reqs{model_name="m",tp_rank="0"} 4.0\n')
    assert load is not None
    assert (load.waiting_requests, load.fetching_requests) == (3, 4)


def test_sglang_s_events_can_be_checked() -> None:
    assert at_once(parse_pod_report(SGLANG, scraped_at=1.0)) == PodReport(
        scraped_at=1.0,
        block_size=64,
        engines={
            0: EngineCounters(
                prompt_tokens=600,
                cached_prompt_tokens=128,
                generated_tokens=30,
                prefills=5,
                unfinished=6,
                queried_tokens=1000,
                hit_tokens=300,
            )
        },
    )


def test_of_several_sglang_ranks_it_is_not_known_which_has_computed_what() -> None:
    ranks = SGLANG.replace(b'tp_rank="0"', b'dp_rank="0",tp_rank="0"')
    ranks += SGLANG.replace(b'tp_rank="0"', b'dp_rank="1",tp_rank="1"')
    assert at_once(parse_pod_report(ranks, scraped_at=1.0)).engines is None


def test_sglang_s_latencies() -> None:
    first, between = at_once(parse_latencies(SGLANG))
    assert (first["m"].counts, first["m"].seconds, between["m"].seconds) == ((2.0, 5.0), 1.5, 0.3)


def test_tensorrt_llm_s_load() -> None:
    assert load_of(TRTLLM) == EndpointLoad(
        waiting_requests=2,
        running_requests=3,
        kv_usage=0.5,
        prefix_hit_tokens=96,
        prefix_query_tokens=600,
        reported_at=0.0,
        kv_capacity_tokens=32000,
        inter_token_seconds_sum=0.08,
        inter_token_count=4,
        prefill_seconds_sum=0.7,
        prefill_count=4,
        prefill_computed_tokens=504,
        first_token_seconds_sum=0.9,
        first_token_count=4,
        shows_last_step=True,
    )


@pytest.mark.parametrize(
    "page", [b"", b"tgi_queue_size 0\ntgi_batch_current_size 0\n", SGLANG.replace(b"num_queue", b"q")]
)
def test_a_page_of_another_engine_or_without_a_queue_has_no_load(page: bytes) -> None:
    assert load_of(page) is None


def test_every_name_of_a_profile_has_its_prefix() -> None:
    for profile in PROFILES:
        choices = (
            *(profile.running, profile.kv_usage, profile.queried_tokens, profile.hit_tokens, profile.prompt_tokens),
            *(profile.cached_tokens, profile.generated_tokens, profile.capacity_tokens, profile.block_tokens),
            *(profile.blocks, profile.preemptions, (profile.waiting, profile.moved_bytes)),
        )
        names = [source.name for sums in choices for each in sums for source in each]
        names += [*profile.first_token, *profile.inter_token]
        assert [name for name in names if not name.startswith(profile.prefix)] == []


class Pod:
    """Answers each path as it is told, and counts what it was asked."""

    def __init__(self, pages: dict[str, tuple[int, bytes]]) -> None:
        self.pages = pages
        self.asked: list[str] = []

    async def get(self, path: str) -> HttpResponse:
        self.asked.append(path)
        status, body = self.pages.get(path, (404, b""))
        return HttpResponse(status=status, body=body, keep_alive=True)


async def test_a_page_is_asked_for_where_it_was_last() -> None:
    pod = Pod({"/metrics": (200, b' [{"iter": 1}]'), "/prometheus/metrics": (200, TRTLLM)})
    page = MetricsPage(pod.get)
    assert [(await page.get()).body for _ in range(3)] == [TRTLLM] * 3
    # reading TensorRT-LLM's JSON takes it from others
    assert pod.asked == ["/metrics", *["/prometheus/metrics"] * 3]
    pod.pages = {"/prometheus/metrics": (503, b"")}
    assert why_no_load(await page.get(), page.path) == "/metrics answered 404"
    pod.pages = {"/metrics": (200, SGLANG)}
    assert (await page.get()).body == SGLANG
    assert page.path == "/metrics"


@pytest.mark.parametrize(
    ("pages", "why"),
    [
        ({}, "/metrics answered 404"),
        ({"/metrics": (200, b"[]")}, "return_perf_metrics"),
        ({"/metrics": (200, b"tgi_queue_size 0\n")}, "/metrics shows the load of no engine that is known here"),
        ({"/prometheus/metrics": (200, b"tgi_queue_size 0\n")}, "/prometheus/metrics shows the load of no engine"),
    ],
)
async def test_a_pod_without_a_load_is_told_what_is_wrong(pages: dict[str, tuple[int, bytes]], why: str) -> None:
    page = MetricsPage(Pod(pages).get)
    assert why in why_no_load(await page.get(), page.path)
