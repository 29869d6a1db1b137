"""A real vLLM's /metrics count what the picker's estimates are made of."""

import time

from kvmesh.pods.engine_metrics import parse_load
from kvmesh.pods.page_steps import at_once
from kvmesh.pods.pod_report import EndpointLoad
from tests.vllm.servers import BLOCK_SIZE, VllmPod

DEADLINE_SECONDS = 20.0


def load_of(pod: VllmPod) -> EndpointLoad:
    load = at_once(parse_load(pod.get_text("/metrics").encode(), reported_at=time.monotonic()))
    assert load is not None
    return load


def test_prefill_first_tokens_and_tokens_are_counted_with_their_times(vllm_pods: tuple[VllmPod, ...]) -> None:
    pod = vllm_pods[0]
    before = load_of(pod)
    prompt = [int(time.time() * 1000) % 1000 + 200] * (6 * BLOCK_SIZE + 4)
    for _ in range(2):
        status, answer = pod.post("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 5})
        assert status == 200, answer
    deadline = time.monotonic() + DEADLINE_SECONDS  # the counters lag behind the answers
    while (after := load_of(pod)).prefill_count < before.prefill_count + 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    computed = 2 * len(prompt) - 6 * BLOCK_SIZE  # the second found the first one's blocks
    assert after.prefill_count - before.prefill_count == 2
    assert after.prefill_computed_tokens - before.prefill_computed_tokens == computed
    assert after.first_token_count - before.first_token_count == 2
    assert after.inter_token_count - before.inter_token_count == 8
    prefill = after.prefill_seconds_sum - before.prefill_seconds_sum
    first_token = after.first_token_seconds_sum - before.first_token_seconds_sum
    assert 0.0 < prefill <= first_token < DEADLINE_SECONDS
    assert after.inter_token_seconds_sum > before.inter_token_seconds_sum
