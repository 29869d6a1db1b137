"""From events to the operations of one index change: what is indexed, and under which keys. Pure.

What an event means depends on the events before it in its stream: `StreamContext` holds that and is updated in place.
What is not indexed is counted by reason, never dropped silently. Stores whose parent block is unknown are orphans:
they wait until the parent arrives, because without its key theirs cannot be computed.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from msgspec.structs import replace

from kv_indexer.apply.orphans import Orphan, OrphanTable
from kv_indexer.apply.remembered_keys import RememberedKeys
from kv_indexer.apply.unplaced_blocks import UnplacedBlocks
from kvmesh.blocks.block_keys import (
    KEY_BYTES,
    ExtraKeys,
    UnknownExtraKeyError,
    block_keys,
    separate_extra_keys,
)
from kvmesh.blocks.cache_groups import DENSE_KINDS, SPARSE, STATE, CacheGroup, is_of_group, tier_of
from kvmesh.blocks.events import (
    MAX_GROUP,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    MoreStored,
    is_dense,
    is_indexed,
    learn,
    may_hold,
)
from kvmesh.blocks.index_changes import TIERS, Clear, Operation, Remove, Store, pack_hashes

NOT_UNDERSTOOD = frozenset({"extra-keys-mismatch"})  # of `skip_reason`; the others are blocks of no use here
ORPHAN_DROPPED = "orphan-dropped"  # of `Plan.skipped`: the pod has its share of those that wait
NO_RULE = "no-group-rule"  # of `Plan.skipped`
UNPLACED = "unplaced"  # of `Plan.skipped`: too many blocks wait whose place in a prompt is not known
SIZE_CHANGED = "block-size-changed"  # counted and, where no restart explains it, why a source is degraded
KNOWN_KEYS_LIMIT = 65_536  # engine hashes remembered a stream; Redis has them all
FIRST_BLOCKS_LIMIT = 4096
GROUP_SHIFT = 64  # of a group's number above an engine hash: group 0 leaves it as it is
OPERATION_BLOCKS = 3  # what an operation takes Redis beside its blocks, in blocks
_NO_KEYS = RememberedKeys()
_NO_EXTRA_KEYS = ExtraKeys(cache_salt=None, folded=None)
RootKeys = Callable[[str | None, str | None], bytes]  # (lora, cache_salt) -> root key


@dataclass(slots=True, kw_only=True)
class StreamContext:
    """What one stream has reported so far, as far as it decides what its next events mean."""

    keys: RememberedKeys = field(default_factory=RememberedKeys)  # of blocks of `main_size` tokens
    main_size: int = 0  # 0: not known yet
    # block size -> keys, of groups with blocks of other sizes: a hash is that of the prompt up to a block's end, so
    # that blocks of several sizes have it
    apart: dict[int, RememberedKeys] = field(default_factory=dict)
    unplaced: UnplacedBlocks = field(default_factory=UnplacedBlocks)
    left_out: set[int] = field(default_factory=set)  # groups that have left blocks out since full attention reported
    block_sizes: dict[str, int] = field(default_factory=dict)  # tier -> tokens a block
    groups: Mapping[int, CacheGroup] = field(default_factory=dict)
    orphans: OrphanTable = field(default_factory=OrphanTable)
    # of prompts, held on the GPU: engine hash, with the group's number above it -> references, if we saw all
    first_blocks: dict[int, int] = field(default_factory=dict)
    # of a hybrid model: first block -> whether all groups held it, and the group that stored it last
    beginnings: dict[int, tuple[bool, int]] = field(default_factory=dict)
    is_exact: bool = True  # the index has all that the publisher has
    mixes_sizes: bool = False  # it was seen to change its block size without a restart
    reports_anew: bool = False  # it was seen to store a prompt's beginning that it holds: kv_cache_report_mode=full
    more_is_report: bool = False  # of the store whose first piece was planned last

    def known(self, block_size: int) -> RememberedKeys:
        """Return the keys of blocks of this size, to read."""
        return self.keys if self.main_size in (0, block_size) else self.apart.get(block_size, _NO_KEYS)

    def chain(self, block_size: int) -> RememberedKeys:
        """Return the keys of blocks of this size, to add to."""
        if block_size == self.main_size:
            return self.keys
        if not self.main_size:
            self.main_size = block_size
            return self.keys
        return self.apart.setdefault(block_size, RememberedKeys())

    def forget_oldest(self, *, known_keys: int = KNOWN_KEYS_LIMIT) -> None:
        """Keep within bounds."""
        self.keys.forget_oldest(known_keys)
        for keys in self.apart.values():
            keys.forget_oldest(known_keys)
        limit = min(FIRST_BLOCKS_LIMIT, known_keys)
        both: tuple[dict[int, Any], ...] = (self.first_blocks, self.beginnings)
        for entries in both:
            if len(entries) > limit:
                for engine_hash in list(islice(entries, len(entries) - limit * 3 // 4)):
                    del entries[engine_hash]


@dataclass(slots=True, kw_only=True)
class Plan:
    """The operations so far, and what was left out."""

    operations: list[Operation] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)  # reason -> events that are not indexed, or not yet
    not_understood: Counter[str] = field(default_factory=Counter)  # reason -> events that contradict the context

    left_out: dict[str, int] = field(default_factory=dict)  # reason -> operations that the index had no room for

    @property
    def cost(self) -> int:
        """Return how long the operations will hold Redis, in blocks."""
        total = OPERATION_BLOCKS * len(self.operations)
        for operation in self.operations:
            total += 0 if isinstance(operation, Clear) else len(operation.hashes) // KEY_BYTES
        return total

    def cut(self, blocks: int) -> list[Operation]:
        """Take out the first operations, which cost so many blocks at most."""
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
        if _is_placeholder(event):
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
        number, size = event.group_idx or 0, event.block_size
        reason = skip_reason(event, groups)
        if _is_placeholder(event):
            missing.update((each, number) for each in event.block_hashes if each not in context.keys)
        elif reason == "not-dense" and is_of_group(_tier(event, groups)):
            wanted.setdefault(size, set()).update(event.block_hashes)
        elif reason is None:
            parent = event.parent_block_hash
            if parent is not None and parent not in stored.get(size, ()):
                wanted.setdefault(size, set()).add(parent)
            stored.setdefault(size, set()).update(event.block_hashes)
    for size, hashes in wanted.items():
        numbers = [number for number, group in groups.items() if group.block_size == size]
        known = context.known(size)
        for each in hashes - stored.get(size, set()):
            if each not in known:
                missing.update((each, number) for number in numbers)
    return missing


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


def first_blocks_to_look_up(events: Iterable[Event], context: StreamContext) -> set[tuple[int, int]]:
    """Return (hash, group) of prompts' first blocks of which we cannot say whether they are held."""
    found = {
        (event.block_hashes[0], event.group_idx or 0)
        for event in events
        if isinstance(event, BlockStored)
        and _may_be_report(event)
        and _first_block(event.block_hashes[0], event.group_idx) not in context.first_blocks
        and skip_reason(event, context.groups) is None
    }
    if len(context.groups) > 1 and found:
        found = {
            (engine_hash, number)
            for engine_hash, _ in found
            for number in context.groups
            if _first_block(engine_hash, number) not in context.first_blocks
        }
    return found


def plan_change(events: Iterable[Event], *, context: StreamContext, roots: RootKeys, plan: Plan | None = None) -> Plan:
    """Turn events into operations, learning from them; they come after those of `plan`, if it is given."""
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
    """Plan the stores of all orphans whose parents are known by now."""
    plan = Plan()
    known = (context.keys, *context.apart.values())
    parents = [parent for parent in context.orphans.parents() if any(parent in keys for keys in known)]
    _adopt(plan, parents, context)
    return plan


def skip_reason(event: BlockStored, groups: Mapping[int, CacheGroup]) -> str | None:
    """Say why a store is not indexed, or None. `groups` has learned from it."""
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
    """Return the number of the first batch whose block size is not that of the same cache before it, or None.

    A publisher cannot change it while it lives, so this is another process whose start was missed. Blocks of other
    groups, or parts of a block (hybrid models), have sizes of their own and show nothing.
    """
    size, groups = context.block_sizes.get("GPU"), context.groups
    for number, events in enumerate(batches):
        for event in events:
            if isinstance(event, AllBlocksCleared):
                size = None
            elif isinstance(event, BlockStored) and event.block_size != size and event.medium == "GPU":
                group, groups = groups.get(event.group_idx or 0), learn(groups, event)
                if skip_reason(event, groups) is not None or is_of_group(_tier(event, groups)):
                    continue
                same_cache = event.group_idx is None or (group is not None and group.block_size == size)
                if size is not None and same_cache and not _is_part(event, size):
                    return number
                size = size or event.block_size
    return None


def _is_part(event: BlockStored, whole: int) -> bool:
    """Tell whether this may be a part of a block: vLLM gives those one by one, with the smaller size."""
    return len(event.block_hashes) == 1 and 0 < event.block_size < whole and whole % event.block_size == 0


def _other_size(event: BlockStored, expected: int, context: StreamContext) -> str:
    if _is_part(event, expected):
        return "partial-block"
    return SIZE_CHANGED if context.mixes_sizes and event.medium == "GPU" else "other-block-size"


def _is_placeholder(event: BlockStored) -> bool:
    """Tell whether these are copies of blocks of another tier, named by their hashes alone (OffloadingConnector)."""
    return not event.tokens and event.medium != "GPU" and event.medium in TIERS and event.locality != "REMOTE"


def _learn_group(plan: Plan, event: BlockStored, context: StreamContext) -> None:
    before = context.groups
    if event.locality == "REMOTE" or event.medium not in TIERS:
        return
    context.groups = groups = learn(before, event)
    if groups is before or 0 not in before or before[0].kind is not None:
        return
    if is_indexed(before, 0) and not is_indexed(groups, 0):
        # vLLM 0.20 and 0.21 do not say what a group is: what was taken for the only one may be a sliding window
        _clear(plan, context)


def _tier(event: BlockStored | BlockRemoved, groups: Mapping[int, CacheGroup]) -> str:
    """Return where the index keeps the blocks; without a number they are not of another group than full attention."""
    number = event.group_idx
    return event.medium if number is None else tier_of(event.medium, groups.get(number))


def _clear(plan: Plan, context: StreamContext) -> None:
    plan.operations[:] = [Clear()]  # what was stored before is gone again, and would take a slot until it is swept
    context.block_sizes.clear()
    context.orphans.clear()
    context.unplaced.clear()
    context.first_blocks.clear()
    context.beginnings.clear()
    if not context.apart:
        context.main_size = 0


def _store(plan: Plan, event: BlockStored, context: StreamContext, roots: RootKeys) -> None:
    reason = skip_reason(event, context.groups)
    if reason == "placeholder" and _is_placeholder(event):
        _offload(plan, event, context)
        return
    tier = _tier(event, context.groups)
    if reason == "not-dense" and is_of_group(tier):
        _leave_out(plan, event, tier, context)
        return
    size = context.block_sizes.get(tier, event.block_size)
    if reason is None and size != event.block_size:
        if _shows_whole_block(event, size, context):
            _clear(plan, context)
            context.keys, context.main_size = RememberedKeys(), 0
        else:
            reason = _other_size(event, size, context)
    if reason is not None:
        (plan.not_understood if reason in NOT_UNDERSTOOD else plan.skipped)[reason] += 1
        return
    keys = _keys(plan, event, context, roots)
    if keys is None:
        return
    context.block_sizes[tier] = event.block_size
    is_report = context.more_is_report if isinstance(event, MoreStored) else _is_report(event, context)
    context.more_is_report = is_report
    _append_store(plan, event, tier, event.block_hashes, keys, set_only=is_report)
    _note_first_block(event, context, is_report=is_report)
    _adopt(plan, event.block_hashes, context)


def _keys(plan: Plan, event: BlockStored, context: StreamContext, roots: RootKeys) -> bytes | None:
    """Return the block keys, remembered by engine hash; None if they cannot be computed, now or ever."""
    extra = _extra_keys(plan, event)
    if extra is None:
        return None
    if event.parent_block_hash is None:
        parent: bytes | None = roots(event.lora_name, event.cache_salt or extra.cache_salt)
    else:
        parent = context.known(event.block_size).get(event.parent_block_hash)
    if parent is None:
        plan.skipped["unknown-parent"] += 1  # a root it is not: its keys would match other prompts
        bare = replace(event, extra_keys=None, lora_name=None, cache_salt=None, session_id=None)
        dropped = context.orphans.add(bare, extra.folded)
        if dropped:
            plan.skipped[ORPHAN_DROPPED] += dropped
        return None
    return _chain(event, parent, extra.folded, context)


def _extra_keys(plan: Plan, event: BlockStored) -> ExtraKeys | None:
    if not event.extra_keys or not any(event.extra_keys):  # hardly any block has some
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


def _first_block(engine_hash: int, group: int | None) -> int:
    """Return the name of a block among `StreamContext.first_blocks`."""
    return engine_hash | group << GROUP_SHIFT if group else engine_hash


def _begins_with_held(event: BlockStored, context: StreamContext) -> bool:
    """Tell whether a prompt's first block was held, so that the prompt was not computed from its start.

    In a hybrid model only if all groups held it: where one lacks it, vLLM may find no hit at all, and computes for all
    of them. The groups report a step's blocks in the order of their numbers, so that what the first of them finds is
    remembered for the others.
    """
    engine_hash, groups = event.block_hashes[0], context.groups
    if len(groups) < 2:
        return _first_block(engine_hash, event.group_idx) in context.first_blocks
    number = event.group_idx or 0
    was_held, last = context.beginnings.pop(engine_hash, (False, number))
    if number <= last:
        of_one_size = len({group.block_size for group in groups.values()}) == 1
        was_held = of_one_size and all(_first_block(engine_hash, each) in context.first_blocks for each in groups)
    context.beginnings[engine_hash] = was_held, number
    return was_held


def _may_be_report(event: BlockStored) -> bool:
    return event.parent_block_hash is None and event.medium == "GPU" and bool(event.block_hashes)


def _is_report(event: BlockStored, context: StreamContext) -> bool:
    """Tell whether a store reports blocks that are there already (kv_cache_report_mode=full).

    vLLM reports a hit exactly as it reports new blocks: the same fields, no parent, from the prompt's first block on.
    What differs is that a prompt whose first block is cached is not computed from its start, so that such a store is a
    report; a real second copy of first blocks comes about only where the prompt is no longer than one block (a hit is
    at most all tokens but one). So several blocks that begin with one that is held are not counted again. A single one
    is, until the publisher has been seen to report. Where a real copy is not counted (prompts that may not read the
    cache, such as those that ask for prompt_logprobs), its removal costs a hit; the other way round, blocks that are
    gone would be claimed for ever. Hence also: where the index may lack first blocks (it is not exact, or copies were
    not counted), nothing without a parent is counted twice. Only the GPU's own pool reports hits; connectors count.
    """
    if not _may_be_report(event):
        return False
    is_held = _begins_with_held(event, context)
    if len(event.block_hashes) == 1:
        return is_held and context.reports_anew
    context.reports_anew = context.reports_anew or is_held
    return context.reports_anew or not context.is_exact


def _note_first_block(event: BlockStored, context: StreamContext, *, is_report: bool) -> None:
    if _may_be_report(event):
        first = _first_block(event.block_hashes[0], event.group_idx)
        held = context.first_blocks.get(first, 0)
        context.first_blocks[first] = held or 1 if is_report else held + 1


def _adopt(plan: Plan, parents: Sequence[int], context: StreamContext) -> None:
    """Store what waited for these parents, and what waited for that, in order."""
    while parents and len(context.orphans):
        orphans = context.orphans.take(parents)
        parents = [each for orphan in orphans for each in _store_orphan(plan, orphan, context)]


def _store_orphan(plan: Plan, orphan: Orphan, context: StreamContext) -> tuple[int, ...]:
    event = orphan.event
    assert event.parent_block_hash is not None
    parent = context.known(event.block_size).get(event.parent_block_hash)
    if parent is None:  # what has come is a block of another size that ends there, too
        context.orphans.add(event, orphan.folded)
        return ()
    tier = _tier(event, context.groups)
    if context.block_sizes.setdefault(tier, event.block_size) != event.block_size:
        plan.skipped[_other_size(event, context.block_sizes[tier], context)] += 1
        return ()
    keys = _chain(event, parent, orphan.folded, context)
    held = [place for place in range(len(event.block_hashes)) if place not in orphan.gone]
    if held:
        hashes = tuple(event.block_hashes[place] for place in held)
        _append_store(plan, event, tier, hashes, b"".join(keys[place * 8 : place * 8 + 8] for place in held))
    return event.block_hashes


def _shows_whole_block(event: BlockStored, size: int, context: StreamContext) -> bool:
    """Tell whether what was indexed so far are parts of blocks.

    A block of a model with states may be longer than the first prompts: then only their ends were reported.
    """
    has_states = any(group.kind == STATE for group in context.groups.values())
    return has_states and context.mixes_sizes and event.block_size > size and event.block_size % size == 0


def _leave_out(plan: Plan, event: BlockStored, tier: str, context: StreamContext) -> None:
    """Let blocks of a group wait, some of whose neighbours were left out (a Mamba state is kept now and then)."""
    if tier not in context.block_sizes:  # a reader must know of the group before it holds anything
        context.block_sizes[tier] = event.block_size
        _append_store(plan, event, tier, (), b"")
    context.left_out.add(event.group_idx or 0)
    context.unplaced.add(event, is_report=event.parent_block_hash is None and context.reports_anew)


def _place(plan: Plan, context: StreamContext) -> None:
    """Store the blocks that wait and whose keys are known by now, because full attention has reported them.

    Where it has blocks of another size, nothing can say where they are, and such a group is not indexed. It may report
    after them: until it does, they wait.
    """
    dense_sizes = {group.block_size for group in context.groups.values() if group.kind in DENSE_KINDS}
    lost = {number for number in context.left_out if context.groups[number].block_size not in dense_sizes}
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
    stores: dict[tuple[str, int, int, bool], tuple[list[int], list[bytes]]] = {}
    for block, waiting in context.unplaced.entries() if dense_sizes else ():
        key = context.known(waiting.block_size).get(block.engine_hash)
        if key is not None:
            context.unplaced.take(block)
            tier = tier_of(block.medium, context.groups.get(block.group))
            hashes, keys = stores.setdefault((tier, block.group, waiting.block_size, waiting.is_report), ([], []))
            hashes += [block.engine_hash] * waiting.copies
            keys += [key] * waiting.copies
    for (tier, group, size, is_report), (hashes, keys) in stores.items():
        packed = pack_hashes(hashes)
        plan.operations.append(
            Store(tier=tier, group=group, block_size=size, hashes=packed, keys=b"".join(keys), set_only=is_report)
        )
    dropped = context.unplaced.forget_oldest()
    if dropped:
        plan.skipped[UNPLACED] += dropped


def _offload(plan: Plan, event: BlockStored, context: StreamContext) -> None:
    """Store blocks that another tier has reported, under the keys that they have there."""
    held = [engine_hash for engine_hash in event.block_hashes if engine_hash in context.keys]
    sizes, tier = context.block_sizes, _tier(event, context.groups)
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
        for first in hashes if not group else [each | group << GROUP_SHIFT for each in hashes]:
            references = context.first_blocks.pop(first, 1)
            if references > 1:
                context.first_blocks[first] = references - 1
    if len(orphans):
        hashes = tuple(each for each in hashes if not orphans.remove(tier=medium, group=group, engine_hash=each))
    if len(context.unplaced):
        hashes = tuple(each for each in hashes if not context.unplaced.remove(event, each))
    if not hashes:
        return
    packed, tier = pack_hashes(hashes), _tier(event, context.groups)
    last = plan.operations[-1] if plan.operations else None
    if isinstance(last, Remove) and (last.tier, last.group) == (tier, group):
        packed = last.hashes + packed  # as in `_append_store`: most publishers name one block an event
        plan.operations.pop()
    plan.operations.append(Remove(tier=tier, group=group, hashes=packed))
