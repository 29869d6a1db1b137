import pytest
from prometheus_client.parser import text_string_to_metric_families

from podsim.wire.metrics_text import EngineState, PodMetrics, length_buckets

STATE = EngineState(running=3, waiting=2, kv_usage=0.25, prefix_queries=100, prefix_hits=64, preemptions=1)


def pod_metrics(model: str = "tiny") -> PodMetrics:
    return PodMetrics(model=model, max_model_len=2048, block_size=16, total_blocks=100, started_at=1000.5)


def samples(metrics: PodMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render(STATE).decode())
        for sample in family.samples
    }


def test_the_engines_state_appears_under_vllms_names_and_labels() -> None:
    labels = (("engine", "0"), ("model_name", "tiny"))
    values = samples(pod_metrics())
    expected = {
        "vllm:num_requests_running": 3.0,
        "vllm:num_requests_waiting": 2.0,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prefix_cache_queries_total": 100.0,
        "vllm:prefix_cache_hits_total": 64.0,
        "vllm:num_preemptions_total": 1.0,
    }
    assert {name: values[name, labels] for name in expected} == expected
    assert values["process_start_time_seconds", ()] == 1000.5


def test_the_cache_configuration_is_told_in_labels() -> None:
    [config] = [dict(labels) for name, labels in samples(pod_metrics()) if name == "vllm:cache_config_info"]
    told = {key: config[key] for key in ("block_size", "num_gpu_blocks", "kv_cache_size_tokens", "engine")}
    assert told == {"block_size": "16", "num_gpu_blocks": "100", "kv_cache_size_tokens": "1600", "engine": "0"}


def test_counters_and_histograms_count_what_was_observed() -> None:
    metrics = pod_metrics()
    metrics.finished["stop"] += 2
    for seconds in (0.001, 0.004, 0.3, 9999.0):
        metrics.time_to_first_token.observe(seconds)
    values = samples(metrics)
    labels = (("engine", "0"), ("model_name", "tiny"))
    assert values["vllm:request_success_total", (labels[0], ("finished_reason", "stop"), labels[1])] == 2.0
    buckets = {
        dict(sample_labels)["le"]: value
        for (name, sample_labels), value in values.items()
        if name == "vllm:time_to_first_token_seconds_bucket"
    }
    assert {bound: buckets[bound] for bound in ("0.001", "0.005", "0.25", "0.5", "2560.0", "+Inf")} == {
        "0.001": 1.0,
        "0.005": 2.0,
        "0.25": 2.0,
        "0.5": 3.0,
        "2560.0": 3.0,
        "+Inf": 4.0,
    }
    assert values["vllm:time_to_first_token_seconds_count", labels] == 4.0
    assert values["vllm:time_to_first_token_seconds_sum", labels] == pytest.approx(9999.305)


def test_a_model_name_with_quotes_is_escaped() -> None:
    assert ("vllm:num_requests_running", (("engine", "0"), ("model_name", 'a"b\\c'))) in samples(pod_metrics('a"b\\c'))


def test_length_buckets_reach_as_far_as_the_longest_sequence() -> None:
    assert length_buckets(2048) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]


def test_the_phases_of_ended_requests_and_the_refusals_appear_under_vllms_names() -> None:
    metrics = pod_metrics()
    metrics.prefill_time.observe(0.25)
    metrics.decode_time.observe(2.0)
    metrics.inference_time.observe(2.25)
    metrics.prefill_computed_tokens.observe(900)
    metrics.rejections["max_num_queued_reqs"] += 3
    values = samples(metrics)
    labels = (("engine", "0"), ("model_name", "tiny"))
    expected = {
        "vllm:request_prefill_time_seconds_sum": 0.25,
        "vllm:request_decode_time_seconds_sum": 2.0,
        "vllm:request_inference_time_seconds_sum": 2.25,
        "vllm:request_prefill_kv_computed_tokens_sum": 900.0,
        "vllm:request_prefill_time_seconds_count": 1.0,
    }
    assert {name: values[name, labels] for name in expected} == expected
    refused = {
        dict(sample_labels)["reason"]: value
        for (name, sample_labels), value in values.items()
        if name == "vllm:admission_rejections_total"
    }
    assert refused == {"max_num_queued_reqs": 3.0, "max_num_queued_tokens": 0.0}
