"""What is known of a request's prompts: token ids, or keys of text chunks, which only predict, where nobody has those.

Made by `prompts.prompt_tokens`, read by the use case: `prompts` are looked up in the index, `chunks` are matched
against recent routes. Values only; nothing here knows tokenizers or pods.
"""

from typing import Any

import msgspec

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
        extra: list[bytes | None] = [None] * full_blocks
        for block, features in touching.items():
            extra[block] = fold_features(features)
        return extra


class PromptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of the prompts of one request. At most one of `prompts` and `chunks` is filled."""

    prompts: tuple[TokenizedPrompt, ...] = ()  # the first ones: as many as were asked for
    chunks: bytes = b""  # packed chained 8-byte keys of the first prompt's text (`prompts.text_chunks`)
    chunk_tokens: int = 0  # estimated tokens a chunk
    estimated_tokens: int = 0  # of all prompts; exact when `prompts` holds all of them whole
    degraded: str | None = None  # word for the decision: why the tokens are not known, or not all
    degraded_why: str = ""


NO_PROMPT = PromptTokens()
