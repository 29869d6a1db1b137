"""Which block keys the index must be asked for before a change can be planned. Pure."""

from collections.abc import Iterable, Sequence
from itertools import product

from kv_indexer.apply.coarser_blocks import coarser_sizes
from kv_indexer.apply.store_rules import is_placeholder, skip_reason, tier_of_event
from kv_indexer.apply.stream_context import StreamContext
from kvmesh.blocks.cache_groups import is_of_group
from kvmesh.blocks.events import BlockStored, Event


def hashes_to_look_up(events: Sequence[Event], context: StreamContext) -> set[tuple[int, int]]:
    """Return (hash, group) of parents and offloaded blocks that neither the context nor the change explains."""
    if len(context.groups) > 1:
        return _groups_to_look_up(events, context)
    missing: set[tuple[int, int]] = set()
    if _follow_each_other(events, context):
        return missing
    stored: set[int] = set()
    known, groups = context.keys, context.groups
    for event in events:
        if not isinstance(event, BlockStored):
            continue
        if is_placeholder(event):
            wanted: Iterable[int] = event.block_hashes
        elif event.parent_block_hash is not None and skip_reason(event, groups) is None:
            wanted = (event.parent_block_hash,)
        else:
            wanted = ()
        missing.update((each, event.group_idx or 0) for each in wanted if each not in stored and each not in known)
        stored.update(event.block_hashes)
    return missing


def _groups_to_look_up(events: Iterable[Event], context: StreamContext) -> set[tuple[int, int]]:
    """Return what `hashes_to_look_up` does, of a hybrid model.

    A block may be held by any group of its size: a window has often let the parent go, and who leaves blocks out does
    not say where in the prompt the others are.
    """
    groups = context.groups
    wanted: dict[int, set[int]] = {}  # block size -> engine hashes
    stored: dict[int, set[int]] = {}
    missing: set[tuple[int, int]] = set()
    for event in events:
        if not isinstance(event, BlockStored):
            continue
        size, reason = event.block_size, skip_reason(event, groups)
        if is_placeholder(event):
            missing.update((each, event.group_idx or 0) for each in event.block_hashes if each not in context.keys)
        elif reason == "not-dense" and is_of_group(tier_of_event(event, groups)):
            wanted.setdefault(size, set()).update(event.block_hashes)
        elif reason is None:
            parent = event.parent_block_hash
            if parent is not None and parent not in stored.get(size, ()):
                for each in _sizes_of_parent(event, context):
                    wanted.setdefault(each, set()).add(parent)
            stored.setdefault(size, set()).update(event.block_hashes)
    for size, hashes in wanted.items():
        known = context.known(size)
        unknown = [each for each in hashes - stored.get(size, set()) if each not in known]
        missing.update(product(unknown, [number for number, group in groups.items() if group.block_size == size]))
    return missing


def _sizes_of_parent(event: BlockStored, context: StreamContext) -> set[int]:
    """Return the sizes of the blocks that a store goes on from: full attention's tell of longer ones, too."""
    if is_of_group(tier_of_event(event, context.groups)):
        return {event.block_size}
    return {event.block_size, *coarser_sizes(event.block_size, context)}


def _follow_each_other(events: Iterable[Event], context: StreamContext) -> bool:
    """Tell whether each store begins a prompt, or goes on where one of these or a known block ends: most do.

    It is enough to remember the last block of each, which takes a tenth of the time that all of them take.
    """
    ends: set[int] = set()
    for event in events:
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            if not event.tokens or not (parent is None or parent in ends or parent in context.keys):
                return False
            ends.update(event.block_hashes[-1:])
    return True
