"""A real vLLM's /metrics say what the indexer's watch over the pods needs, and its cache events follow the counters."""

import time
from dataclasses import replace

from kvmesh.pods.engine_metrics import parse_pod_report
from kvmesh.pods.page_steps import at_once
from kvmesh.pods.pod_report import EngineCounters, PodReport, least_new_blocks
from tests.vllm.servers import BLOCK_SIZE, VllmPod

DEADLINE_SECONDS = 20.0


def report(pod: VllmPod) -> PodReport:
    return at_once(parse_pod_report(pod.get_text("/metrics").encode(), scraped_at=time.monotonic()))


def counters(pod: VllmPod) -> EngineCounters:
    engines = report(pod).engines
    assert engines is not None
    (engine,) = engines.values()
    return engine


def complete(pod: VllmPod, prompt: list[int], *, tokens: int = 4) -> None:
    status, answer = pod.post("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": tokens})
    assert status == 200, answer


def settled(pod: VllmPod, expected: EngineCounters) -> EngineCounters:
    """The counters lag behind the answers."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (seen := counters(pod)) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return seen


def test_every_figure_is_there_and_counts_what_it_should(vllm_pods: tuple[VllmPod, ...]) -> None:
    pod = vllm_pods[0]
    before, seen = counters(pod), report(pod)
    assert seen.started_at is not None
    assert abs(seen.started_at - time.time()) < 3600
    assert (seen.block_size, seen.caches_prefixes) == (BLOCK_SIZE, True)

    prompt = [int(time.time() * 1000) % 1000 + 200] * (6 * BLOCK_SIZE + 4)
    complete(pod, prompt)
    complete(pod, prompt)
    assert before.cached_prompt_tokens is not None
    expected = replace(
        before,
        prompt_tokens=before.prompt_tokens + 2 * len(prompt),
        cached_prompt_tokens=before.cached_prompt_tokens + 6 * BLOCK_SIZE,
        generated_tokens=before.generated_tokens + 8,
        prefills=before.prefills + 2,
        queried_tokens=before.queried_tokens + 2 * len(prompt),
        hit_tokens=before.hit_tokens + 6 * BLOCK_SIZE,
    )
    after = settled(pod, expected)

    assert after == expected
    # the first request filled 6 blocks, which the second found; either could have hidden one
    assert least_new_blocks(before, after, block_size=BLOCK_SIZE) == 4


def test_prompts_that_fill_no_block_and_repeats_are_owed_no_event(vllm_pods: tuple[VllmPod, ...]) -> None:
    pod = vllm_pods[0]
    prompt = [int(time.time() * 1000) % 1000 + 200] * (3 * BLOCK_SIZE + 2)
    complete(pod, prompt, tokens=1)
    before = counters(pod)
    for number in range(5):
        complete(pod, [300 + number] * 10, tokens=2)
        complete(pod, prompt, tokens=1)
    after = settled(pod, replace(counters(pod), prefills=before.prefills + 10))

    assert after.prefills == before.prefills + 10
    assert least_new_blocks(before, after, block_size=BLOCK_SIZE) == 0
