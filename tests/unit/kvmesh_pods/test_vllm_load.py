"""The load is read from the few lines that carry it, whatever surrounds them."""

import pytest

from kvmesh.pods.engine_metrics import parse_load
from kvmesh.pods.page_steps import at_once
from kvmesh.pods.pod_report import EndpointLoad

POD = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 1000.0
vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.7e9
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 250.0
"""


def test_one_engine() -> None:
    load = at_once(parse_load(POD, reported_at=5.0))
    assert load == EndpointLoad(
        waiting_requests=2,
        running_requests=3,
        kv_usage=0.25,
        prefix_hit_tokens=250,
        prefix_query_tokens=1000,
        reported_at=5.0,
    )
    assert load.prefix_hit_rate == 0.25


def test_data_parallel_engines_are_summed_and_their_kv_use_averaged() -> None:
    text = POD + POD.replace(b'engine="0"', b'engine="1"').replace(b"} 0.25", b"} 0.75")
    load = at_once(parse_load(text, reported_at=5.0))
    assert load is not None
    assert (load.waiting_requests, load.running_requests, load.kv_usage) == (4, 6, 0.5)


STAGES = b"""vllm:num_requests_kv_fetch_by_stage{engine="0",model_name="tiny",stage="waiting_to_start"} 1.0
vllm:num_requests_kv_fetch_by_stage{engine="0",model_name="tiny",stage="in_progress"} 1.0
vllm:num_requests_kv_fetch_by_stage{engine="0",model_name="tiny",stage="completed_waiting"} 1.0
"""
DEFERRED = b'vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="deferred"} 2.0\n'


@pytest.mark.parametrize(
    ("more", "waiting", "fetching"),
    [
        (b"", 2, 0),
        (DEFERRED, 2, 0),  # of them nothing is known but that they were passed over once
        (DEFERRED + STAGES, 1, 1),
        (STAGES + STAGES.replace(b'engine="0"', b'engine="1"'), 0, 2),
        (STAGES.replace(b"1.0", b"9.0"), 0, 2),
    ],
    ids=["not told", "deferred", "told", "two engines", "counted later"],
)
def test_a_request_whose_cache_is_on_its_way_is_in_no_queue(more: bytes, waiting: int, fetching: int) -> None:
    load = at_once(parse_load(POD + more, reported_at=0.0))
    assert load is not None
    assert (load.waiting_requests, load.fetching_requests, load.unfinished_requests) == (waiting, fetching, 5)


def test_the_kv_use_of_older_vllm_is_found_by_its_older_name() -> None:
    load = at_once(parse_load(POD.replace(b"kv_cache_usage_perc", b"gpu_cache_usage_perc"), reported_at=0.0))
    assert load is not None
    assert load.kv_usage == 0.25


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>not found</html>",
        POD.replace(b"num_requests_waiting{", b"num_requests_pending{"),
        POD.replace(b"} 3.0", b"} NaN"),
        POD.replace(b"} 3.0", b"} "),
        POD.replace(b"} 3.0", b"} -3.0"),
        POD.replace(b"} 2.0", b"} 1e308") + POD.replace(b"} 2.0", b"} 1e308"),
        POD.replace(b"} 0.25", b"} lots"),
    ],
    ids=["empty", "html", "missing", "nan", "no-value", "negative", "absurd", "no-number"],
)
def test_a_page_without_usable_load_says_nothing(text: bytes) -> None:
    assert at_once(parse_load(text, reported_at=0.0)) is None


def test_a_page_that_starts_with_the_series_and_has_no_labels_or_last_newline() -> None:
    text = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.5 1700000000"
    load = at_once(parse_load(text, reported_at=0.0))
    assert load is not None
    assert (load.running_requests, load.kv_usage, load.prefix_hit_rate) == (1, 0.5, None)


MORE = (
    POD
    + b"""vllm:num_preemptions_total{engine="0",model_name="tiny"} 4.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_cpu_blocks="None",num_gpu_blocks="1000"} 1.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01",model_name="tiny"} 7.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="tiny"} 10.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="tiny"} 0.5
vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""} 1.7e9
vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql,de",waiting_lora_adapters="fr"} 1.8e9
vllm:estimated_read_bytes_per_gpu_total{engine="0",model_name="tiny"} 5e12
vllm:estimated_write_bytes_per_gpu_total{engine="0",model_name="tiny"} 1e12
"""
)


def test_capacity_adapters_token_times_and_memory_traffic_are_taken_where_they_are_there() -> None:
    load = at_once(parse_load(MORE, reported_at=0.0))
    assert load is not None
    assert (load.preemptions, load.kv_capacity_tokens) == (4, 16_000)
    assert (load.inter_token_count, load.inter_token_seconds_sum, load.memory_bytes_moved) == (10, 0.5, 6e12)
    # of the series that there have been, the newest is now
    assert (load.running_adapters, load.waiting_adapters, load.max_adapters) == (
        frozenset({"sql", "de"}),
        frozenset({"fr"}),
        2,
    )


@pytest.mark.parametrize(
    ("was", "instead"),
    [
        (b'num_gpu_blocks="1000"', b'num_gpu_blocks="None"'),
        (b'block_size="16"', b""),
        (b'"16"', b'"' + b"9" * 50 + b'"'),
    ],
)
def test_a_capacity_that_makes_no_sense_is_not_known(was: bytes, instead: bytes) -> None:
    load = at_once(parse_load(MORE.replace(was, instead), reported_at=0.0))
    assert load is not None
    assert load.kv_capacity_tokens is None


def test_labels_that_hold_commas_quotes_and_no_end_do_no_harm() -> None:
    odd = POD + b'vllm:lora_requests_info{max_lora="x",running_lora_adapters="a\\"b, c'
    load = at_once(parse_load(odd, reported_at=0.0))
    assert load is not None
    assert (load.running_adapters, load.max_adapters) == (frozenset(), None)


# the order and the labels of vLLM 0.32's loggers.py
def histogram(name: str, *, count: int, total: str, engine: int) -> str:
    labels = f'engine="{engine}",model_name="tiny"'
    return (
        f"# TYPE {name} histogram\n"
        f'{name}_bucket{{engine="{engine}",le="0.5",model_name="tiny"}} 3.0\n'
        f"{name}_count{{{labels}}} {count}.0\n"
        f"{name}_sum{{{labels}}} {total}\n"
        f"{name}_created{{{labels}}} 1.7e9\n"
    )


TIMES = (
    POD
    + "".join(
        histogram(f"vllm:{name}", count=count, total=total, engine=engine)
        for name, count, total in (
            ("time_to_first_token_seconds", 9, "4.5"),
            ("inter_token_latency_seconds", 200, "2.5"),
            ("request_time_per_output_token_seconds", 77, "77.0"),
            ("request_queue_time_seconds", 77, "77.0"),
            ("request_prefill_time_seconds", 7, "1.25"),
            ("request_prefill_kv_computed_tokens", 7, "7000.0"),
        )
        for engine in (0, 1)
    ).encode()
)


def test_times_and_counts_of_prefill_first_tokens_and_tokens_are_summed_over_the_engines() -> None:
    read = at_once(parse_load(TIMES, reported_at=0.0))
    assert read is not None
    assert (read.prefill_count, read.prefill_seconds_sum, read.prefill_computed_tokens) == (14, 2.5, 14_000)
    assert (read.first_token_count, read.first_token_seconds_sum) == (18, 9.0)
    assert (read.inter_token_count, read.inter_token_seconds_sum) == (400, 5.0)


def test_the_time_between_tokens_of_older_vllm_is_found_by_its_older_name() -> None:
    text = TIMES.replace(b"vllm:inter_token_latency_seconds", b"vllm:time_per_output_token_seconds")
    read = at_once(parse_load(text, reported_at=0.0))
    assert read is not None
    assert (read.inter_token_count, read.inter_token_seconds_sum) == (400, 5.0)


def test_sums_that_make_no_sense_count_as_nothing() -> None:
    text = TIMES.replace(b"} 1.25", b"} NaN").replace(b"} 7000.0", b"} -1").replace(b"} 4.5", b"} 1e300")
    read = at_once(parse_load(text, reported_at=0.0))
    assert read is not None
    assert (read.prefill_seconds_sum, read.prefill_computed_tokens, read.first_token_seconds_sum) == (0.0, 0, 0.0)


STATES = b"""vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="weights_offloaded"} 0.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="discard_all"} 0.0
"""


@pytest.mark.parametrize(
    ("more", "is_asleep"),
    [
        (b"", False),
        (STATES, False),
        (STATES.replace(b'awake"} 1.0', b'awake"} 0.0'), True),
        (STATES + STATES.replace(b'engine="0"', b'engine="1"').replace(b'awake"} 1.0', b'awake"} 0.0'), True),
    ],
    ids=["cannot sleep", "awake", "asleep", "one of two engines"],
)
def test_an_engine_says_that_it_sleeps(more: bytes, is_asleep: bool) -> None:
    load = at_once(parse_load(POD + more, reported_at=0.0))
    assert load is not None
    assert load.is_asleep is is_asleep


@pytest.mark.parametrize(("told", "caches"), [("True", True), ("False", False), ("None", True)])
def test_an_engine_says_that_it_caches_no_prefixes(told: str, caches: bool) -> None:
    info = (
        f'vllm:cache_config_info{{block_size="16",enable_prefix_caching="{told}",engine="0",num_gpu_blocks="9"}} 1.0\n'
    )
    load = at_once(parse_load(POD + info.encode(), reported_at=0.0))
    assert load is not None
    assert load.caches_prefixes is caches
