"""vLLM's own block hashes (`--prefix-caching-hash-algo sha256`, the default), as in `vllm/v1/core/kv_cache_utils.py`.

The block pool keys its cache with them and the KV events carry their last eight bytes.
"""

import hashlib
import pickle
from collections.abc import Hashable, Sequence

NONE_HASH_SEED = "vllm-none-hash"  # vLLM 0.29 and later, PYTHONHASHSEED unset

ExtraKeys = tuple[Hashable, ...]

# Prompts share prefixes and hashing dominates a long request's cost, so whole stretches of a chain are remembered.
_STRETCH_BLOCKS = 16
_MEMO_STRETCHES = 4096  # about 12 MB
_memo: dict[tuple[bytes, tuple[int, ...], ExtraKeys | None], list[bytes]] = {}


def _sha256(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


def none_hash(seed: str = NONE_HASH_SEED) -> bytes:
    """The parent digest of a chain's first block: 32 bytes."""
    return _sha256(seed)


NONE_HASH = none_hash()


def block_hash(parent: bytes, token_ids: tuple[int, ...], extra_keys: ExtraKeys | None = None) -> bytes:
    """The digest (32 bytes) of one full block: sha256 of the pickle of (parent, tokens, extra keys)."""
    return _sha256((parent, token_ids, extra_keys))


def salt_extra_keys(cache_salt: str | None) -> ExtraKeys | None:
    """Return the keys that a `cache_salt` adds to a chain's first block hash, tagged as in vLLM 0.31 and later."""
    return (("cache_salt", cache_salt),) if cache_salt else None


def extend_chain(
    hashes: list[bytes], token_ids: Sequence[int], *, block_size: int, tokens: int, cache_salt: str | None = None
) -> None:
    """Extend `hashes` to all full blocks among the first `tokens` token ids."""
    full_blocks = tokens // block_size
    while len(hashes) < full_blocks:
        parent = hashes[-1] if hashes else NONE_HASH
        extra_keys = None if hashes else salt_extra_keys(cache_salt)
        start = len(hashes) * block_size
        if len(hashes) + _STRETCH_BLOCKS > full_blocks:
            stretch = tuple(token_ids[start : full_blocks * block_size])
            hashes += _chain(parent, stretch, extra_keys, block_size=block_size)
            return
        stretch = tuple(token_ids[start : start + _STRETCH_BLOCKS * block_size])
        known = _memo.get((parent, stretch, extra_keys))
        if known is None:
            if len(_memo) >= _MEMO_STRETCHES:
                _memo.clear()
            known = _chain(parent, stretch, extra_keys, block_size=block_size)
            _memo[parent, stretch, extra_keys] = known
        hashes += known


def _chain(parent: bytes, token_ids: tuple[int, ...], extra_keys: ExtraKeys | None, *, block_size: int) -> list[bytes]:
    digests: list[bytes] = []
    for start in range(0, len(token_ids), block_size):
        parent = block_hash(parent, token_ids[start : start + block_size], extra_keys)
        extra_keys = None  # they belong to the chain's first block
        digests.append(parent)
    return digests


def event_hash(digest: bytes) -> int:
    """Return the hash in KV events: its last 8 bytes, unsigned big-endian (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=1)."""
    return int.from_bytes(digest[-8:], "big")
