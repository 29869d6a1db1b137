"""Token ids of a request's prompts, and vLLM's truncation of them. Values only: no tokenizers, no pods.

Without ids, `PromptTokens` holds keys of text chunks, which only predict. `prompts` are looked up in the index;
`chunks` are compared with those of recent requests.
"""

from typing import Any, NamedTuple

import msgspec

from extproc.requests.request import Truncation, TruncationSide
from kvmesh.blocks.block_keys import fold_features

TOKEN_BYTES = 4


class Feature(msgspec.Struct, frozen=True, kw_only=True):
    """One image, audio clip or video in a prompt."""

    identifier: str  # the engine's hash of the item, as in its KV events
    first_token: int
    length: int  # placeholder tokens


class TokenizedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt as the engine sees it."""

    tokens: bytes  # little-endian uint32
    features: tuple[Feature, ...] = ()  # ordered by first_token

    def extra(self, block_size: int) -> list[bytes | None] | None:
        """Return the `extra` of each full block for `kvmesh.blocks.block_keys`, or None without features.

        As in vLLM 0.19 and later (`_gen_mm_extra_hash_keys`): each block that a feature touches has its identifier and
        its start relative to the block's start, negative in all blocks after the feature's first.
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
    """Tokens or text chunks of one request's prompts. At most one of `prompts` and `chunks` is filled."""

    prompts: tuple[TokenizedPrompt, ...] = ()  # the first ones, up to the caller's limit
    chunks: bytes = b""  # packed chained 8-byte keys of the first prompt's text (`prompts.text_chunks`)
    chunk_tokens: int = 0  # estimated, per chunk
    estimated_tokens: int = 0  # of all prompts; exact if `prompts` holds all of them in full
    degraded: str | None = None  # for the decision: why tokens are missing, or some of them
    degraded_why: str = ""


NO_PROMPT = PromptTokens()


# --- `truncate_prompt_tokens`, as in vLLM 0.32 (vllm/renderers/params.py) ---------------------------------------------


class Frame(NamedTuple):
    """The number of special tokens that the tokenizer puts around a text."""

    before: int
    after: int


NO_FRAME = Frame(0, 0)


def kept_tokens(truncation: Truncation, *, max_model_len: int | None) -> int | None:
    """Return the most tokens that a cut prompt keeps, or None if that is an unknown context length."""
    if truncation.tokens >= 0:
        return truncation.tokens
    return None if max_model_len is None else max(0, max_model_len - truncation.held_back)


def cut_tokens(tokens: bytes, *, keep: int, side: TruncationSide, frame: Frame = NO_FRAME) -> bytes:
    """Return at most `keep` tokens (little-endian uint32).

    With a `truncation_side` in the request, vLLM slices the finished tokens: no frame. Without one, the Hugging Face
    tokenizer cuts the text's tokens, then adds its special tokens, the frame. Raise ValueError if the frame alone is
    longer than `keep`: vLLM answers such a request with an error.
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
