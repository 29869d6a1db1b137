"""What besides tokens makes a block its own: LoRA adapter, multimodal inputs, cache salt, prompt embeddings.

vLLM publishes them per block, untagged, in this order: LoRA name if `lora_name` is set, multimodal identifiers
`(identifier, offset)` (a bare string before 0.19), the salt (first block of a prompt only), embedding digests (bytes).
The adapter and the salt go into the root key; the rest is folded into the block that it touches. vLLM tags the same
values in its own hashes since 0.31, `("lora", name, path)`, `("mm", identifier, offset)`, `("cache_salt", salt)` and
`("prompt_embeds", digest)`; no version publishes them so, but they are read, and mean what the plain ones do.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class UnknownExtraKeyError(ValueError):
    """An entry of a kind that we cannot fold; indexing the block as plain would be a lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraKeys:
    """One event's extra keys, separated."""

    cache_salt: str | None
    folded: tuple[bytes | None, ...] | None  # one a block; None when no block has any


def separate_extra_keys(
    entries: Sequence[Sequence[Any] | None] | None, *, lora_name: str | None, starts_prompt: bool
) -> ExtraKeys:
    """Strip the adapter, take the salt out of the first block, fold the rest.

    Nothing tells an adapter from a salt but the event's `lora_name` (vllm#44701): a bare string in first place is the
    adapter if and only if `lora_name` equals it, and the last bare string left in a prompt's first block is the salt.
    So ("X",) is a salt, ("X",) with lora_name X is the adapter, ("X", "X") with it is both, each with a root key of its
    own. Up to vLLM 0.30 the engine's own hash of the first two is the same, so that it may serve one from the other's
    blocks; it announces them once, for whoever came first, and here they attract that one alone.
    vLLM 0.17 to 0.18 writes multimodal identifiers as bare strings too: there an image in the very first block is taken
    for a salt, which costs a hit and invents none. Raise UnknownExtraKeyError.
    """
    salt: str | None = None
    folded: list[bytes | None] = []
    for index, entry in enumerate(entries or ()):
        parts = list(entry or ())
        if parts and lora_name and (parts[0] == lora_name or _tagged(parts[0], "lora", lora_name)):
            del parts[0]
        if index == 0 and starts_prompt:
            salt = _take_salt(parts)
        folded.append(fold_features(parts))
    return ExtraKeys(cache_salt=salt, folded=tuple(folded) if any(folded) else None)


def fold_features(features: Sequence[Any]) -> bytes | None:
    """Encode a block's features so that no two lists share an encoding; None if there are none.

    `(identifier, offset)`: multimodal item and its first token relative to the block's; `str`: an item without offset;
    `bytes`: a digest. The picker must build the same list. Raise UnknownExtraKeyError.
    """
    if not features:
        return None
    return b"".join(_fold(feature) for feature in features)


def _take_salt(parts: list[Any]) -> str | None:
    for index in range(len(parts) - 1, -1, -1):
        match parts[index]:
            case str() as salt:
                del parts[index]
                return salt
            case ["cache_salt", str() as salt]:
                del parts[index]
                return salt
    return None


def _tagged(part: Any, tag: str, value: str) -> bool:
    return isinstance(part, list | tuple) and tuple(part[:2]) == (tag, value)


def _fold(feature: Any) -> bytes:
    match feature:
        case ["mm", str() as identifier, int() as offset]:
            return _fold((identifier, offset))
        case ["prompt_embeds", bytes() as digest]:
            return _fold(digest)
        case [str() as identifier, int() as offset] if not isinstance(offset, bool) and abs(offset) < 1 << 63:
            text = identifier.encode()
            return b"m" + struct.pack("<Iq", len(text), offset) + text
        case str():
            text = feature.encode()
            return b"s" + struct.pack("<I", len(text)) + text
        case bytes():
            return b"e" + struct.pack("<I", len(feature)) + feature
    raise UnknownExtraKeyError(f"extra key of type {type(feature).__name__}")
