"""Decides which stores are indexed, their tiers, and the meaning of their block sizes. Pure."""

from collections.abc import Iterable, Mapping

from kv_indexer.apply.stream_context import StreamContext
from kvmesh.blocks.cache_groups import DENSE_KINDS, STATE, CacheGroup, is_of_group, tier_of
from kvmesh.blocks.events import (
    MAX_GROUP,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    is_dense,
    is_indexed,
    learn,
)
from kvmesh.blocks.index_changes import TIERS

NOT_UNDERSTOOD = frozenset({"extra-keys-mismatch"})  # of `skip_reason`; blocks with other reasons are of no use here
NO_RULE = "no-group-rule"  # of `skip_reason`
SIZE_CHANGED = "block-size-changed"  # counted; unless a restart explains it, also why a source is degraded


def skip_reason(event: BlockStored, groups: Mapping[int, CacheGroup]) -> str | None:
    """Return why a store is not indexed, or None. `groups` has already learned from the store."""
    if event.locality == "REMOTE":
        return "remote"
    if event.medium not in TIERS:
        return "unknown-medium"
    if (event.group_idx or 0) > MAX_GROUP:
        return "group-out-of-range"
    if not is_indexed(groups, event.group_idx):
        return NO_RULE
    return _form_reason(event)


def _form_reason(event: BlockStored) -> str | None:
    if event.block_size == 0 or not event.tokens:
        return "placeholder"
    if not is_dense(event):
        return "not-dense"
    if event.extra_keys is not None and len(event.extra_keys) != len(event.block_hashes):
        return "extra-keys-mismatch"
    return None


def first_size_change(batches: Iterable[Iterable[Event]], context: StreamContext) -> int | None:
    """Return the index of the first batch whose block size differs from the earlier one of the same cache, or None.

    A live publisher cannot change its block size, so this is another process whose start was missed. Other groups and
    parts of a block (hybrid models) have their own sizes and prove nothing.
    """
    size, groups = context.block_sizes.get("GPU"), context.groups
    for number, events in enumerate(batches):
        for event in events:
            if isinstance(event, AllBlocksCleared):
                size = None
            elif isinstance(event, BlockStored) and event.block_size != size and event.medium == "GPU":
                group, groups = groups.get(event.group_idx or 0), learn(groups, event)
                if skip_reason(event, groups) is not None or is_of_group(tier_of_event(event, groups)):
                    continue
                same_cache = event.group_idx is None or (group is not None and group.block_size == size)
                if size is not None and are_parts(size, of=event.block_size, groups=groups):
                    size = event.block_size
                elif size is not None and same_cache and not is_part(event, size):
                    return number
                size = size or event.block_size
    return None


def are_parts(size: int, *, of: int, groups: Mapping[int, CacheGroup]) -> bool:
    """Tell whether blocks of this size were parts of a group's blocks, which are as long as `of` now shows.

    In a model with states, a block may be longer than the first prompts; then only the prompts' ends are reported.
    """
    return size < of and of % size == 0 and any(group.kind == STATE for group in groups.values())


def is_part(event: BlockStored, whole: int) -> bool:
    """Tell whether this may be a part of a block: vLLM reports parts one by one, with the smaller size."""
    return len(event.block_hashes) == 1 and 0 < event.block_size < whole and whole % event.block_size == 0


def other_size(event: BlockStored, expected: int, context: StreamContext) -> str:
    """Return why a store with another block size than expected is not indexed."""
    if is_part(event, expected):
        return "partial-block"
    return SIZE_CHANGED if context.mixes_sizes and event.medium == "GPU" else "other-block-size"


def is_placeholder(event: BlockStored) -> bool:
    """Tell whether these are copies of another tier's blocks, given by their hashes alone (OffloadingConnector)."""
    return not event.tokens and event.medium != "GPU" and event.medium in TIERS and event.locality != "REMOTE"


def tier_of_event(event: BlockStored | BlockRemoved, groups: Mapping[int, CacheGroup]) -> str:
    """Return the index's tier of the blocks; without a group number they count as full attention's."""
    group = None if event.group_idx is None else groups.get(event.group_idx)
    if group is None or group.kind in DENSE_KINDS:  # the usual case
        return event.medium
    return tier_of(event.medium, group)
