"""Two hundred mixed requests to two real vLLM servers: what was predicted to be cached is what they find.

The picker's own comparison (docs/guides/models.md) sees the same: its metrics agree and nothing is found to drift.
"""

import re
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from tests.e2e.stack import Stack, eventually, running_stack
from tests.vllm.checked_client import CheckedClient, Outcome
from tests.vllm.mixed_requests import KINDS, MixedRequests
from tests.vllm.servers import MODEL_NAME, VllmPod

REQUESTS = 200
# every response is read, streams as well; patient, because two vLLM servers fill this machine's cores
SETTINGS = "index_timeout_ms: 2000\nsample_share: 1.0\n"


def hit_tokens(pod: VllmPod) -> float:
    """Return the prompt tokens that the pod has found in its cache since it started."""
    series = re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", pod.get_text("/metrics"), re.MULTILINE)
    return sum(map(float, series))


async def realised(stack: Stack) -> dict[str, float]:
    """Return what the picker has compared, as its metrics tell."""
    names = ("requests", "prompt_tokens", "predicted_tokens", "cached_tokens", "regret_tokens")
    return {name: await stack.metric(f"kvmesh_realised_{name}_total") for name in names}


async def error_buckets(stack: Stack) -> dict[str, float]:
    """Return the histogram of prediction errors: upper bound in tokens -> requests with that error or less."""
    async with stack.http.get(f"{stack.ready['admin']}/metrics") as response:
        page = await response.text()
    found = re.findall(r'^kvmesh_prediction_error_tokens_bucket\{.*le="([^"]+)"\} (\S+)$', page, re.MULTILINE)
    return {bound: float(count) for bound, count in found}


async def test_two_hundred_mixed_requests_hit_exactly_as_predicted(
    vllm_pods: tuple[VllmPod, ...], tmp_path: Path
) -> None:
    pods = {pod.address: pod for pod in vllm_pods}
    before = {address: hit_tokens(pod) for address, pod in pods.items()}
    flags = ("--model", MODEL_NAME, "--tokenizer", str(vllm_pods[0].model_folder))
    async with running_stack(tmp_path, *flags, settings=SETTINGS, endpoints=list(pods)) as stack:
        client, requests = CheckedClient(stack, pods), MixedRequests(seed=4, unique=str(uuid.uuid4()))
        for _ in range(REQUESTS):
            kind, path, fields = requests.next()
            requests.answered((await client.send(kind, path, **fields)).text)
        outcomes = client.outcomes
        single = [each for each in outcomes if each.prompts == 1]
        assert [wrong(each) for each in single if wrong(each)] == []
        await the_picker_has_seen_the_same(stack, single)
    assert {each.kind for each in outcomes} == set(KINDS)
    assert {each.pod for each in outcomes} == set(pods)
    assert Counter(each.cached > 0 for each in single)[True] > REQUESTS / 2
    for address, pod in pods.items():
        assert hit_tokens(pod) - before[address] == sum(each.predicted for each in outcomes if each.pod == address)


async def the_picker_has_seen_the_same(stack: Stack, single: list[Outcome]) -> None:
    """Check its metrics: every request with one prompt was compared, and nothing differed."""
    expected = sums(single)
    seen = await eventually(lambda: realised(stack), lambda seen: seen["requests"] >= len(single))
    assert {name: seen[name] for name in expected} == expected
    buckets = await error_buckets(stack)
    assert (buckets["-0.5"], buckets["0.5"], buckets["+Inf"]) == (0, len(single), len(single))
    for name in ("kvmesh_responses_missed_total", "kvmesh_extproc_model_finding"):
        assert await stack.metric(name) == 0, name


def sums(outcomes: list[Outcome]) -> dict[str, float]:
    """Return what the picker's comparison must come to."""
    return {
        "requests": len(outcomes),
        "prompt_tokens": sum(each.counted_tokens for each in outcomes),
        "predicted_tokens": sum(each.predicted for each in outcomes),
        "cached_tokens": sum(each.cached for each in outcomes),
    }


def wrong(outcome: Outcome) -> dict[str, Any]:
    """Return what is not as predicted."""
    pairs = {
        "cached": (outcome.predicted, outcome.cached),
        "prompt": (outcome.prompt_tokens, outcome.counted_tokens),
    }
    found = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return {"kind": outcome.kind} | found if found else {}
