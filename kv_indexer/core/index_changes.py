"""From events to one index change: which blocks are indexed, under which keys. Pure; used by `apply_events`.

A change keeps the order of the events; counting references is left to whoever applies it, because only the index
knows the counts. What is not indexed is counted by reason, never dropped silently.
"""

import struct
from collections import Counter
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field

from kv_indexer.core.block_keys import TOKEN_BYTES, block_keys, split_keys
from kv_indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kv_indexer.core.extra_keys import UnknownExtraKeyError, separate_extra_keys

DENSE_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
TIERS = frozenset({"GPU", "CPU", "STORAGE", "FS", "OBJ", "CPU_TIER1", "CPU_TIER2"})
MAX_GROUP = 255
NOT_UNDERSTOOD = frozenset({"extra-keys-mismatch"})  # of `skip_reason`; the others are blocks of no use here

RootKeys = Callable[[str | None, str | None], bytes]  # (lora, cache_salt) -> root key


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Blocks that gained one reference each."""

    tier: str
    group: int
    block_size: int
    hashes: bytes  # 8 bytes each, big-endian
    keys: bytes  # 8 bytes each, same order


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Blocks that lost one reference each."""

    tier: str
    group: int
    hashes: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Clear:
    """All of the stream's blocks are gone: a new epoch begins here."""


Operation = Store | Remove | Clear


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexChange:
    """The effect of the batches `previous_seq + 1 … last_seq`, applied as a whole or not at all."""

    epoch: int
    previous_seq: int
    last_seq: int
    last_ts: float
    last_crc: int
    operations: tuple[Operation, ...] = ()


@dataclass(slots=True, kw_only=True)
class Plan:
    """Operations in the making, and what was left out."""

    operations: list[Operation] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)  # reason -> events that we do not index
    not_understood: Counter[str] = field(default_factory=Counter)  # reason -> events that contradict what we know


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Pack unsigned 64-bit engine hashes, big-endian."""
    values = tuple(hashes)
    return struct.pack(f">{len(values)}Q", *values)


def parents_to_look_up(events: Iterable[Event], *, known: MutableMapping[int, bytes]) -> set[tuple[int, int]]:
    """Return (hash, group) of parents that neither `known` nor an earlier event of the same change explains."""
    missing: set[tuple[int, int]] = set()
    stored: set[int] = set()
    for event in events:
        if isinstance(event, BlockStored) and skip_reason(event) is None:
            parent = event.parent_block_hash
            if parent is not None and parent not in known and parent not in stored:
                missing.add((parent, event.group_idx or 0))
            stored.update(event.block_hashes)
    return missing


def plan_change(
    events: Iterable[Event],
    *,
    known: MutableMapping[int, bytes],
    roots: RootKeys,
    block_sizes: MutableMapping[str, int],
) -> Plan:
    """Turn events into operations.

    `known` maps engine hashes of this stream to block keys and learns the new ones; `block_sizes` maps tiers to tokens
    a block, learns likewise, and is emptied by a clear.
    """
    plan = Plan()
    for event in events:
        match event:
            case BlockStored():
                _store(plan, event, known=known, roots=roots, block_sizes=block_sizes)
            case BlockRemoved():
                _remove(plan, event)
            case AllBlocksCleared():
                plan.operations.append(Clear())
                block_sizes.clear()
    return plan


def skip_reason(event: BlockStored) -> str | None:
    """Say why a store is not indexed, or None; looks at the event alone.

    A missing kind with a group (vLLM 0.20, 0.21) may be a sliding window, so it is not trusted.
    """
    checks = (
        (event.locality == "REMOTE", "remote"),
        (event.medium not in TIERS, "unknown-medium"),
        ((event.group_idx or 0) > MAX_GROUP, "group-out-of-range"),
        (
            event.kv_cache_spec_kind not in DENSE_KINDS
            and not (event.kv_cache_spec_kind is None and event.group_idx is None),
            "not-full-attention",
        ),
        (event.block_size == 0 or not event.tokens, "placeholder"),
        (len(event.tokens) != len(event.block_hashes) * event.block_size * TOKEN_BYTES, "not-dense"),
        (event.extra_keys is not None and len(event.extra_keys) != len(event.block_hashes), "extra-keys-mismatch"),
    )
    return next((reason for failed, reason in checks if failed), None)


def _store(
    plan: Plan,
    event: BlockStored,
    *,
    known: MutableMapping[int, bytes],
    roots: RootKeys,
    block_sizes: MutableMapping[str, int],
) -> None:
    reason = skip_reason(event)
    if reason is None and block_sizes.get(event.medium, event.block_size) != event.block_size:
        reason = "block-size-changed"
    if reason is not None:
        (plan.not_understood if reason in NOT_UNDERSTOOD else plan.skipped)[reason] += 1
        return
    starts_prompt = event.parent_block_hash is None
    try:
        extra = separate_extra_keys(event.extra_keys, lora_name=event.lora_name, starts_prompt=starts_prompt)
    except UnknownExtraKeyError:
        plan.not_understood["unknown-extra-key"] += 1
        return
    if event.parent_block_hash is None:
        parent: bytes | None = roots(event.lora_name, event.cache_salt or extra.cache_salt)
    else:
        parent = known.get(event.parent_block_hash)
    if parent is None:
        plan.skipped["unknown-parent"] += 1  # a root it is not: its keys would match other prompts
        return
    block_sizes[event.medium] = event.block_size
    keys = block_keys(event.tokens, block_size=event.block_size, parent=parent, extra=extra.folded)
    known.update(zip(event.block_hashes, split_keys(keys), strict=True))
    _append_store(plan, event, keys)


def _append_store(plan: Plan, event: BlockStored, keys: bytes) -> None:
    store = Store(
        tier=event.medium,
        group=event.group_idx or 0,
        block_size=event.block_size,
        hashes=pack_hashes(event.block_hashes),
        keys=keys,
    )
    last = plan.operations[-1] if plan.operations else None
    if isinstance(last, Store) and (last.tier, last.group) == (store.tier, store.group):
        # one longer operation is far cheaper to apply than two
        store = Store(
            tier=store.tier,
            group=store.group,
            block_size=store.block_size,
            hashes=last.hashes + store.hashes,
            keys=last.keys + store.keys,
        )
        plan.operations.pop()
    plan.operations.append(store)


def _remove(plan: Plan, event: BlockRemoved) -> None:
    if event.locality == "REMOTE" or event.medium not in TIERS or (event.group_idx or 0) > MAX_GROUP:
        plan.skipped["removal-of-unindexed"] += 1
        return
    if event.block_hashes:
        hashes = pack_hashes(event.block_hashes)
        plan.operations.append(Remove(tier=event.medium, group=event.group_idx or 0, hashes=hashes))
