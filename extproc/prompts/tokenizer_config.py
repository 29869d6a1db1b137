"""What a Hugging Face tokenizer folder says beside tokenizer.json, read as transformers 5 reads it.

Called by the tokenizer adapter with the decoded JSON files. Pure: it opens no file and knows no tokenizer library.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# The token names that every tokenizer class has; templates see those that are set as variables.
NAMED_TOKENS = (*("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),)
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# vLLM 0.32 renders these models' chats in code of its own (some with today's date), whatever template they carry.
ARCHITECTURES_WITHOUT_TEMPLATE = frozenset(
    (
        *("GptOssForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV41ForCausalLM", "DeepseekV4ForCausalLM"),
        *("DeepseekV4ForConditionalGeneration", "KimiK3ForConditionalGeneration", "MoonshotKimiaForCausalLM"),
        *("InklingForCausalLM", "InklingForConditionalGeneration"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token that is matched in the text before the model's own splitting; flags as in tokenizer.json."""

    content: str
    flags: Mapping[str, bool]


def special_tokens(config: Mapping[str, Any], legacy: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens that a chat template sees, by variable name (`bos_token`, …).

    `config` is tokenizer_config.json, `legacy` special_tokens_map.json, which counts only for folders that do not list
    their added tokens in the configuration.
    """
    source = dict(config) if "added_tokens_decoder" in config else {**config, **legacy}
    extra = source.get("extra_special_tokens")
    if isinstance(extra, dict):
        source |= extra
    found = {name: text for name, value in source.items() if (text := _content(value)) is not None}
    named = {name: found[name] for name in NAMED_TOKENS if name in found}
    own = {name: text for name, text in found.items() if name.endswith("_token") or _is_key(extra, name)}
    return named | own


def added_tokens(config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yield the tokens that the configuration adds to tokenizer.json's, in the order of their ids."""
    listed = config.get("added_tokens_decoder") or {}
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        flags = {name: bool(token[name]) for name in TOKEN_FLAGS if name in token}
        yield AddedToken(content=token["content"], flags=flags)


def chat_templates(config: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, str]:
    """Return template sources by name; `files` (from *.jinja, "default" being chat_template.jinja) win altogether."""
    if files:
        return dict(files)
    template = config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return dict(template) if isinstance(template, dict) else {}


def _content(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _is_key(mapping: Any, name: str) -> bool:
    return isinstance(mapping, dict) and name in mapping
