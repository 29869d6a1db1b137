"""What the indexer reads from a pod's /metrics, for every generation of names."""

import pytest

from kvmesh.pods.engine_metrics import parse_pod_report
from kvmesh.pods.page_steps import at_once
from kvmesh.pods.pod_report import EngineCounters, PodReport

TODAY = b"""# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79525603566e+09
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="16",cache_dtype="auto",effective_attention_block_size="32",enable_prefix_caching="True",engine="0",hash_block_size="8",sliding_window="None"} 1.0
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 250.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 900.0
vllm:prompt_tokens_cached_total{engine="0",model_name="m"} 240.0
vllm:generation_tokens_total{engine="0",model_name="m"} 77.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 9.0
"""  # noqa: E501  as it comes

OF_0_8 = b"""# HELP vllm:gpu_prefix_cache_queries_total GPU prefix cache queries, in terms of number of queried blocks.
# HELP vllm:gpu_prefix_cache_hits_total GPU prefix cache hits, in terms of number of cached blocks.
vllm:gpu_prefix_cache_queries_total{model_name="m"} 100.0
vllm:gpu_prefix_cache_hits_total{model_name="m"} 25.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="True"} 1.0
vllm:prompt_tokens_total{model_name="m"} 900.0
vllm:generation_tokens_total{model_name="m"} 77.0
vllm:time_to_first_token_seconds_count{model_name="m"} 9.0
"""


def test_all_that_matters_is_found_in_the_page_of_a_new_pod() -> None:
    engine = EngineCounters(
        prompt_tokens=900,
        cached_prompt_tokens=240,
        generated_tokens=77,
        prefills=9,
        unfinished=5,
        queried_tokens=1000,
        hit_tokens=250,
    )
    assert at_once(parse_pod_report(TODAY, scraped_at=5.0)) == PodReport(
        scraped_at=5.0,
        started_at=1795256035.66,
        block_size=32,
        other_block_sizes=frozenset({8, 16}),
        caches_prefixes=True,
        engines={0: engine},
    )


@pytest.mark.parametrize(
    ("unit", "queried", "hit"),
    [(b"blocks", 1600, 400), (b"tokens. DEPRECATED: Use vllm:prefix_cache_hits instead", 100, 25)],
)
def test_old_names_count_blocks_or_tokens_as_their_help_says(unit: bytes, queried: int, hit: int) -> None:
    report = at_once(parse_pod_report(OF_0_8.replace(b"cached blocks", b"cached " + unit), scraped_at=5.0))

    engine = EngineCounters(
        prompt_tokens=900,
        cached_prompt_tokens=None,
        generated_tokens=77,
        prefills=9,
        unfinished=0,
        queried_tokens=queried,
        hit_tokens=hit,
    )
    expected = PodReport(scraped_at=5.0, block_size=16, caches_prefixes=True, engines={0: engine})
    assert report == expected


def test_each_engine_has_its_own_counters() -> None:
    second = TODAY.replace(b'engine="0"', b'engine="1"').replace(b"900.0", b"7.0")
    engines = at_once(parse_pod_report(TODAY + second, scraped_at=5.0)).engines

    assert engines is not None
    assert {engine: counters.prompt_tokens for engine, counters in engines.items()} == {0: 900, 1: 7}


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<html>not found</html>",
        b"\xff\xfe\x00" * 100,
        b"process_start_time_seconds NaN\nvllm:cache_config_info{block_size=} 1.0\n",
        b'vllm:prompt_tokens_total{engine="0"} NaN\nvllm:time_to_first_token_seconds_count{engine="0"} 1e300\n',
        b"vllm:prompt_tokens_total{\nvllm:prompt_tokens_total\nvllm:prompt_tokens_total 5",  # no prefills
        b'vllm:cache_config_info{block_size="0"} 1.0\nvllm:cache_config_info{block_size="999999999999"} 1.0\n',
    ],
)
def test_a_page_without_them_says_nothing(page: bytes) -> None:
    assert at_once(parse_pod_report(page, scraped_at=5.0)) == PodReport(scraped_at=5.0)


def test_processes_that_share_the_page_have_no_common_start() -> None:
    twice = b"process_start_time_seconds 1e9\nprocess_start_time_seconds 2e9\n"

    assert at_once(parse_pod_report(twice, scraped_at=5.0)).started_at is None
