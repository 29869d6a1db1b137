"""Predicted tokens equal the cached tokens of answers: after evictions, and after a prompt that its pod refused."""

import json
from pathlib import Path

from extproc.pools.plan_response import PREDICTED_HEADER
from tests.e2e.stack import Answer, running_stack

BLOCK, POD_BLOCKS = 16, 80
PREFILL = 8_000  # tokens a second: a turn of all documents takes longer than an answer's events
SMALL_CACHE = json.dumps({"kv_blocks": POD_BLOCKS, "prefill_tokens_per_second": PREFILL, "max_model_len": 1024})


def document(number: int) -> list[int]:
    """Return tokens for three quarters of the pod's cache."""
    return [10 + number * 7 + token % 100 for token in range(POD_BLOCKS * BLOCK * 3 // 4)]


def predicted(answer: Answer) -> int:
    return int(answer.headers[PREDICTED_HEADER])


async def test_an_evicted_document_is_not_expected(tmp_path: Path) -> None:
    async with running_stack(tmp_path, pods=1, settings=SMALL_CACHE) as stack:
        for turn in range(2):
            for number in range(14):
                answer = await stack.complete(document(number))
                assert (predicted(answer), answer.cached_tokens) == (0, 0), f"turn {turn}, document {number}"
        again = await stack.complete(document(13))
        assert predicted(again) == again.cached_tokens > 0


async def test_a_refused_prompt_is_not_expected(tmp_path: Path) -> None:
    async with running_stack(tmp_path, pods=1) as stack:
        prompt = document(0)
        refused = await stack.complete(prompt, temperature="warm")
        assert refused.status == 400
        valid = await stack.complete(prompt)
        assert (valid.status, predicted(valid), valid.cached_tokens) == (200, 0, 0)
