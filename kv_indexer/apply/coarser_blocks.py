"""The keys of longer blocks, made of what full attention reports with shorter ones. Pure.

A group of a hybrid model may have blocks that are as long as several of full attention's (Gemma 4). A hash is that of
the prompt up to a block's end, whatever its size, so that full attention's stores tell the hashes and tokens of all
longer blocks as well, also of those that the group itself leaves out.
"""

from collections.abc import Sequence
from typing import Any

from kv_indexer.apply.stream_context import StreamContext
from kvmesh.blocks.block_keys import RootKeys, UnknownExtraKeyError, block_keys, separate_extra_keys
from kvmesh.blocks.events import BlockStored


def chain_coarser(event: BlockStored, roots: RootKeys, context: StreamContext) -> None:
    """Remember the longer blocks of one store of full attention, for each size that a group has."""
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
        if parent is not None:  # else the store does not begin with a longer block, or that was not seen
            chain.add_run(ends, block_keys(event.tokens, block_size=size, parent=parent, extra=extra.folded))


def coarser_sizes(block_size: int, context: StreamContext) -> set[int]:
    """Return the sizes of other groups' blocks that are several of these."""
    sizes = {group.block_size for group in context.groups.values()}
    return {size for size in sizes if size > block_size and size % block_size == 0}


def merge_extra_keys(
    entries: Sequence[tuple[Any, ...] | None] | None, *, times: int, block_size: int
) -> Sequence[tuple[Any, ...] | None] | None:
    """Return the extra keys of blocks that are `times` as long: offsets count from the longer block's first token.

    Raise nothing; digests of embeddings, which are of a block's own tokens, become what nobody understands.
    """
    if entries is None or not any(entries):
        return None
    merged: list[tuple[Any, ...] | None] = []
    for first in range(0, len(entries) // times * times, times):
        parts: list[Any] = []
        for place, entry in enumerate(entries[first : first + times]):
            before = tuple(parts)  # what goes on from one block to the next; an entry may name one text twice
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
