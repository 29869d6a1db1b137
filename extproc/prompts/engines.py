"""The two libraries that turn text into token ids, and the choice between them for a model's tokenizer."""

import logging
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fastokens  # type: ignore[import-untyped]
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from extproc.requests.request import TokenPrompt

logger = logging.getLogger(__name__)


class Engine:
    """The reference: the library that vLLM itself uses, with the model's tokenizer.json. About 1.4 µs a token."""

    name = "tokenizers"
    thread_above_bytes = 4_000  # larger bodies are worth a thread: the libraries release the GIL
    # whether a truncation without an explicit side always cuts the end; others keep the special tokens around the text
    cuts_texts_at_end = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Return the token ids as little-endian uint32."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return TokenPrompt.of(ids).token_bytes

    def decode(self, tokens: bytes) -> str:
        """Return the text of token ids (little-endian uint32), with special tokens spelled out."""
        return str(self._tokenizer.decode(ids_of(tokens), skip_special_tokens=False))


class FastEngine(Engine):
    """fastokens: about 0.03 µs a token, nearly nothing for segments in its cache."""

    name = "fastokens"
    thread_above_bytes = 200_000

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Return the token ids as little-endian uint32."""
        ids: bytes = self._tokenizer.encode_batch_flat([text], add_special_tokens=add_special_tokens)[0]
        return ids


def ids_of(tokens: bytes) -> list[int]:
    """Return the ids of a buffer of little-endian uint32."""
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def choose_engine(
    tokenizer: tokenizers.Tokenizer, specials: Sequence[str], folder: Path, segment_cache_bytes: int
) -> Engine:
    """Return fastokens if it loads the file and agrees with the reference on the probe texts, else the reference."""
    reference = Engine(tokenizer)
    try:
        loaded = fastokens.Tokenizer.from_json_str(_for_fastokens(tokenizer).to_str())
        loaded.enable_segment_cache(segment_cache_bytes)
        fast = FastEngine(loaded)
        different = first_difference(reference, fast, probe_texts(specials))
    except Exception as error:  # the library raises plain exceptions, and a fallback exists
        why, found = "fastokens cannot load this tokenizer", {"cause": str(error)}
    else:
        if different is None:
            return fast
        why, found = "fastokens and tokenizers disagree about this tokenizer", {"probe": different}
    logger.warning(
        "%s: every token costs 3 to 110 times as much CPU",
        why,
        extra={"tokenizer": str(folder), "engine": reference.name, **found},
    )
    return reference


def _for_fastokens(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return an equivalent tokenizer that fastokens can load.

    fastokens lacks the pre-tokenizer Metaspace of Llama 2 and similar models. A Metaspace that does not split and
    always marks the beginning of a text equals two replacements by a normalizer. That is wrong if an added token is
    matched in normalized text.
    """
    meta = tokenizer.pre_tokenizer
    if (
        not isinstance(meta, pre_tokenizers.Metaspace)
        or (meta.prepend_scheme, meta.split) != ("always", False)
        or tokenizer.normalizer is not None
        or any(token.normalized for token in tokenizer.get_added_tokens_decoder().values())
    ):
        return tokenizer
    same = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    mark = meta.replacement
    begin = normalizers.Replace(tokenizers.Regex(f"^(?=[^{mark}])"), mark)  # not before a mark, nor in empty text
    same.normalizer = normalizers.Sequence([normalizers.Replace(" ", mark), begin])
    same.pre_tokenizer = None
    return same


def first_difference(reference: Engine, other: Engine, texts: Sequence[str]) -> str | None:
    """Return the beginning of the first text on which the engines differ, or None if they agree on all texts."""
    for text in texts:
        for special in (False, True):
            expected = reference.encode(text, add_special_tokens=special)
            # twice: the second result comes from the segment cache
            if any(other.encode(text, add_special_tokens=special) != expected for _ in range(2)):
                return text[:40]
    return None


def probe_texts(specials: Sequence[str]) -> list[str]:
    """Return short texts on which tokenizers tend to disagree, including the model's own special tokens."""
    texts = [
        "",
        " ",
        "The quick brown fox doesn't jump; it's 12,345.678 or 1e-9?",
        "def f(x):\n\treturn {'a': [x, 0x1F]}  # tab\r\n\r\n    \n\n  if x:\n        pass\n",
        "naïve café — “quotes” … Straße, İstanbul, ŀ, ﬁ, e\u0301 vs é, \u00a0nbsp\u2003wide\u200bzero\ufeff",
        "日本語のテキスト。中文，한국어 ไทย हिन्दी العربية עברית Ελληνικά Кириллица",
        "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 \U0001f600 \U000e0067 \x00\x01\x7f\x85\u2028\u2029",
        "a" * 300 + " " * 70 + "\n" * 40 + "\t" * 9 + "=" * 120,
        "'S 'LL 'Ve ABC'd 1234567890 ١٢٣ ½ ² x²+y²≠z² ~/.config/<tag attr=\"v\">&amp;</tag>",
    ]
    marked = "".join(f"{token} text {token}\n{token}" for token in specials)
    return [*texts, marked, marked.upper(), " ".join(texts) * 8 + marked]
