"""Pairs of /score and /rerank have the tokens that vLLM makes of them: by its own code, and by a real server's cache.

The code is asked for every form that a model may take. The server classifies: it is asked with texts, and then for the
same with our token ids, of which it must hold every full block.
"""

import json
import shutil
import subprocess
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.openai import parse_request
from tests.vllm.environment import VllmEnvironment, offline
from tests.vllm.servers import BLOCK_SIZE, VllmPod, hit_tokens, running_pods

HERE = Path(__file__).parent
CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
FORMS: dict[str, dict[str, Any]] = {
    "pairs": CLASSIFIER,
    "joined": CLASSIFIER | {"use_sep_token": False},
    "from a language model": CLASSIFIER | {"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"},
}
TEMPLATE = (
    "{% if instruction %}{{ instruction }}\n{% endif %}"
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
)
TEXTS = (
    "",
    "a",
    " two words ",
    "naïve 日本語 👩‍👩‍👧‍👦\n",
    "<|im_start|>user",
    "x" * 300,
    "def f(x):\n\treturn {'a': x}\n",
)
BODIES: list[dict[str, Any]] = [
    *({"query": text, "documents": list(TEXTS)} for text in TEXTS if text),
    {"query": "why", "documents": ["because", "of it"], "instruction": "Answer."},
    {"query": "why", "documents": ["b"], "instruction": "no", "chat_template_kwargs": {"instruction": "yes"}},
]
CUT = {"query": "one two three four", "documents": ["five six seven"], "truncate_prompt_tokens": 4}


def with_config(model: Path, folder: Path, config: dict[str, Any], *, special: bool = False) -> Path:
    """Copy the tiny model; `special`: its tokenizer frames texts as BERT's does."""
    shutil.copytree(model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if special:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.post_processor = TemplateProcessing(
            single="<|bos|> $A <|eos|>",
            pair="<|bos|> $A <|eos|> $B:1 <|eos|>:1",
            special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)],
        )
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def our_ids(tokenizer: ModelTokenizer, body: dict[str, Any]) -> list[list[int]]:
    request = parse_request(path="/rerank", body=json.dumps(body).encode())
    return [list(array("I", buffer)) for buffer in tokenizer.token_buffers(request)]


CASES = [(form, template, special) for form in FORMS for template in (None, TEMPLATE) for special in (False, True)]


def bodies(form: str, template: str | None) -> list[dict[str, Any]]:
    # a pair is cut by its longer text, token by token: we leave that to the pod
    return BODIES if form == "pairs" and template is None else [*BODIES, CUT]


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parent = tmp_path_factory.mktemp("models")
    return [
        with_config(tiny_model, parent / str(number), FORMS[form], special=special)
        for number, (form, _, special) in enumerate(CASES)
    ]


@pytest.fixture(scope="module")
def vllm_ids(vllm_environment: VllmEnvironment, folders: list[Path]) -> list[list[list[list[int]]]]:
    """For each case and body, the ids of each pair; see `score_oracle`."""
    question = [
        {"folder": str(folder), "template": template, "bodies": bodies(form, template)}
        for folder, (form, template, _) in zip(folders, CASES, strict=True)
    ]
    done = subprocess.run(
        [str(vllm_environment.python), str(HERE / "score_oracle.py")],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        env=offline(),
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: list[list[list[list[int]]]] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("number", range(len(CASES)))
def test_pairs_are_what_vllm_s_own_code_makes_of_them(
    number: int, folders: list[Path], vllm_ids: list[list[list[list[int]]]], tmp_path: Path
) -> None:
    form, template, _ = CASES[number]
    source = None
    if template is not None:
        source = tmp_path / "score.jinja"
        source.write_text(template)
    tokenizer = ModelTokenizer.load(folders[number], chat_template=source)
    assert [our_ids(tokenizer, body) for body in bodies(form, template)] == vllm_ids[number]


@pytest.fixture(scope="module")
def classifier(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_config(tiny_model, tmp_path_factory.mktemp("classifier") / "model", CLASSIFIER)


@pytest.fixture(scope="module")
def scoring_pod(
    vllm_environment: VllmEnvironment, classifier: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmPod]:
    with running_pods(
        1,
        environment=vllm_environment,
        model_folder=classifier,
        logs=tmp_path_factory.mktemp("scoring"),
        extra_flags=("--runner", "pooling", "--load-format", "dummy"),
    ) as (pod,):
        yield pod


@pytest.mark.parametrize(
    ("path", "query", "documents"),
    [("/rerank", "query", "documents"), ("/score", "text_1", "text_2"), ("/v1/score", "queries", "items")],
)
def test_a_server_holds_the_blocks_of_our_pairs(
    scoring_pod: VllmPod, classifier: Path, path: str, query: str, documents: str
) -> None:
    body = {
        query: f"{path} what is an import of a module " * 8,
        documents: ["def f(x): return x " * 20, "class A: " * 9],
    }
    request = parse_request(path=path, body=json.dumps(body).encode())
    pairs = [list(array("I", buffer)) for buffer in ModelTokenizer.load(classifier).token_buffers(request)]
    status, answer = scoring_pod.post(path, {"model": scoring_pod.model, **body})
    assert (status, answer["usage"]["prompt_tokens"]) == (200, sum(map(len, pairs)))
    for ids in pairs:
        before = hit_tokens(scoring_pod)
        status, _ = scoring_pod.post("/classify", {"model": scoring_pod.model, "input": ids})
        # the last token is always computed
        assert (status, hit_tokens(scoring_pod) - before) == (200, (len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE)
