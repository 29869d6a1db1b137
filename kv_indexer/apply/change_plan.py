"""Turns events into the operations of one index change: which blocks are indexed, under which keys. Pure.

An event's meaning depends on the earlier events of its stream: `StreamContext` holds this state and is updated in
place. Events that are not indexed are counted by reason, never dropped silently. Stores whose parent block is unknown
are orphans: they wait until the parent arrives, because their keys are computed from its key.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import product

from msgspec.structs import replace

from kv_indexer.apply.hit_reports import first_block, note_first_block, reports_hits
from kv_indexer.apply.look_ups import chain_coarser
from kv_indexer.apply.orphans import Orphan
from kv_indexer.apply.remembered_keys import RememberedKeys
from kv_indexer.apply.store_rules import (
    NO_RULE,
    NOT_UNDERSTOOD,
    are_parts,
    is_placeholder,
    other_size,
    skip_reason,
    tier_of_event,
)
from kv_indexer.apply.stream_context import StreamContext
from kv_indexer.apply.unplaced_blocks import UnplacedBlock
from kvmesh.blocks.block_keys import (
    KEY_BYTES,
    ExtraKeys,
    RootKeys,
    UnknownExtraKeyError,
    block_keys,
    separate_extra_keys,
)
from kvmesh.blocks.cache_groups import DENSE_KINDS, SPARSE, is_of_group, tier_of
from kvmesh.blocks.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    MoreStored,
    is_indexed,
    learn,
    may_hold,
)
from kvmesh.blocks.index_changes import TIERS, Clear, Operation, Remove, Store, pack_hashes

ORPHAN_DROPPED = "orphan-dropped"  # in `Plan.skipped`: the orphans of the pod exceed its share
UNPLACED = "unplaced"  # in `Plan.skipped`: too many blocks wait whose place in a prompt is unknown
OPERATION_BLOCKS = 3  # cost of an operation in Redis apart from its blocks, in blocks
_NO_EXTRA_KEYS = ExtraKeys(cache_salt=None, folded=None)


@dataclass(slots=True, kw_only=True)
class Plan:
    """The operations so far, and counts of left-out events."""

    operations: list[Operation] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)  # reason -> events that are not indexed, or not yet
    not_understood: Counter[str] = field(default_factory=Counter)  # reason -> events that contradict the context

    left_out: dict[str, int] = field(default_factory=dict)  # reason -> operations left out for lack of room

    @property
    def cost(self) -> int:
        """Return how long the operations will hold Redis, in blocks."""
        return cost_of(self.operations)

    def cut(self, blocks: int) -> list[Operation]:
        """Take out the first operations, up to a cost of `blocks`."""
        taken: list[Operation] = []
        left = blocks
        while self.operations and left > OPERATION_BLOCKS:
            operation = self.operations[0]
            if (cost := _cost(operation)) > left and not isinstance(operation, Clear):
                first, self.operations[0] = _split(operation, (left - OPERATION_BLOCKS) * KEY_BYTES)
                return [*taken, first]
            taken.append(self.operations.pop(0))
            left -= cost
        return taken


def cost_of(operations: Sequence[Operation]) -> int:
    """Return how long the operations will hold Redis, in blocks."""
    return sum(map(_cost, operations))


def _cost(operation: Operation) -> int:
    return OPERATION_BLOCKS + (0 if isinstance(operation, Clear) else len(operation.hashes) // KEY_BYTES)


def _split(operation: Store | Remove, size: int) -> tuple[Operation, Operation]:
    hashes = operation.hashes
    if isinstance(operation, Remove):
        return replace(operation, hashes=hashes[:size]), replace(operation, hashes=hashes[size:])
    keys = operation.keys
    return (
        replace(operation, hashes=hashes[:size], keys=keys[:size]),
        replace(operation, hashes=hashes[size:], keys=keys[size:]),
    )


def plan_change(events: Iterable[Event], *, context: StreamContext, roots: RootKeys, plan: Plan | None = None) -> Plan:
    """Turn events into operations, and learn from them; append to `plan` if given."""
    plan = plan or Plan()
    for event in events:
        match event:
            case BlockStored():
                _learn_group(plan, event, context)
                _store(plan, event, context, roots)
            case BlockRemoved():
                _remove(plan, event, context)
            case AllBlocksCleared():
                _clear(plan, context)
    if context.left_out or len(context.unplaced):
        _place(plan, context)
    return plan


def plan_adoption(context: StreamContext) -> Plan:
    """Plan the stores of all orphans whose parents are known now."""
    plan = Plan()
    known = (context.keys, *context.apart.values())
    parents = [parent for parent in context.orphans.parents() if any(parent in keys for keys in known)]
    _adopt(plan, parents, context)
    return plan


def _learn_group(plan: Plan, event: BlockStored, context: StreamContext) -> None:
    before = context.groups
    if event.locality == "REMOTE" or event.medium not in TIERS:
        return
    context.groups = groups = learn(before, event)
    if groups is before:
        return
    known = before.get(event.group_idx or 0)
    if known is not None and are_parts(known.block_size, of=event.block_size, groups=groups):
        _begin_with_whole_blocks(plan, context, parts=known.block_size, whole=event.block_size)
    if 0 not in before or before[0].kind is not None:
        return
    if is_indexed(before, 0) and not is_indexed(groups, 0):
        # vLLM 0.20 and 0.21 do not describe groups: the supposedly only group may be a sliding window
        _clear(plan, context)


def _begin_with_whole_blocks(plan: Plan, context: StreamContext, *, parts: int, whole: int) -> None:
    """Void the parts of blocks indexed so far: the first prompts were shorter than a block."""
    context.groups = {
        number: dataclasses.replace(group, block_size=whole) if group.block_size == parts else group
        for number, group in context.groups.items()
    }
    _clear(plan, context)
    context.keys, context.main_size = RememberedKeys(), 0
    context.apart.clear()


def _clear(plan: Plan, context: StreamContext) -> None:
    plan.operations[:] = [Clear()]  # earlier stores are void, and would take a slot until the sweep
    context.block_sizes.clear()
    context.orphans.clear()
    context.unplaced.clear()
    context.first_blocks.clear()
    context.beginnings.clear()
    if not context.apart:
        context.main_size = 0


def _store(plan: Plan, event: BlockStored, context: StreamContext, roots: RootKeys) -> None:
    reason = skip_reason(event, context.groups)
    if reason == "placeholder" and is_placeholder(event):
        _offload(plan, event, context)
        return
    tier = tier_of_event(event, context.groups)
    if reason == "not-dense" and is_of_group(tier):
        _leave_out(plan, event, tier, context)
        return
    size = context.block_sizes.get(tier, event.block_size)
    if reason is None and size != event.block_size:
        reason = other_size(event, size, context)
    if reason is not None:
        (plan.not_understood if reason in NOT_UNDERSTOOD else plan.skipped)[reason] += 1
        return
    keys = _keys(plan, event, context, roots)
    if keys is None:
        return
    context.block_sizes[tier] = event.block_size
    is_report = context.more_is_report if isinstance(event, MoreStored) else reports_hits(event, context)
    context.more_is_report = is_report
    _append_store(plan, event, tier, event.block_hashes, keys, set_only=is_report)
    note_first_block(event, context, is_report=is_report)
    if len(context.unplaced):
        _store_placed(plan, context, _may_wait(event.block_hashes, context))
    _adopt(plan, event.block_hashes, context)


def _keys(plan: Plan, event: BlockStored, context: StreamContext, roots: RootKeys) -> bytes | None:
    """Return the block keys and remember them by engine hash; None if they cannot be computed, now or ever."""
    extra = _extra_keys(plan, event)
    if extra is None:
        return None
    if event.parent_block_hash is None:
        parent: bytes | None = roots(event.lora_name, event.cache_salt or extra.cache_salt)
    else:
        parent = context.known(event.block_size).get(event.parent_block_hash)
    if parent is None:
        plan.skipped["unknown-parent"] += 1  # not a root: with a root's keys it would match other prompts
        bare = replace(event, extra_keys=None, lora_name=None, cache_salt=None, session_id=None)
        dropped = context.orphans.add(bare, extra.folded)
        if dropped:
            plan.skipped[ORPHAN_DROPPED] += dropped
        return None
    if len(context.groups) > 1 and not is_of_group(tier_of_event(event, context.groups)):
        chain_coarser(event, roots, context)
    return _chain(event, parent, extra.folded, context)


def _extra_keys(plan: Plan, event: BlockStored) -> ExtraKeys | None:
    if not event.extra_keys or not any(event.extra_keys):  # hardly any block has extra keys
        return _NO_EXTRA_KEYS
    starts_prompt = event.parent_block_hash is None
    try:
        return separate_extra_keys(event.extra_keys, lora_name=event.lora_name, starts_prompt=starts_prompt)
    except UnknownExtraKeyError:
        plan.not_understood["unknown-extra-key"] += 1
        return None


def _chain(event: BlockStored, parent: bytes, folded: Sequence[bytes | None] | None, context: StreamContext) -> bytes:
    chain = context.chain(event.block_size)
    # the groups of a hybrid model report the same blocks one after the other
    keys = chain.run(event.block_hashes) if len(context.groups) > 1 else None
    if keys is None:
        keys = block_keys(event.tokens, block_size=event.block_size, parent=parent, extra=folded)
        chain.add_run(event.block_hashes, keys)
    return keys


def _adopt(plan: Plan, parents: Sequence[int], context: StreamContext) -> None:
    while parents and len(context.orphans):
        orphans = context.orphans.take(parents)
        parents = [each for orphan in orphans for each in _store_orphan(plan, orphan, context)]


def _store_orphan(plan: Plan, orphan: Orphan, context: StreamContext) -> tuple[int, ...]:
    event = orphan.event
    assert event.parent_block_hash is not None
    parent = context.known(event.block_size).get(event.parent_block_hash)
    if parent is None:  # the arrived block has another size and ends at the same place
        context.orphans.add(event, orphan.folded)
        return ()
    tier = tier_of_event(event, context.groups)
    if context.block_sizes.setdefault(tier, event.block_size) != event.block_size:
        plan.skipped[other_size(event, context.block_sizes[tier], context)] += 1
        return ()
    keys = _chain(event, parent, orphan.folded, context)
    held = [place for place in range(len(event.block_hashes)) if place not in orphan.gone]
    if held:
        hashes = tuple(event.block_hashes[place] for place in held)
        _append_store(plan, event, tier, hashes, b"".join(keys[place * 8 : place * 8 + 8] for place in held))
    if len(context.unplaced):
        _store_placed(plan, context, _may_wait(event.block_hashes, context))
    return event.block_hashes


def _leave_out(plan: Plan, event: BlockStored, tier: str, context: StreamContext) -> None:
    """Let blocks of a group that leaves some out wait for their keys (a Mamba state is kept now and then)."""
    if tier not in context.block_sizes:  # a reader must know of the group before the group holds anything
        context.block_sizes[tier] = event.block_size
        _append_store(plan, event, tier, (), b"")
    context.left_out.add(event.group_idx or 0)
    blocks = context.unplaced.add(event, is_report=event.parent_block_hash is None and context.reports_anew)
    if _is_made_of(event.block_size, _dense_sizes(context)):
        _store_placed(plan, context, blocks)


def _place(plan: Plan, context: StreamContext) -> None:
    """Store the waiting blocks whose keys are known now, because full attention has reported them.

    If the blocks of full attention are longer, nothing can place the group's blocks, and the group is not indexed. Full
    attention may report later than the group: until it does, the blocks wait.
    """
    dense_sizes = _dense_sizes(context)
    lost = {number for number in context.left_out if not _is_made_of(context.groups[number].block_size, dense_sizes)}
    if dense_sizes:
        context.left_out.clear()
    if dense_sizes and lost:
        context.groups = {
            number: dataclasses.replace(group, kind=SPARSE) if number in lost else group
            for number, group in context.groups.items()
        }
        plan.skipped[NO_RULE] += len(lost)
        _clear(plan, context)
        return
    if dense_sizes:
        _store_placed(plan, context)
    dropped = context.unplaced.forget_oldest()
    if dropped:
        plan.skipped[UNPLACED] += dropped


def _store_placed(plan: Plan, context: StreamContext, blocks: Iterable[UnplacedBlock] | None = None) -> None:
    """Store the waiting blocks with known keys, of these or of all, before later events of the same blocks."""
    stores: dict[tuple[bool, str, int, int], tuple[list[int], list[bytes]]] = {}  # reports sort first: they add no copy
    for block, waiting in context.unplaced.entries(blocks):
        key = context.known(waiting.block_size).get(block.engine_hash)
        if key is not None:
            context.unplaced.take(block)
            tier = tier_of(block.medium, context.groups.get(block.group))
            for is_copy, times in ((False, int(waiting.is_reported)), (True, waiting.copies)):
                if times:
                    hashes, keys = stores.setdefault((is_copy, tier, block.group, waiting.block_size), ([], []))
                    hashes += [block.engine_hash] * times
                    keys += [key] * times
    for (is_copy, tier, group, size), (hashes, keys) in sorted(stores.items()):
        packed = pack_hashes(hashes)
        plan.operations.append(
            Store(tier=tier, group=group, block_size=size, hashes=packed, keys=b"".join(keys), set_only=not is_copy)
        )


def _may_wait(engine_hashes: Iterable[int], context: StreamContext) -> Iterable[UnplacedBlock]:
    return (UnplacedBlock(*names) for names in product(TIERS, context.groups, engine_hashes))


def _dense_sizes(context: StreamContext) -> AbstractSet[int]:
    return {group.block_size for group in context.groups.values() if group.kind in DENSE_KINDS}


def _is_made_of(block_size: int, dense_sizes: AbstractSet[int]) -> bool:
    return any(block_size % size == 0 for size in dense_sizes)


def _offload(plan: Plan, event: BlockStored, context: StreamContext) -> None:
    held = [engine_hash for engine_hash in event.block_hashes if engine_hash in context.keys]
    sizes, tier = context.block_sizes, tier_of_event(event, context.groups)
    size = sizes.get(tier) or sizes.get("GPU") or next(iter(sizes.values()), 0)
    if len(held) < len(event.block_hashes) or not size:
        plan.skipped["placeholder-unknown"] += 1
    if held and size:
        sizes[tier] = size
        keys = b"".join(context.keys[engine_hash] for engine_hash in held)
        _append_store(plan, event, tier, held, keys, block_size=size)


def _append_store(
    plan: Plan,
    event: BlockStored,
    tier: str,
    hashes: Sequence[int],
    keys: bytes,
    *,
    block_size: int = 0,
    set_only: bool = False,
) -> None:
    group, packed = event.group_idx or 0, pack_hashes(hashes)
    last = plan.operations[-1] if plan.operations else None
    if isinstance(last, Store) and (last.tier, last.group, last.set_only) == (tier, group, set_only):
        # one longer operation is far cheaper to apply than two
        packed, keys, size = last.hashes + packed, last.keys + keys, last.block_size
        plan.operations.pop()
    else:
        size = block_size or event.block_size
    plan.operations.append(Store(tier=tier, group=group, block_size=size, hashes=packed, keys=keys, set_only=set_only))


def _remove(plan: Plan, event: BlockRemoved, context: StreamContext) -> None:
    if event.locality == "REMOTE" or event.medium not in TIERS or not may_hold(context.groups, event.group_idx):
        plan.skipped["removal-of-unindexed"] += 1
        return
    medium, group, orphans = event.medium, event.group_idx or 0, context.orphans
    hashes = event.block_hashes
    if medium == "GPU":
        for first in hashes if not group else [first_block(each, group) for each in hashes]:
            references = context.first_blocks.pop(first, 1)
            if references > 1:
                context.first_blocks[first] = references - 1
    if len(orphans):
        hashes = tuple(each for each in hashes if not orphans.remove(tier=medium, group=group, engine_hash=each))
    if len(context.unplaced):
        hashes = tuple(each for each in hashes if not context.unplaced.remove(event, each))
    if not hashes:
        return
    packed, tier = pack_hashes(hashes), tier_of_event(event, context.groups)
    last = plan.operations[-1] if plan.operations else None
    if isinstance(last, Remove) and (last.tier, last.group) == (tier, group):
        packed = last.hashes + packed  # as in `_append_store`: most publishers name one block per event
        plan.operations.pop()
    plan.operations.append(Remove(tier=tier, group=group, hashes=packed))
