"""A vLLM pod's KV events, in one form for all wire formats; and the cache groups learned from them.

A store describes its KV cache group (vLLM >= 0.22) or only numbers it (0.20, 0.21); a removal names the number alone.
Hybrid models have several groups, each with its own condition for a hit (`cache_groups`). Pure.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvmesh.blocks.block_keys import TOKEN_BYTES
from kvmesh.blocks.cache_groups import DENSE_KINDS, SPARSE, CacheGroup, has_rule

MAX_GROUP = 255  # it is one byte in Redis


class BlockStored(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive blocks of one chain became resident."""

    block_hashes: tuple[int, ...]  # the engine's, unsigned 64 bit
    parent_block_hash: int | None  # None if the first block is the start of a prompt
    tokens: bytes  # little-endian uint32, all blocks concatenated
    block_size: int  # tokens per block; 0 for an offload placeholder
    lora_id: int | None = None
    medium: str = "GPU"  # upper case
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None  # one entry per block, untagged
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None  # LOCAL or REMOTE, relative to the publisher
    ownership: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None  # SGLang names it; vLLM hides it in extra_keys


class MoreStored(BlockStored, frozen=True, kw_only=True):
    """Our own: a later piece of a long store that was cut; it directly follows the piece before."""


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """One physical copy of each of these blocks is gone."""

    block_hashes: tuple[int, ...]
    medium: str = "GPU"
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True):
    """The publisher's cache was reset; the event does not say which of its pools."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The events of one engine step, in order."""

    ts: float  # unix seconds, the publisher's clock
    events: tuple[Event, ...]
    data_parallel_rank: int | None = None
    skipped: Mapping[str, int] = {}  # reason -> events of this batch that could not be read


def learn(catalogue: Mapping[int, CacheGroup], event: BlockStored) -> Mapping[int, CacheGroup]:
    """Return the catalogue with this store's description of its group; the same object if nothing is new.

    An event with neither number nor kind (vLLM < 0.20, SGLang, TRT-LLM) adds nothing, nor does an offload placeholder.
    A known kind outlives stores that do not name it. If no kind was ever named, a store whose tokens do not fill its
    blocks exactly shows that the group is sparse, and a group proved sparse stays so. The largest block size counts: if
    hashes are finer than blocks, vLLM reports the end of a prompt within a block with the size of a hash's piece. At
    most MAX_GROUP + 1 groups are kept.
    """
    if (event.group_idx is None and event.kv_cache_spec_kind is None) or event.block_size == 0:
        return catalogue
    number = event.group_idx or 0
    known = catalogue.get(number)
    kind = event.kv_cache_spec_kind
    if known is not None and kind is not None:
        described = kind, event.block_size, event.kv_cache_spec_sliding_window
        if described == (known.kind, known.block_size, known.sliding_window):  # the usual case
            return catalogue
    if number > MAX_GROUP:
        return catalogue
    if known is not None and known.kind == SPARSE and kind not in DENSE_KINDS:
        kind = SPARSE
    if kind is None:
        kind = known.kind if known else None
        if kind is None and not is_dense(event):
            kind = SPARSE
    window = event.kv_cache_spec_sliding_window
    if window is None and known is not None:
        window = known.sliding_window
    block_size = event.block_size if known is None else max(event.block_size, known.block_size)
    group = CacheGroup(kind=kind, block_size=block_size, sliding_window=window)
    return catalogue if group == known else {**catalogue, number: group}


def is_dense(event: BlockStored) -> bool:
    """Tell whether the tokens fill the blocks exactly: only then is it known which tokens a block holds."""
    return len(event.tokens) == len(event.block_hashes) * event.block_size * TOKEN_BYTES


def is_indexed(catalogue: Mapping[int, CacheGroup], group_idx: int | None) -> bool:
    """Tell whether stores of this group are indexed; call it with the catalogue that `learn` gave for the event.

    A group of a named kind is indexed if its rule is known; without a number only full attention is, because removals
    without a number mean nothing else. A group without a named kind is indexed as long as nothing suggests other
    groups: there is no number at all (older vLLM, other engines), or it is number 0 and no other number has been seen,
    so that the model seems not to be hybrid. Once another group appears, number 0 may as well be the sliding window,
    and its stores are left out.
    """
    group = catalogue.get(group_idx or 0)
    if group is not None and group.kind is not None:
        return has_rule(group) if group_idx is not None else group.kind in DENSE_KINDS
    return group_idx is None or (group_idx == 0 and catalogue.keys() <= {0})


def may_hold(catalogue: Mapping[int, CacheGroup], group_idx: int | None) -> bool:
    """Tell whether the index can hold blocks of this group: if not, its removals need not reach Redis.

    Wider than `is_indexed`: a group without a named kind may have been indexed before another group appeared, or before
    it proved sparse.
    """
    group = catalogue.get(group_idx or 0)
    if (group_idx or 0) > MAX_GROUP:
        return False
    if group is None or group.kind in (None, SPARSE):
        return True
    return has_rule(group) if group_idx is not None else group.kind in DENSE_KINDS
