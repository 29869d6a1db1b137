"""TTFT and inter-token time of all pods are histograms that Prometheus can take quantiles of."""

from prometheus_client.parser import text_string_to_metric_families

from extproc.ledger.endpoint_telemetry import LatencyTelemetry
from extproc.ledger.metrics import TTFT_SECONDS
from kvmesh.metrics.registry import Registry
from kvmesh.pods.engine_metrics import parse_load
from kvmesh.pods.page_steps import at_once
from podsim.wire.metrics_text import EngineState, PodMetrics

IDLE = EngineState(running=0, waiting=0, kv_usage=0.0, prefix_queries=0, prefix_hits=0, preemptions=0)


class Pod:
    """A simulated vLLM's own page."""

    def __init__(self, model: str = "tiny", *, started_at: float = 0.0) -> None:
        self.metrics = PodMetrics(
            model=model, max_model_len=4096, block_size=16, total_blocks=100, started_at=started_at
        )

    def first_token(self, *seconds: float) -> bytes:
        for each in seconds:
            self.metrics.time_to_first_token.observe(each)
        return self.metrics.render(IDLE)


def look(latencies: LatencyTelemetry, endpoint: str, text: bytes, *, now: float) -> None:
    load = at_once(parse_load(text, reported_at=now))
    assert load is not None
    at_once(latencies.page(endpoint, text, load=load))


def buckets(registry: Registry, *, role: str = "both") -> dict[float, float]:
    families = {family.name: family for family in text_string_to_metric_families(registry.text().decode())}
    return {
        float(sample.labels["le"]): sample.value
        for sample in families["kvmesh_ttft_seconds"].samples
        if sample.name.endswith("_bucket") and sample.labels["role"] == role
    }


def test_pods_are_merged_by_model_and_role_since_they_were_first_seen() -> None:
    registry = Registry()
    latencies = LatencyTelemetry(registry, read_every_seconds=5.0)
    latencies.role_of = {"a": "prefill", "b": "prefill", "c": "decode"}.__getitem__
    pods = {name: Pod() for name in "abc"}
    for name, pod in pods.items():
        look(latencies, name, pod.first_token(0.3), now=0.0)  # before we looked
    for name, pod in pods.items():
        look(latencies, name, pod.first_token(0.003, 30.0), now=5.0)
    found = buckets(registry, role="prefill")
    assert len(found) == len(TTFT_SECONDS) + 1
    assert {bound: count for bound, count in found.items() if bound in (0.001, 0.005, 20.0, 40.0, float("inf"))} == {
        0.001: 0.0,
        0.005: 2.0,
        20.0: 2.0,
        40.0: 4.0,
        float("inf"): 4.0,
    }
    assert buckets(registry, role="decode")[float("inf")] == 2.0
    text = registry.text().decode()
    assert 'kvmesh_ttft_seconds_count{model="tiny",role="prefill"} 4.0' in text
    assert 'kvmesh_ttft_seconds_sum{model="tiny",role="decode"} 30.003' in text


def test_pages_between_two_reads_are_not_read() -> None:
    registry = Registry()
    latencies, pod = LatencyTelemetry(registry, read_every_seconds=5.0), Pod()
    look(latencies, "a", pod.first_token(), now=0.0)
    look(latencies, "a", pod.first_token(1.0), now=4.9)
    assert buckets(registry)[float("inf")] == 0.0
    look(latencies, "a", pod.first_token(1.0), now=5.0)
    assert buckets(registry)[float("inf")] == 2.0


def test_a_new_process_is_read_at_once_and_from_zero() -> None:
    registry = Registry()
    latencies = LatencyTelemetry(registry, read_every_seconds=5.0)
    look(latencies, "a", Pod().first_token(1.0), now=0.0)
    latencies.restarted("a")
    look(latencies, "a", Pod().first_token(1.0, 1.0, 1.0), now=0.1)
    assert buckets(registry)[float("inf")] == 3.0
    latencies.forget("a")
    assert buckets(registry)[float("inf")] == 3.0


def test_a_process_that_started_later_counts_from_zero_although_nothing_falls() -> None:
    registry = Registry()
    latencies = LatencyTelemetry(registry, read_every_seconds=5.0)
    look(latencies, "a", Pod(started_at=1e9).first_token(1.0), now=0.0)
    look(latencies, "a", Pod(started_at=1e9 + 60).first_token(1.0, 1.0, 1.0), now=5.0)
    assert buckets(registry)[float("inf")] == 3.0


def test_a_pod_that_has_answered_nothing_since_is_not_read_again() -> None:
    registry = Registry()
    latencies, pod = LatencyTelemetry(registry, read_every_seconds=5.0), Pod()
    look(latencies, "a", pod.first_token(1.0), now=0.0)
    idle = at_once(parse_load(pod.first_token(), reported_at=5.0))
    assert idle is not None
    at_once(latencies.page("a", b"never read", load=idle))
    look(latencies, "a", pod.first_token(1.0), now=10.0)
    assert buckets(registry)[float("inf")] == 1.0
