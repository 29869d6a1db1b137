"""Chooses the block keys to ask the index for before a change can be planned; computes keys of longer blocks. Pure.

In a hybrid model, a group's block may be as long as several blocks of full attention (Gemma 4). A hash stands for the
prompt up to the end of a block, whatever the block's size. So full attention's stores show the hashes and tokens of all
longer blocks, even of blocks that the group itself leaves out.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from kv_indexer.apply.store_rules import is_placeholder, skip_reason, tier_of_event
from kv_indexer.apply.stream_context import StreamContext
from kvmesh.blocks.block_keys import RootKeys, UnknownExtraKeyError, block_keys, separate_extra_keys
from kvmesh.blocks.cache_groups import is_of_group
from kvmesh.blocks.events import BlockStored, Event


def hashes_to_look_up(events: Sequence[Event], context: StreamContext) -> set[tuple[int, int]]:
    """Return (hash, group) of parents and offloaded blocks that neither the context nor the change itself explains."""
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
    """Do the same as `hashes_to_look_up` for a hybrid model.

    Any group of the block's size may hold it. A window has often dropped the parent already, and a group that leaves
    blocks out does not say where in the prompt its blocks are.
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
    """Return the possible block sizes of a store's parent: full attention's stores show longer blocks, too."""
    if is_of_group(tier_of_event(event, context.groups)):
        return {event.block_size}
    return {event.block_size, *coarser_sizes(event.block_size, context)}


def _follow_each_other(events: Iterable[Event], context: StreamContext) -> bool:
    """Tell whether each store begins a prompt or continues at the end of an earlier store or a known block: most do.

    Only the last block of each store is remembered, which takes a tenth of the time of remembering all.
    """
    ends: set[int] = set()
    for event in events:
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            if not event.tokens or not (parent is None or parent in ends or parent in context.keys):
                return False
            ends.update(event.block_hashes[-1:])
    return True


def chain_coarser(event: BlockStored, roots: RootKeys, context: StreamContext) -> None:
    """Remember the longer blocks in one store of full attention, for each block size of the other groups."""
    for size in coarser_sizes(event.block_size, context):
        times = size // event.block_size
        ends = event.block_hashes[times - 1 :: times]
        chain = context.chain(size)
        if not ends or chain.run(ends) is not None:
            continue
        entries = merge_extra_keys(event.extra_keys, times=times, block_size=event.block_size)
        starts_prompt = event.parent_block_hash is None
        try:
            extra = separate_extra_keys(entries, lora_name=event.lora_name, starts_prompt=starts_prompt)
        except UnknownExtraKeyError:
            continue
        if event.parent_block_hash is None:
            parent: bytes | None = roots(event.lora_name, event.cache_salt or extra.cache_salt)
        else:
            parent = chain.get(event.parent_block_hash)
        if parent is not None:  # else the store does not begin at a longer block, or its parent was not seen
            chain.add_run(ends, block_keys(event.tokens, block_size=size, parent=parent, extra=extra.folded))


def coarser_sizes(block_size: int, context: StreamContext) -> set[int]:
    """Return the other groups' block sizes that are multiples of this one."""
    sizes = {group.block_size for group in context.groups.values()}
    return {size for size in sizes if size > block_size and size % block_size == 0}


def merge_extra_keys(
    entries: Sequence[tuple[Any, ...] | None] | None, *, times: int, block_size: int
) -> Sequence[tuple[Any, ...] | None] | None:
    """Return the extra keys of blocks that are `times` as long: offsets count from the longer block's first token.

    Digests of embeddings belong to one block's tokens alone; they become unknown extra keys. Nothing is raised.
    """
    if entries is None or not any(entries):
        return None
    merged: list[tuple[Any, ...] | None] = []
    for first in range(0, len(entries) // times * times, times):
        parts: list[Any] = []
        for place, entry in enumerate(entries[first : first + times]):
            before = tuple(parts)  # continued from the block before; an entry may name one text twice
            moved = [_moved(part, by=place * block_size) for part in entry or ()]
            parts += [part for part in moved if part not in before]
        merged.append(tuple(parts) or None)
    return merged


def _moved(part: Any, *, by: int) -> Any:
    match part:
        case [*name, int() as offset]:
            return (*name, offset + by)
        case bytes() | ["prompt_embeds", _]:
            return None
    return part
