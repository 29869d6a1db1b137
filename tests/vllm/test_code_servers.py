"""Real servers of a model with Mistral's own files and of a tiny gpt-oss render the tokens that are made here.

Nothing tells the servers how to read their folders: what they do by themselves is what the picker expects.
"""

import json
import shutil
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.errors import PromptTokensError
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.openai import parse_request
from tests.vllm.environment import VllmEnvironment
from tests.vllm.folder_comparison import asked_without_templates
from tests.vllm.library_folders import TINY_MODEL
from tests.vllm.mistral_folders import make_folders
from tests.vllm.servers import MODEL_NAME, VllmPod, running_pods

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
LLAMA = {
    **TINY,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 131_072,
    "intermediate_size": 128,
}
SCALING = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
GPT_OSS = {
    **TINY,
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201_088,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_theta": 150_000,
    "rope_scaling": {**SCALING, "original_max_position_embeddings": 4096},
}


def mistral_folder(parent: Path) -> Path:
    parent.mkdir()
    folder = make_folders(parent)["tekken_v13"]
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def gpt_oss_folder(parent: Path) -> Path:
    folder = Path(shutil.copytree(TINY_MODEL, parent))
    (folder / "config.json").write_text(json.dumps(GPT_OSS))
    return folder


@pytest.fixture(scope="module", params=[mistral_folder, gpt_oss_folder], ids=["mistral", "gpt_oss"])
def pod(
    request: pytest.FixtureRequest, vllm_environment: VllmEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmPod]:
    scratch = tmp_path_factory.mktemp("server")
    # the weights' names say how the folder is read; there are none in it
    flags = ("--load-format", "dummy", "--config-format", "hf", "--enable-scale-out")
    folder = request.param(scratch / "folder")
    with running_pods(
        1, environment=vllm_environment, model_folder=folder, logs=scratch / "logs", extra_flags=flags
    ) as (running,):
        yield running


def rendered(pod: VllmPod, path: str, body: dict[str, Any]) -> list[int] | None:
    status, answer = pod.post(f"{path}/render", body)
    return None if status != 200 else list(answer["token_ids"])


def test_what_a_server_renders_is_what_is_made_here(pod: VllmPod) -> None:
    tokenizer = ModelTokenizer.load(pod.model_folder)
    equal = left = 0
    different: list[str] = []
    for path, body in asked_without_templates()[::4]:
        asked = {**body, "model": MODEL_NAME}
        expected = rendered(pod, path, asked)
        if expected is None:
            continue
        try:
            (made,) = tokenizer.token_buffers(parse_request(path=path, body=json.dumps(asked).encode()))
        except PromptTokensError:
            left += 1
            continue
        if array("I", made).tolist() == expected:
            equal += 1
        else:
            different.append(json.dumps(asked)[:400])
    assert different == []
    assert equal > 100
    assert left < equal / 10
