"""From events to the operations of one index change: what is indexed, and under which keys. Pure.

What an event means depends on the events before it in its stream: `StreamContext` holds that and is updated in place.
What is not indexed is counted by reason, never dropped silently. Stores whose parent block is unknown are orphans:
they wait until the parent arrives, because without its key theirs cannot be computed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from kvmesh.blocks.block_keys import UnknownExtraKeyError, block_keys, separate_extra_keys, split_keys
from kvmesh.blocks.events import (
    MAX_GROUP,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheGroup,
    Event,
    is_dense,
    is_indexed,
    learn,
    may_hold,
)
from kvmesh.blocks.index_changes import TIERS, Clear, Operation, Remove, Store, pack_hashes

_EVENT_BYTES, _HASH_BYTES = 512, 256  # what an entry costs beside its tokens, roughly

Place = tuple[str, int, int]  # (tier, group, engine hash)
Key = TypeVar("Key")
Value = TypeVar("Value")
NOT_UNDERSTOOD = frozenset({"extra-keys-mismatch"})  # of `skip_reason`; the others are blocks of no use here
SIZE_CHANGED = "block-size-changed"  # counted and, where no restart explains it, why a source is degraded
KNOWN_KEYS_LIMIT = 65_536  # engine hashes remembered a stream; Redis has them all
FIRST_BLOCKS_LIMIT = 4096
RootKeys = Callable[[str | None, str | None], bytes]  # (lora, cache_salt) -> root key


@dataclass(slots=True, kw_only=True)
class Orphan:
    """One store that waits."""

    event: BlockStored
    gone: set[int] = field(default_factory=set)  # positions of blocks removed since; their children need their keys

    @property
    def size(self) -> int:
        """Bytes that it takes, roughly."""
        return _EVENT_BYTES + len(self.event.tokens) + _HASH_BYTES * len(self.event.block_hashes)


class OrphanTable:
    """The stores of one stream that wait for their parents, by the parents' engine hashes."""

    def __init__(self, *, max_events: int = 4096, max_bytes: int = 16 << 20) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._bytes = 0
        self._next = 0
        self._waiting: dict[int, Orphan] = {}  # by arrival
        self._children: dict[int, dict[int, None]] = {}  # parent's hash -> arrivals
        self._places: dict[Place, dict[tuple[int, int], None]] = {}  # -> (arrival, position in the event)

    def __len__(self) -> int:
        return len(self._waiting)

    def parents(self) -> set[int]:
        """Return the engine hashes that are waited for."""
        return set(self._children)

    def add(self, event: BlockStored) -> int:
        """Let a store with a parent wait; return how many had to go for it, itself included if it is too large."""
        orphan = Orphan(event=event)
        if event.parent_block_hash is None or orphan.size > self._max_bytes:
            return 1
        number, self._next = self._next, self._next + 1
        self._waiting[number] = orphan
        self._bytes += orphan.size
        self._children.setdefault(event.parent_block_hash, {})[number] = None
        for position, engine_hash in enumerate(event.block_hashes):
            self._places.setdefault(_place(event, engine_hash), {})[number, position] = None
        dropped = 0
        while len(self._waiting) > self._max_events or self._bytes > self._max_bytes:
            self._drop(next(iter(self._waiting)))
            dropped += 1
        return dropped

    def take(self, parents: Iterable[int]) -> list[Orphan]:
        """Take out what waits for these, in order of arrival."""
        numbers = sorted(number for parent in parents for number in self._children.get(parent, ()))
        return [self._drop(number) for number in numbers]

    def remove(self, *, tier: str, group: int, engine_hash: int) -> bool:
        """Take one reference to a block back; False if none of it waits here."""
        places = self._places.get((tier, group, engine_hash))
        if not places:
            return False
        (number, position), _ = places.popitem()
        if not places:
            del self._places[tier, group, engine_hash]
        self._waiting[number].gone.add(position)
        return True

    def clear(self) -> None:
        """Forget all of them: the blocks are gone."""
        self._waiting.clear()
        self._children.clear()
        self._places.clear()
        self._bytes = 0

    def _drop(self, number: int) -> Orphan:
        orphan = self._waiting.pop(number)
        self._bytes -= orphan.size
        event = orphan.event
        parent = event.parent_block_hash
        assert parent is not None
        _take_from(self._children, parent, number)
        for position, engine_hash in enumerate(event.block_hashes):
            if position not in orphan.gone:
                _take_from(self._places, _place(event, engine_hash), (number, position))
        return orphan


def _place(event: BlockStored, engine_hash: int) -> Place:
    return event.medium, event.group_idx or 0, engine_hash


def _take_from(entries: dict[Key, dict[Value, None]], key: Key, value: Value) -> None:
    of_key = entries[key]
    del of_key[value]
    if not of_key:
        del entries[key]


@dataclass(slots=True, kw_only=True)
class StreamContext:
    """What one stream has reported so far, as far as it decides what its next events mean."""

    keys: dict[int, bytes] = field(default_factory=dict)  # engine hash -> block key; held or not
    block_sizes: dict[str, int] = field(default_factory=dict)  # tier -> tokens a block
    groups: Mapping[int, CacheGroup] = field(default_factory=dict)
    orphans: OrphanTable = field(default_factory=OrphanTable)
    first_blocks: dict[int, int] = field(
        default_factory=dict
    )  # of prompts, held on the GPU -> references, if we saw all
    is_exact: bool = True  # the index has all that the publisher has
    mixes_sizes: bool = False  # it was seen to change its block size without a restart
    reports_anew: bool = False  # it was seen to store a prompt's beginning that it holds: kv_cache_report_mode=full

    def forget_oldest(self) -> None:
        """Keep within bounds."""
        _drop_oldest(self.keys, KNOWN_KEYS_LIMIT)
        _drop_oldest(self.first_blocks, FIRST_BLOCKS_LIMIT)


def _drop_oldest(entries: dict[int, Any], limit: int) -> None:
    if len(entries) > limit:
        for engine_hash in list(islice(entries, len(entries) - limit * 3 // 4)):
            del entries[engine_hash]


@dataclass(slots=True, kw_only=True)
class Plan:
    """The operations so far, and what was left out."""

    operations: list[Operation] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)  # reason -> events that are not indexed, or not yet
    not_understood: Counter[str] = field(default_factory=Counter)  # reason -> events that contradict the context


def hashes_to_look_up(events: Iterable[Event], context: StreamContext) -> set[tuple[int, int]]:
    """Return (hash, group) of parents and offloaded blocks that neither the context nor the change explains."""
    missing: set[tuple[int, int]] = set()
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
        missing.update((each, event.group_idx or 0) for each in wanted if each not in known and each not in stored)
        stored.update(event.block_hashes)
    return missing


def first_blocks_to_look_up(events: Iterable[Event], context: StreamContext) -> set[tuple[int, int]]:
    """Return (hash, group) of prompts' first blocks of which we cannot say whether they are held."""
    return {
        (event.block_hashes[0], event.group_idx or 0)
        for event in events
        if isinstance(event, BlockStored)
        and _may_be_report(event)
        and event.block_hashes[0] not in context.first_blocks
        and skip_reason(event, context.groups) is None
    }


def plan_change(events: Iterable[Event], *, context: StreamContext, roots: RootKeys) -> Plan:
    """Turn events into operations, learning from them."""
    plan = Plan()
    for event in events:
        match event:
            case BlockStored():
                _learn_group(plan, event, context)
                _store(plan, event, context, roots)
            case BlockRemoved():
                _remove(plan, event, context)
            case AllBlocksCleared():
                _clear(plan, context)
    return plan


def plan_adoption(*, context: StreamContext, roots: RootKeys) -> Plan:
    """Plan the stores of all orphans whose parents are known by now."""
    plan = Plan()
    _adopt(plan, [parent for parent in context.orphans.parents() if parent in context.keys], context, roots)
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
        return "not-full-attention"
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

    A publisher cannot change it while it lives, so this is another process whose start was missed. Blocks of a second
    dense group, or parts of a block (hybrid models), have sizes of their own and show nothing.
    """
    size, groups = context.block_sizes.get("GPU"), context.groups
    for number, events in enumerate(batches):
        for event in events:
            if isinstance(event, AllBlocksCleared):
                size = None
            elif isinstance(event, BlockStored) and event.block_size != size and event.medium == "GPU":
                group, groups = groups.get(event.group_idx or 0), learn(groups, event)
                if skip_reason(event, groups) is not None:
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


def _clear(plan: Plan, context: StreamContext) -> None:
    plan.operations.append(Clear())
    context.block_sizes.clear()
    context.orphans.clear()
    context.first_blocks.clear()


def _store(plan: Plan, event: BlockStored, context: StreamContext, roots: RootKeys) -> None:
    reason = skip_reason(event, context.groups)
    if reason == "placeholder" and _is_placeholder(event):
        _offload(plan, event, context)
        return
    size = context.block_sizes.get(event.medium, event.block_size)
    if reason is None and size != event.block_size:
        reason = _other_size(event, size, context)
    if reason is not None:
        (plan.not_understood if reason in NOT_UNDERSTOOD else plan.skipped)[reason] += 1
        return
    keys = _keys(plan, event, context, roots)
    if keys is None:
        return
    context.block_sizes[event.medium] = event.block_size
    is_report = _is_report(event, context)
    _append_store(plan, event, event.block_hashes, keys, set_only=is_report)
    _note_first_block(event, context, is_report=is_report)
    _adopt(plan, event.block_hashes, context, roots)


def _keys(plan: Plan, event: BlockStored, context: StreamContext, roots: RootKeys) -> bytes | None:
    """Return the block keys, remembered by engine hash; None if they cannot be computed, now or ever."""
    starts_prompt = event.parent_block_hash is None
    entries = event.extra_keys if event.extra_keys and any(event.extra_keys) else None  # hardly any block has some
    try:
        extra = separate_extra_keys(entries, lora_name=event.lora_name, starts_prompt=starts_prompt)
    except UnknownExtraKeyError:
        plan.not_understood["unknown-extra-key"] += 1
        return None
    if event.parent_block_hash is None:
        parent: bytes | None = roots(event.lora_name, event.cache_salt or extra.cache_salt)
    else:
        parent = context.keys.get(event.parent_block_hash)
    if parent is None:
        plan.skipped["unknown-parent"] += 1  # a root it is not: its keys would match other prompts
        dropped = context.orphans.add(event)
        if dropped:
            plan.skipped["orphan-dropped"] += dropped
        return None
    keys = block_keys(event.tokens, block_size=event.block_size, parent=parent, extra=extra.folded)
    context.keys.update(zip(event.block_hashes, split_keys(keys), strict=True))
    return keys


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
    is_held = event.block_hashes[0] in context.first_blocks
    if len(event.block_hashes) == 1:
        return is_held and context.reports_anew
    context.reports_anew = context.reports_anew or is_held
    return context.reports_anew or not context.is_exact


def _note_first_block(event: BlockStored, context: StreamContext, *, is_report: bool) -> None:
    if _may_be_report(event):
        held = context.first_blocks.get(event.block_hashes[0], 0)
        context.first_blocks[event.block_hashes[0]] = held or 1 if is_report else held + 1


def _adopt(plan: Plan, parents: Sequence[int], context: StreamContext, roots: RootKeys) -> None:
    """Store what waited for these parents, and what waited for that, in order."""
    while parents and len(context.orphans):
        orphans = context.orphans.take(parents)
        parents = [each for orphan in orphans for each in _store_orphan(plan, orphan, context, roots)]


def _store_orphan(plan: Plan, orphan: Orphan, context: StreamContext, roots: RootKeys) -> tuple[int, ...]:
    event = orphan.event
    if context.block_sizes.setdefault(event.medium, event.block_size) != event.block_size:
        plan.skipped[_other_size(event, context.block_sizes[event.medium], context)] += 1
        return ()
    keys = _keys(plan, event, context, roots)
    if keys is None:
        return ()
    held = [place for place in range(len(event.block_hashes)) if place not in orphan.gone]
    if held:
        hashes = tuple(event.block_hashes[place] for place in held)
        _append_store(plan, event, hashes, b"".join(keys[place * 8 : place * 8 + 8] for place in held))
    return event.block_hashes


def _offload(plan: Plan, event: BlockStored, context: StreamContext) -> None:
    """Store blocks that another tier has reported, under the keys that they have there."""
    held = [engine_hash for engine_hash in event.block_hashes if engine_hash in context.keys]
    sizes = context.block_sizes
    size = sizes.get(event.medium) or sizes.get("GPU") or next(iter(sizes.values()), 0)
    if len(held) < len(event.block_hashes) or not size:
        plan.skipped["placeholder-unknown"] += 1
    if held and size:
        sizes[event.medium] = size
        keys = b"".join(context.keys[engine_hash] for engine_hash in held)
        _append_store(plan, event, held, keys, block_size=size)


def _append_store(
    plan: Plan, event: BlockStored, hashes: Sequence[int], keys: bytes, *, block_size: int = 0, set_only: bool = False
) -> None:
    tier, group, packed = event.medium, event.group_idx or 0, pack_hashes(hashes)
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
    tier, group, orphans = event.medium, event.group_idx or 0, context.orphans
    hashes = event.block_hashes
    if tier == "GPU":
        for engine_hash in hashes:
            references = context.first_blocks.pop(engine_hash, 1)
            if references > 1:
                context.first_blocks[engine_hash] = references - 1
    if len(orphans):
        hashes = tuple(each for each in hashes if not orphans.remove(tier=tier, group=group, engine_hash=each))
    if hashes:
        plan.operations.append(Remove(tier=tier, group=group, hashes=pack_hashes(hashes)))
