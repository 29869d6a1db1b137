"""Which files of a repository are fetched."""

import pytest

from extproc.hub.token_files import token_files

LLAMA = ["config.json", "generation_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
NEVER = [
    *(
        "model.safetensors",
        "pytorch_model.bin",
        "modeling_llama.py",
        "tokenization_own.py",
        "README.md",
        ".gitattributes",
    ),
    *("onnx/tokenizer.json", "../tokenizer.json", "additional_chat_templates/../../x.jinja", "training_args.bin"),
]


def test_never_weights_code_or_paths_that_lead_elsewhere() -> None:
    assert token_files([*NEVER, *LLAMA]) == LLAMA


def test_all_templates_are_taken() -> None:
    templates = [
        "additional_chat_templates/rag.jinja",
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
    ]
    assert token_files([*LLAMA, *templates, "other/x.jinja"]) == sorted([*LLAMA, *templates])


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ("model-00001-of-00005.safetensors", []),
        ("consolidated.safetensors", ["params.json", "tekken.json", "tokenizer.model.v3"]),
        ("consolidated-00001.safetensors", ["params.json", "tekken.json", "tokenizer.model.v3"]),
    ],
)
def test_files_of_mistral_common_where_vllm_goes_by_them(weights: str, expected: list[str]) -> None:
    repository = [weights, "params.json", "tekken.json", "tokenizer.json", "tokenizer.model.v3"]
    assert token_files(repository) == sorted([*expected, "tokenizer.json"])


def test_a_repository_with_tekken_alone_has_that() -> None:
    assert token_files(["tekken.json", "model.safetensors"]) == ["tekken.json"]
