"""Our own block keys: the same tokens give the same key, whatever the pod, its vLLM version or its hash seed.

This is the hot path of the picker (once a request) and of the indexer (once an event): no I/O, and no allocation per
block but the key itself. Both sides must agree on every byte; a change is a new schema version (`redis.keys`).

What besides tokens makes a block its own (LoRA adapter, multimodal inputs, cache salt, prompt embeddings) is published
by vLLM per block and untagged, in this order: the LoRA name if `lora_name` is set, multimodal identifiers
`(identifier, offset)` (a bare string before 0.19), the salt (first block of a prompt only), embedding digests (bytes).
The adapter and the salt go into the root key; the rest is folded into the block that it touches. Since 0.31 vLLM tags
the same values in its own hashes: `("lora", name, path)`, `("mm", identifier, offset)`, `("cache_salt", salt)` and
`("prompt_embeds", digest)`. No version publishes them so, but they are read, and mean what the plain ones do.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import xxhash

KEY_BYTES = 8
TOKEN_BYTES = 4
NAME_LIMIT = 256  # characters of a salt, an adapter or an identifier that are kept as they are
NAME_DIGEST_BYTES = 16
FEW_BLOCKS = 64  # that are cut by a layout made before: 2 kB each

RootKeys = Callable[[str | None, str | None], bytes]  # (LoRA name, cache salt) -> root key
# block size -> what enters each full block's key beside its tokens (see `fold_features`); None: nothing anywhere
BlockExtras = Callable[[int], Sequence[bytes | None] | None]


def root_key(*, hash_seed: str, model: str, lora: str | None = None, cache_salt: str | None = None) -> bytes:
    """Return the 8 bytes that precede the first block of a prompt.

    vLLM folds `cache_salt` into block 0 alone, which changes the whole chain; here it is part of the root, to the same
    effect. `None` and "" differ for no field: vLLM refuses an empty salt, and an empty adapter name means none. An
    adapter or salt and its `held_name` give the same key.
    """
    digest = xxhash.xxh3_64(b"kvmesh-root-1")
    for part in (hash_seed, model, held_name(lora or ""), held_name(cache_salt or "")):
        text = part.encode()
        digest.update(struct.pack("<I", len(text)) + text)  # length first: ("a", "bc") is not ("ab", "c")
    return digest.digest()


def held_name(text: str) -> str:
    """Return what stands for a name that others chose, wherever it is held: itself, or a digest where it is long.

    Pods and clients may choose megabytes. The digest is cryptographic, and the result is its own.
    """
    if len(text) <= NAME_LIMIT:
        return text
    return f"\0blake2b:{blake2b(text.encode(), digest_size=NAME_DIGEST_BYTES).hexdigest()}"


def held_digest(value: bytes) -> bytes:
    """Return what stands for an embedding's digest, as `held_name` does for a text."""
    return value if len(value) <= NAME_LIMIT else blake2b(value, digest_size=NAME_DIGEST_BYTES).digest()


def block_keys(
    tokens: bytes | memoryview, *, block_size: int, parent: bytes, extra: Sequence[bytes | None] | None = None
) -> bytes:
    """Chain full blocks into keys: `key[i] = xxh3_64(key[i-1] + tokens of block i [+ extra[i]])`, `key[-1] = parent`.

    `tokens` is a buffer of little-endian uint32, `block_size` counts tokens, `parent` is a root or the key of the block
    before. The result is the concatenation of 8-byte keys; a trailing partial block has none. `extra` has one entry a
    full block (see `fold_features`). Raise ValueError for a block size below 1 or an `extra` that is too short.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1 token, not {block_size}")
    step = block_size * TOKEN_BYTES
    count = len(tokens) // step
    # one C call cuts all blocks; slicing in the loop costs twice as much
    if count <= FEW_BLOCKS:  # a chat's end, or a chunk: the layout at hand saves 15 of 60 us where caches are cold
        blocks: tuple[bytes, ...] = _cutter(step, count)(tokens)
    else:
        blocks = struct.unpack(f"{step}s" * count, memoryview(tokens)[: count * step])
    digest = xxhash.xxh3_64_digest
    key = parent
    if extra is None:
        return b"".join([key := digest(key + block) for block in blocks])
    if len(extra) < count:
        raise ValueError(f"{len(extra)} extra entries for {count} blocks")
    return b"".join([key := digest(key + block + (more or b"")) for block, more in zip(blocks, extra, strict=False)])


@lru_cache(maxsize=256)
def _cutter(step: int, count: int) -> Callable[[bytes | memoryview], tuple[Any, ...]]:
    """Return what cuts so many pieces of `step` bytes from the beginning of a buffer."""
    return struct.Struct(f"{step}s" * count).unpack_from


def split_keys(packed: bytes) -> tuple[bytes, ...]:
    """Cut a concatenation of 8-byte keys."""
    return struct.unpack(f"{KEY_BYTES}s" * (len(packed) // KEY_BYTES), packed)


class UnknownExtraKeyError(ValueError):
    """An entry of a kind that we cannot fold; indexing the block as plain would be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraKeys:
    """One event's extra keys, separated."""

    cache_salt: str | None
    folded: tuple[bytes | None, ...] | None  # one a block; None when no block has any


def separate_extra_keys(
    entries: Sequence[Sequence[Any] | None] | None, *, lora_name: str | None, starts_prompt: bool
) -> ExtraKeys:
    """Strip the adapter, take the salt out of the first block, fold the rest.

    Only the event's `lora_name` distinguishes an adapter from a salt (vllm#44701): a bare string in first place is the
    adapter if and only if `lora_name` equals it, and the last bare string left in a prompt's first block is the salt.
    So ("X",) is a salt, ("X",) with lora_name X is the adapter, ("X", "X") with it is both, each with a root key of its
    own. Up to vLLM 0.30 the engine's own hash of the first two is the same, so that it may serve one from the other's
    blocks; it announces them once, for the request that came first, and here they match only its kind.
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
            text = held_name(identifier).encode()
            return b"m" + struct.pack("<Iq", len(text), offset) + text
        case str():
            text = held_name(feature).encode()
            return b"s" + struct.pack("<I", len(text)) + text
        case bytes():
            digest = held_digest(feature)
            return b"e" + struct.pack("<I", len(digest)) + digest
    raise UnknownExtraKeyError(f"extra key of type {type(feature).__name__}")
