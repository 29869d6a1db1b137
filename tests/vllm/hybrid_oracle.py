"""Play requests on vLLM's own KV cache manager; runs in the vLLM environment, without a server or a model.

Called by `test_hybrid_hits.py` as a subprocess. Reads JSON from standard input, {"cases": [{"groups": [{"kind":
"full_attention" | "sliding_window" | "mamba", "block_size": tokens, "sliding_window": tokens, "mode": of mamba}],
"blocks": of the pool, "hash_block_size": tokens, "retention": tokens between kept checkpoints or null, "steps":
[...]}]}, where a step is one of
    {"start": name, "tokens": [...], "chunk": tokens}    looks up, allocates and computes a prompt, chunk by chunk
    {"append": name, "tokens": [...]}                    generated tokens, one a step
    {"free": name}                                       ends a request
    {"probe": [tokens]}                                  asks for the hit of a prompt.
Writes {"cases": [[what each step did: {"events": [...], "hit": tokens or null, "hashes": [engine hashes of a probe's
blocks of hash_block_size]}]]}. A start that finds no room is freed at once.
"""

import json
import math
import os
import sys
from typing import Any

import torch  # type: ignore[import-not-found]
from vllm.distributed.kv_events import BlockRemoved, BlockStored  # type: ignore[import-not-found]
from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]
from vllm.utils.hashing import sha256_cbor  # type: ignore[import-not-found]
from vllm.v1.core.kv_cache_manager import KVCacheManager  # type: ignore[import-not-found]
from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found]
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found]
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request  # type: ignore[import-not-found]

MAX_MODEL_LEN = 8192


def spec(group: dict[str, Any]) -> Any:
    attention = {"block_size": group["block_size"], "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if group["kind"] == "full_attention":
        return FullAttentionSpec(**attention)
    if group["kind"] == "sliding_window":
        return SlidingWindowSpec(**attention, sliding_window=group["sliding_window"])
    return MambaSpec(
        block_size=group["block_size"], shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode=group["mode"]
    )


class Play:
    """One case on a fresh manager."""

    def __init__(self, case: dict[str, Any]) -> None:
        groups = case["groups"]
        self.hash_block_size = case["hash_block_size"]
        config = KVCacheConfig(
            num_blocks=case["blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec(group)) for i, group in enumerate(groups)],
            prefix_cache_retention_interval=case["retention"],
        )
        self.manager = KVCacheManager(
            config,
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=math.lcm(*(group["block_size"] for group in groups)),
            hash_block_size=self.hash_block_size,
            enable_kv_cache_events=True,
        )
        self.hasher = get_request_block_hasher(self.hash_block_size, sha256_cbor)
        self.requests: dict[str, Any] = {}
        self.made = 0

    def request(self, tokens: list[int]) -> Any:
        self.made += 1
        return Request(f"r{self.made}", tokens, SamplingParams(max_tokens=1), None, block_hasher=self.hasher)

    def step(self, step: dict[str, Any]) -> dict[str, Any]:
        hit, hashes = None, []
        if "start" in step:
            hit = self.start(step["start"], step["tokens"], step["chunk"])
        elif "append" in step and step["append"] in self.requests:
            self.append(step["append"], step["tokens"])
        elif "free" in step and step["free"] in self.requests:
            self.manager.free(self.requests.pop(step["free"]))
        elif "probe" in step:
            probe = self.request(step["probe"])
            hit = self.manager.get_computed_blocks(probe)[1]
            hashes = [maybe_convert_block_hash(each) for each in probe.block_hashes]
        return {"events": [event_json(event) for event in self.manager.take_events()], "hit": hit, "hashes": hashes}

    def start(self, name: str, tokens: list[int], chunk: int) -> int:
        request = self.request(tokens)
        self.manager.new_step_starts()
        computed, hit, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        first = True
        request.num_computed_tokens = 0
        while first or request.num_computed_tokens < len(tokens):
            if not first:
                self.manager.new_step_starts()
            done = hit if first else request.num_computed_tokens
            count = min(chunk, len(tokens) - done)
            taken = self.manager.allocate_slots(
                request,
                count,
                num_new_computed_tokens=hit if first else 0,
                new_computed_blocks=computed if first else None,
            )
            if taken is None:
                self.manager.free(request)
                return int(hit)
            request.num_computed_tokens = done + count
            first = False
        self.requests[name] = request
        return int(hit)

    def append(self, name: str, tokens: list[int]) -> None:
        request = self.requests[name]
        for token in tokens:
            self.manager.new_step_starts()
            request.append_output_token_ids(token)
            if self.manager.allocate_slots(request, 1) is None:
                self.manager.free(self.requests.pop(name))
                return
            request.num_computed_tokens += 1


def event_json(event: Any) -> dict[str, Any]:
    if isinstance(event, BlockStored):
        return {
            "stored": event.block_hashes,
            "parent": event.parent_block_hash,
            "tokens": list(event.token_ids),
            "block_size": event.block_size,
            "group": event.group_idx,
            "kind": event.kv_cache_spec_kind,
            "sliding_window": event.kv_cache_spec_sliding_window,
        }
    assert isinstance(event, BlockRemoved), event
    return {"removed": event.block_hashes, "group": event.group_idx}


def main() -> None:
    question = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")  # vLLM logs to standard output
    os.dup2(2, 1)
    init_none_hash(sha256_cbor)
    cases = []
    for case in question["cases"]:
        play = Play(case)
        cases.append([play.step(step) for step in case["steps"]])
    with answers:
        json.dump({"cases": cases}, answers)


if __name__ == "__main__":
    main()
