"""Hybrid models on real vLLM servers: what was predicted to be cached is what they find, evictions included.

Of each architecture a tiny model, whose random weights the server makes. Which others vLLM runs on the CPU, and what
was compared of them: docs/evidence/hybrid-models.md.
"""

import json
import random
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import running_stack
from tests.vllm.checked_client import COMPLETION, CheckedClient
from tests.vllm.environment import VllmEnvironment
from tests.vllm.mixed_requests import MixedRequests
from tests.vllm.servers import BLOCK_SIZE, MAX_MODEL_LEN, MODEL_NAME, VllmPod, running_pods

REQUESTS = 80
# vLLM fills this machine's cores. Blocks are evicted within seconds, and nothing is in flight: the index alone is asked
SETTINGS = "index_timeout_ms: 2000\npolicy:\n  prefixCache:\n    recentSeconds: 0\n"
WINDOW = 128  # tokens: four blocks
TINY: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_MODEL_LEN,
    "dtype": "float32",
}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {  # three groups with a window, which are described alike
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "gemma4": {  # full attention has heads twice as wide, so that the windows' blocks are twice as long
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "global_head_dim": 64,
        "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 0,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3-next": {  # states (gated delta nets), and longer blocks
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}
# so few that blocks are evicted, and enough for the longest prompt of all groups
BLOCKS = {"gemma3": 260, "gemma4": 200, "gpt-oss": 120, "qwen3-next": 24}
BLOCK_SIZES = {"gemma3": BLOCK_SIZE, "gemma4": 2 * BLOCK_SIZE, "gpt-oss": BLOCK_SIZE}
LONGEST_BLOCK = 544  # of qwen3-next: 288 on processors without AMX


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridPod:
    """A running server, and which model it has."""

    name: str
    pod: VllmPod


@pytest.fixture(params=MODELS)
def hybrid(
    request: pytest.FixtureRequest, vllm_environment: VllmEnvironment, tiny_model: Path, tmp_path: Path
) -> Iterator[HybridPod]:
    name, folder = request.param, tmp_path / "model"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    (folder / "config.json").write_text(json.dumps(TINY | MODELS[name]))
    # prompts are computed in several steps, each of which needs blocks of each group
    flags = (
        *("--load-format", "dummy", "--num-gpu-blocks-override", str(BLOCKS[name])),
        *("--max-model-len", "2048", "--max-num-batched-tokens", str(LONGEST_BLOCK)),
    )
    with running_pods(
        1, environment=vllm_environment, model_folder=folder, logs=tmp_path / "logs", extra_flags=flags
    ) as pods:
        yield HybridPod(name=name, pod=pods[0])


def prompts_with_common_beginnings(seed: int) -> Iterator[dict[str, Any]]:
    """Yield completions of token ids: beginnings of three long prompts, some of which go on differently."""
    draw = random.Random(seed)
    trunks = [[draw.randrange(300, 4000) for _ in range(1900)] for _ in range(3)]
    while True:
        prompt = draw.choice(trunks)[: draw.randrange(1, 1900)] + [300] * draw.choice((0, 1, 40))
        yield {"prompt": prompt, "max_tokens": draw.choice((1, 5, 60)), "return_token_ids": True}


def block_size(hybrid: HybridPod) -> int:
    """Return the tokens of a block of full attention; vLLM makes those as long as a state is large."""
    made = re.findall(r"Setting attention block size to (\d+) tokens", hybrid.pod.log.read_text(errors="replace"))
    return int(made[-1]) if made else BLOCK_SIZES[hybrid.name]


async def test_every_hit_of_a_hybrid_model_is_as_predicted(hybrid: HybridPod, tmp_path: Path) -> None:
    pod = hybrid.pod
    flags = ("--model", MODEL_NAME, "--tokenizer", str(pod.model_folder))
    async with running_stack(tmp_path, *flags, settings=SETTINGS, endpoints=[pod.address]) as stack:
        client = CheckedClient(stack, {pod.address: pod}, block_size=block_size(hybrid))
        held_back = 0
        for fields in islice(prompts_with_common_beginnings(seed=4), REQUESTS):
            (before,) = (await stack.explain({"model": MODEL_NAME} | fields))["candidates"]
            held_back += before["held_back"] is not None
            await client.send("token ids", COMPLETION, **fields)
        if hybrid.name == "gemma3":  # vLLM renders gpt-oss's chats in code, for another vocabulary
            requests = MixedRequests(seed=4, unique=str(uuid.uuid4()))
            for _ in range(REQUESTS):
                kind, path, fields = requests.next()
                requests.answered((await client.send(kind, path, **fields)).text)
    single = [each for each in client.outcomes if each.prompts == 1]
    wrong = [(each.kind, each.predicted, each.cached) for each in single if each.predicted != each.cached]
    assert wrong == []
    assert sum(each.cached > 0 for each in single) > REQUESTS / 10
    assert held_back > 3  # else full attention alone would say as much
