"""Reads a model's tokenizer folder; turns text into token ids, chats into prompts, and picks words to generate.

The pods of one process share one `ModelFolder`. Only `load_model_folder` reads files, at startup.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import fastokens  # type: ignore[import-untyped]
from tokenizers import Tokenizer

from podsim.core.generate import Vocabulary
from podsim.errors import RequestRefusedError, SettingsError
from podsim.wire.chat_template import ChatTemplate

TINY_MODEL = Path(__file__).parent / "tiny_model"

_WORDS_WANTED = 2000
SAYS_SO = " [simulated]"  # starts each answer, so that nobody takes it for a real model's
_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PROBE = "Zwölf Boxkämpfer jagen Viktor; def f(x):\n\treturn x ** 2  # 日本語 🦊\r\n\n  12345.678 it's I'll"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """What a pod needs from a model. `fast` is a quick tokenizer, or None if it disagrees with `tokenizer`."""

    path: Path
    tokenizer: Tokenizer
    fast: fastokens.Tokenizer | None
    chat_template: ChatTemplate | None
    vocabulary: Vocabulary
    vocabulary_size: int

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return token ids from the quick tokenizer, if there is one, to spend little time on each request."""
        if self.fast is not None:
            token_ids: list[int] = self.fast.encode(text, add_special_tokens=add_special_tokens).ids
            return token_ids
        return self.encode_by_reference(text, add_special_tokens=add_special_tokens)

    def encode_by_reference(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the `tokenizers` library's token ids, the reference; /tokenize and /render answer with them."""
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))

    def require_chat_template(self) -> ChatTemplate:
        """Return the folder's template; raise RequestRefusedError in vLLM's wording if there is none."""
        if self.chat_template is None:
            raise RequestRefusedError(
                "As of transformers v4.44, default chat template is no longer allowed, so you must provide a "
                "chat template if the tokenizer does not define one."
            )
        return self.chat_template


def load_model_folder(path: Path) -> ModelFolder:
    """Read tokenizer.json, tokenizer_config.json and chat_template.jinja; SettingsError if there is no tokenizer."""
    file = path / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise SettingsError(f"no tokenizer in {path}: {error}") from error
    config = _read_config(path / "tokenizer_config.json")
    special_tokens = {
        name: text for name in _SPECIAL_TOKEN_NAMES if (text := _token_text(config.get(name))) is not None
    }
    source = _template_source(path, config)
    eos = special_tokens.get("eos_token")
    return ModelFolder(
        path=path,
        tokenizer=tokenizer,
        fast=_load_fast(file, reference=tokenizer),
        chat_template=None if source is None else ChatTemplate(source, special_tokens=special_tokens),
        vocabulary=build_vocabulary(tokenizer, end_of_turn=None if eos is None else tokenizer.token_to_id(eos)),
        vocabulary_size=tokenizer.get_vocab_size(with_added_tokens=True),
    )


def build_vocabulary(tokenizer: Tokenizer, *, end_of_turn: int | None) -> Vocabulary:
    """Return tokens whose text encodes back to the same token: words with a leading space, and "," and "."."""
    words: dict[int, str] = {}
    for token, token_id in sorted(tokenizer.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1]):
        if not re.fullmatch(r"[Ġ▁][A-Za-z][a-z]{2,11}", token):
            continue
        text = f" {token[1:]}"
        if tokenizer.encode(text, add_special_tokens=False).ids == [token_id]:
            words[token_id] = text
            if len(words) == _WORDS_WANTED:
                break
    punctuation = {
        ids[0]: text for text in (",", ".") if len(ids := tokenizer.encode(text, add_special_tokens=False).ids) == 1
    }
    if not words:  # no byte-level or sentencepiece words: use any token that decodes to some text
        words = {
            token_id: text
            for token_id in range(tokenizer.get_vocab_size(with_added_tokens=False))
            if (text := tokenizer.decode([token_id])) and "\ufffd" not in text
        }
    texts = words | punctuation | ({} if end_of_turn is None else {end_of_turn: ""})
    opening = _opening(tokenizer, follower=next(iter(words.items())))
    return Vocabulary(
        words=list(words),
        punctuation=list(punctuation),
        texts=texts,
        end_of_turn=end_of_turn,
        opening=[token for token, _ in opening],
        opening_texts=[text for _, text in opening],
    )


def _opening(tokenizer: Tokenizer, *, follower: tuple[int, str]) -> list[tuple[int, str]]:
    """Return the tokens of SAYS_SO and the text each adds, or none if a word after it would change them."""
    ids = list(tokenizer.encode(SAYS_SO, add_special_tokens=False).ids)
    word, word_text = follower
    if tokenizer.encode(SAYS_SO + word_text, add_special_tokens=False).ids != [*ids, word]:
        return []
    shown = [tokenizer.decode(ids[:count]) for count in range(len(ids) + 1)]
    texts = [longer[len(shorter) :] for shorter, longer in pairwise(shown)]
    if "".join(texts) == SAYS_SO.lstrip():  # decoders of sentencepiece models remove the leading space
        texts[0] = f" {texts[0]}"
    return list(zip(ids, texts, strict=True)) if "".join(texts) == SAYS_SO else []


def _load_fast(file: Path, *, reference: Tokenizer) -> fastokens.Tokenizer | None:
    try:
        fast = fastokens.Tokenizer.from_file(str(file))
        same = all(
            fast.encode(_PROBE, add_special_tokens=special).ids
            == reference.encode(_PROBE, add_special_tokens=special).ids
            for special in (True, False)
        )
    except Exception:  # it does not support this tokenizer.json
        return None
    return fast if same else None


def _read_config(file: Path) -> Mapping[str, Any]:
    if not file.exists():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"{file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise SettingsError(f"{file} holds no JSON object")
    return config


def _template_source(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # named templates
        named = {entry["name"]: entry["template"] for entry in source}
        return named.get("default")
    return source


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):  # a serialised AddedToken
        value = value.get("content")
    return value if isinstance(value, str) else None
