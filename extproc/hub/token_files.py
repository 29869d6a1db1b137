"""Which files of a model are its tokenizer's: never weights, never code. Pure."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

# config.json names the model's type, on which the tokenizer's class depends; generation_config.json its end tokens
ALWAYS = frozenset(
    (
        *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
        *("chat_template.jinja", "chat_template.json", "config.json", "generation_config.json"),
        *("preprocessor_config.json", "processor_config.json", "config_sentence_transformers.json"),
    )
)
_TEMPLATES = re.compile(r"additional_chat_templates/[A-Za-z0-9_][\w.-]{0,127}\.jinja", re.ASCII)
_MISTRAL = re.compile(r"tekken\.json|params\.json|tokenizer\.model\.v[\w.]{1,32}", re.ASCII)


def token_files(paths: Iterable[str]) -> list[str]:
    """Return those of a repository's files that tokenizing needs, in order.

    Those of mistral-common are left out where vLLM does not go by them: it does where the repository has weights called
    consolidated*.safetensors (vllm 0.32, tokenizers/registry.py), and a picker takes a folder that has them for such.
    """
    listed = sorted(set(paths))
    is_mistral = any(fnmatchcase(path, "consolidated*.safetensors") for path in listed)
    has_other = any(path in ("tokenizer.json", "tokenizer.model") for path in listed)
    with_mistral = is_mistral or not has_other
    return [
        path
        for path in listed
        if path in ALWAYS or _TEMPLATES.fullmatch(path) or (with_mistral and _MISTRAL.fullmatch(path))
    ]
