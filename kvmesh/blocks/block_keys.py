"""Our own block keys: the same tokens give the same key, whatever the pod, its vLLM version or its hash seed.

The hot path of the picker (once a request) and of the indexer (once an event): no I/O, no allocation per block but
the key itself. Both sides must agree on every byte here; a change is a new schema version (`redis.keys`).
"""

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import xxhash

KEY_BYTES = 8
TOKEN_BYTES = 4
FEW_BLOCKS = 64  # that are cut by a layout made before: 2 kB each

# block size -> what enters each full block's key beside its tokens (see `blocks.extra_keys`); None: nothing anywhere
BlockExtras = Callable[[int], Sequence[bytes | None] | None]


def root_key(*, hash_seed: str, model: str, lora: str | None = None, cache_salt: str | None = None) -> bytes:
    """Return the 8 bytes that stand before the first block of a prompt.

    vLLM folds `cache_salt` into block 0 alone, which changes the whole chain; here it is part of the root, to the same
    effect. `None` and "" differ for no field: vLLM refuses an empty salt, and an empty adapter name means none.
    """
    digest = xxhash.xxh3_64(b"kvmesh-root-1")
    for part in (hash_seed, model, lora or "", cache_salt or ""):
        text = part.encode()
        digest.update(struct.pack("<I", len(text)) + text)  # length first: ("a", "bc") is not ("ab", "c")
    return digest.digest()


def block_keys(
    tokens: bytes | memoryview,
    *,
    block_size: int,
    parent: bytes,
    extra: Sequence[bytes | None] | None = None,
) -> bytes:
    """Chain full blocks into keys: `key[i] = xxh3_64(key[i-1] + tokens of block i [+ extra[i]])`, `key[-1] = parent`.

    `tokens` is a buffer of little-endian uint32, `block_size` counts tokens, `parent` is a root or the key of the block
    before. The result is the concatenation of 8-byte keys; a trailing partial block has none. `extra` has one entry a
    full block (see `blocks.extra_keys`). Raise ValueError for a block size below 1 or an `extra` that is too short.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1 token, not {block_size}")
    step = block_size * TOKEN_BYTES
    count = len(tokens) // step
    # one C call cuts all blocks; slicing in the loop costs twice as much
    if count <= FEW_BLOCKS:  # a chat's end, or a stretch: the layout at hand saves 15 of 60 us where caches are cold
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
