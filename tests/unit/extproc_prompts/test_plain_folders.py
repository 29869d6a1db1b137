"""Which folders are read here, and which only transformers itself can read as the pods do."""

from pathlib import Path
from typing import Any

import pytest

from extproc.errors import TokenizerError
from extproc.prompts.tokenizer_folder import read_folder, why_not_plain

FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.mark.parametrize(
    ("config", "model", "expected"),
    [
        (FAST, {"model_type": "llama"}, None),
        (FAST, {}, None),
        ({"tokenizer_class": "TokenizersBackend"}, {"model_type": "qwen3"}, None),
        ({}, {"tokenizer_class": "PreTrainedTokenizerFast", "model_type": "llama"}, None),
        ({}, {}, None),  # no model type either: transformers takes its plain class
        ({"tokenizer_class": "LlamaTokenizer"}, {"model_type": "llama"}, "its tokenizer_class is LlamaTokenizer"),
        ({"tokenizer_class": "LlamaTokenizer"}, {}, "its tokenizer_class is LlamaTokenizer"),
        ({}, {"model_type": "qwen3"}, "it has no tokenizer_class, and is of type qwen3"),
        (FAST, {"model_type": "qwen2"}, "its model type is qwen2"),
        (FAST, {"model_type": "x", "model_name": "y"}, "its model type is x"),
        ({**FAST, "split_special_tokens": True}, {}, "its tokenizer_config.json has split_special_tokens"),
        (
            {**FAST, "split_special_tokens": False, "add_bos_token": True},
            {},
            None,
        ),  # tokenizer.json says which are added
        ({**FAST, "extra_special_tokens": ["<x>"]}, {}, "its tokenizer_config.json has extra_special_tokens"),
        ({**FAST, "extra_special_tokens": ["<x>"], "added_tokens_decoder": {"7": {"content": "<x>"}}}, {}, None),
        ({**FAST, "extra_special_tokens": {"image_token": "<x>"}}, {}, None),
        ({**FAST, "auto_map": {"AutoTokenizer": ["a", "b"]}}, {}, "its tokenizer_config.json has auto_map"),
    ],
)
def test_only_a_plain_folder_is_read_as_its_file_says(
    config: dict[str, Any], model: dict[str, Any], expected: str | None
) -> None:
    assert why_not_plain(config, model) == expected


@pytest.mark.parametrize("weights", [(), ("consolidated.safetensors",)])
@pytest.mark.parametrize("name", ["tekken.json", "tokenizer.model.v3"])
def test_a_folder_that_mistral_common_reads_is_refused(tmp_path: Path, name: str, weights: tuple[str, ...]) -> None:
    for file in (name, *weights):
        (tmp_path / file).write_text("{}")
    with pytest.raises(TokenizerError, match=rf"{name} with mistral-common.*`tokens: render`"):
        read_folder(tmp_path)


def test_weights_in_the_form_of_transformers_say_that_its_tokenizer_counts(tmp_path: Path) -> None:
    for name in ("tekken.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist"):
        read_folder(tmp_path)


def test_without_transformers_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"LlamaTokenizer: pip install 'kvmesh\[models\]', or let the pods"):
        read_folder(tmp_path)


def test_a_folder_that_is_not_plain_needs_its_config_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"/config\.json does not exist, and which tokenizer"):
        read_folder(tmp_path)
