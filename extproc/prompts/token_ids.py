"""Token ids of a request's prompts, and how vLLM cuts them; values only, nothing here knows tokenizers or pods.

Where no ids are known, `PromptTokens` holds keys of text chunks instead, which only predict. `prompts` are looked up in
the index, `chunks` are compared with those of recent requests.
"""

from typing import Any, NamedTuple

import msgspec

from extproc.requests.request import Truncation, TruncationSide
from kvmesh.blocks.block_keys import fold_features

TOKEN_BYTES = 4


class Feature(msgspec.Struct, frozen=True, kw_only=True):
    """One image, audio clip or video in a prompt."""

    identifier: str  # the engine's hash of it, as in its KV events
    first_token: int
    length: int  # tokens that stand for it


class TokenizedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt as the engine sees it."""

    tokens: bytes  # little-endian uint32
    features: tuple[Feature, ...] = ()  # ordered by first_token

    def extra(self, block_size: int) -> list[bytes | None] | None:
        """Return what each full block has beside its tokens: the `extra` of `kvmesh.blocks.block_keys`, or None.

        As vLLM 0.19 and later (`_gen_mm_extra_hash_keys`): every block that a feature touches has its identifier and
        its first token relative to the block's, negative in the blocks after the first.
        """
        if not self.features:
            return None
        full_blocks = len(self.tokens) // (TOKEN_BYTES * block_size)
        touching: dict[int, list[Any]] = {}
        for feature in self.features:
            first = feature.first_token // block_size
            end = -(-(feature.first_token + feature.length) // block_size)
            for block in range(first, min(end, full_blocks)):
                touching.setdefault(block, []).append((feature.identifier, feature.first_token - block * block_size))
        return [fold_features(touching[block]) if block in touching else None for block in range(full_blocks)]


class PromptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of the prompts of one request. At most one of `prompts` and `chunks` is filled."""

    prompts: tuple[TokenizedPrompt, ...] = ()  # the first ones: as many as were asked for
    chunks: bytes = b""  # packed chained 8-byte keys of the first prompt's text (`prompts.text_chunks`)
    chunk_tokens: int = 0  # estimated tokens a chunk
    estimated_tokens: int = 0  # of all prompts; exact when `prompts` holds all of them whole
    degraded: str | None = None  # for the decision: why the tokens are not known, or not all
    degraded_why: str = ""


NO_PROMPT = PromptTokens()


# --- `truncate_prompt_tokens`, as in vLLM 0.32 (vllm/renderers/params.py) ---------------------------------------------


class Frame(NamedTuple):
    """How many special tokens the tokenizer puts around a text."""

    before: int
    after: int


NO_FRAME = Frame(0, 0)


def kept_tokens(truncation: Truncation, *, max_model_len: int | None) -> int | None:
    """Return the longest prompt that is left whole; None if that is the context length, which is not known."""
    if truncation.tokens >= 0:
        return truncation.tokens
    return None if max_model_len is None else max(0, max_model_len - truncation.held_back)


def cut_tokens(tokens: bytes, *, keep: int, side: TruncationSide, frame: Frame = NO_FRAME) -> bytes:
    """Return at most `keep` tokens (little-endian uint32).

    With a `truncation_side` in the request vLLM slices the finished tokens: no frame. Without one the Hugging Face
    tokenizer cuts the text's tokens and puts its special ones, the frame, around what is left. Raise ValueError where
    the frame alone is longer: vLLM answers such a request with an error.
    """
    length = len(tokens) // TOKEN_BYTES
    if length <= keep:
        return tokens
    if keep == 0:
        return b""
    inner = keep - frame.before - frame.after
    if inner < 0:
        raise ValueError(f"{keep} tokens leave no room beside {frame.before + frame.after} special tokens")
    end = length - frame.after
    start = end - inner if side is TruncationSide.LEFT else frame.before
    middle = tokens[start * TOKEN_BYTES : (start + inner) * TOKEN_BYTES]
    return tokens[: frame.before * TOKEN_BYTES] + middle + tokens[end * TOKEN_BYTES :]
