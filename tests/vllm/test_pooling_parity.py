"""For embeddings and pooling our token ids are those of a real vLLM: as many, and with the same embedding.

These APIs have no render endpoint, so a pod that serves the tiny model's last hidden state is asked twice: with the
body, and with the ids that we made of it.
"""

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.openai import parse_request
from tests.vllm.environment import VllmEnvironment
from tests.vllm.servers import BLOCK_SIZE, MAX_MODEL_LEN, VllmPod, hit_tokens, running_pods

HI = {"role": "user", "content": "Hi"}
LONG = "one two three four five six seven eight nine ten " * 4
BODIES: dict[str, dict[str, Any]] = {
    "text": {"input": "one"},
    "texts": {"input": ["one", "two words"]},
    "ids": {"input": [5, 6, 7]},
    "lists of ids": {"input": [[5, 6], [7]]},
    "no special tokens": {"input": "one two", "add_special_tokens": False},
    "cut": {"input": LONG, "truncate_prompt_tokens": 5},
    "cut on the left": {"input": LONG, "truncate_prompt_tokens": 5, "truncation_side": "left"},
    "cut on the right": {"input": LONG, "truncate_prompt_tokens": 5, "truncation_side": "right"},
    "cut to the context": {"input": LONG * 100, "truncate_prompt_tokens": -1},
    "chat": {"messages": [HI]},
    "chat with a generation prompt": {"messages": [HI], "add_generation_prompt": True},
    "chat with special tokens": {"messages": [HI], "add_special_tokens": True},
    "continued chat": {"messages": [HI, {"role": "assistant", "content": "We"}], "continue_final_message": True},
}
BATCHES: dict[str, dict[str, Any]] = {
    "chat as input": {"input": [HI]},
    "chats": {"messages": [[HI], [HI, HI]]},
    "chats as input": {"input": [[HI], [HI, HI]]},
}
CASES = [
    *(("/v1/embeddings", name, body) for name, body in (BODIES | BATCHES).items()),
    *(("/pooling", name, body | {"task": "embed"}) for name, body in BODIES.items()),
]


@pytest.fixture(scope="module")
def pooling_pod(
    vllm_environment: VllmEnvironment, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmPod]:
    with running_pods(
        1,
        environment=vllm_environment,
        model_folder=tiny_model,
        logs=tmp_path_factory.mktemp("pooling"),
        extra_flags=("--runner", "pooling", "--convert", "embed"),
    ) as (pod,):
        yield pod


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> ModelTokenizer:
    return ModelTokenizer.load(tiny_model)


def embedded(pod: VllmPod, path: str, body: dict[str, Any]) -> tuple[int, list[list[float]]]:
    """Return how many tokens there were and one vector per prompt."""
    status, answer = pod.post(path, {"model": pod.model, **body})
    assert status == 200, answer
    return answer["usage"]["prompt_tokens"], [item.get("embedding") or item["data"] for item in answer["data"]]


@pytest.mark.parametrize(("path", "name", "body"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_each_form_of_input_has_vllms_tokens(
    pooling_pod: VllmPod, tokenizer: ModelTokenizer, path: str, name: str, body: dict[str, Any]
) -> None:
    request = parse_request(path=path, body=json.dumps(body).encode())
    ids = [list(array("I", buffer)) for buffer in tokenizer.token_buffers(request, max_model_len=MAX_MODEL_LEN)]
    count, vectors = embedded(pooling_pod, path, body)
    count_of_ids, vectors_of_ids = embedded(pooling_pod, "/v1/embeddings", {"input": ids})
    assert (count, len(vectors)) == (count_of_ids, len(ids))
    for vector, vector_of_ids in zip(vectors, vectors_of_ids, strict=True):
        assert vector == pytest.approx(vector_of_ids, abs=1e-3)


def test_the_side_that_is_cut_shows_in_the_embedding(pooling_pod: VllmPod) -> None:
    _, left = embedded(pooling_pod, "/v1/embeddings", BODIES["cut on the left"])
    _, right = embedded(pooling_pod, "/v1/embeddings", BODIES["cut on the right"])
    assert left[0] != pytest.approx(right[0], abs=1e-2)


def test_an_embedding_model_gets_each_text_of_a_score_on_its_own(
    pooling_pod: VllmPod, tokenizer: ModelTokenizer
) -> None:
    body = {"query": "what is a module " * 20, "documents": ["an import " * 20, "a class " * 20]}
    request = parse_request(path="/rerank", body=json.dumps(body).encode())
    texts = [list(array("I", buffer)) for buffer in tokenizer.token_buffers(request)]
    status, _ = pooling_pod.post("/rerank", {"model": pooling_pod.model, **body})
    assert (status, len(texts)) == (200, 3)
    for ids in texts:
        before = hit_tokens(pooling_pod)
        embedded(pooling_pod, "/v1/embeddings", {"input": ids})
        assert hit_tokens(pooling_pod) - before == (len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
