"""Recognizes stores that only report cached blocks (kv_cache_report_mode=full), by prompts' first blocks. Pure."""

from collections.abc import Iterable

from kv_indexer.apply.store_rules import skip_reason
from kv_indexer.apply.stream_context import StreamContext
from kvmesh.blocks.events import BlockStored, Event

GROUP_SHIFT = 64  # shifts the group's number above the engine hash; group 0 leaves the hash as it is


def first_blocks_to_look_up(events: Iterable[Event], context: StreamContext) -> set[tuple[int, int]]:
    """Return (hash, group) of prompts' first blocks that may or may not be held: the index must be asked.

    Empty for a hybrid model: `_begins_with_held` decides from memory alone which groups hold a first block.
    """
    if len(context.groups) > 1:
        return set()
    return {
        (event.block_hashes[0], event.group_idx or 0)
        for event in events
        if isinstance(event, BlockStored)
        and _may_be_report(event)
        and first_block(event.block_hashes[0], event.group_idx) not in context.first_blocks
        and skip_reason(event, context.groups) is None
    }


def reports_hits(event: BlockStored, context: StreamContext) -> bool:
    """Tell whether a store reports blocks that are there already (kv_cache_report_mode=full).

    vLLM reports a hit exactly as it reports new blocks: the same fields, no parent, from the prompt's first block on.
    The difference: a prompt whose first block is cached is not computed from its start, so such a store is a report. A
    real second copy of first blocks comes about only if the prompt is no longer than one block (a hit covers at most
    all tokens but one). So several blocks that begin with a held one are not counted again. A single block is, until
    the publisher has been seen to report hits.

    A real copy may go uncounted, for prompts that may not read the cache, such as those with prompt_logprobs. Then its
    removal costs a hit; the opposite error would claim removed blocks for ever. For the same reason nothing without a
    parent is counted twice while the index may lack first blocks (it is not exact, or copies were not counted). Only
    the GPU's own pool reports hits; connectors count references.
    """
    if not _may_be_report(event):
        return False
    is_held = _begins_with_held(event, context)
    if len(event.block_hashes) == 1:
        return is_held and context.reports_anew
    context.reports_anew = context.reports_anew or is_held
    return context.reports_anew or not context.is_exact


def note_first_block(event: BlockStored, context: StreamContext, *, is_report: bool) -> None:
    """Count a reference to the first block of a store; a report adds one only if there was none."""
    if _may_be_report(event):
        first = first_block(event.block_hashes[0], event.group_idx)
        held = context.first_blocks.get(first, 0)
        context.first_blocks[first] = held or 1 if is_report else held + 1


def _begins_with_held(event: BlockStored, context: StreamContext) -> bool:
    """Tell whether a prompt's first block was held, so that the prompt was not computed from its start.

    In a hybrid model only if all groups held it: if one lacks it, vLLM may find no hit at all, and then computes for
    all groups. The groups report a step's blocks in the order of their numbers, so the finding of the first is
    remembered for the others.
    """
    engine_hash, groups = event.block_hashes[0], context.groups
    if len(groups) < 2:
        return first_block(engine_hash, event.group_idx) in context.first_blocks
    number = event.group_idx or 0
    was_held, last = context.beginnings.pop(engine_hash, (False, number))
    if number <= last:
        of_one_size = len({group.block_size for group in groups.values()}) == 1
        was_held = of_one_size and all(first_block(engine_hash, each) in context.first_blocks for each in groups)
    context.beginnings[engine_hash] = was_held, number
    return was_held


def _may_be_report(event: BlockStored) -> bool:
    return event.parent_block_hash is None and event.medium == "GPU" and bool(event.block_hashes)


def first_block(engine_hash: int, group: int | None) -> int:
    """Return the name of a block among `StreamContext.first_blocks`."""
    return engine_hash | group << GROUP_SHIFT if group else engine_hash
