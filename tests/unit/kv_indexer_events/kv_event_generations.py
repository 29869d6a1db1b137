"""Random batches in normal form, and how each generation of publishers writes them: the decoder's counterpart.

Written from the publishers' formats, without the decoder. A generation that cannot say something drops it from the
normal form first, as the publisher itself would.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st

from kvmesh.blocks.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch

pack = msgspec.msgpack.encode
Encode = Callable[[EventBatch], Any]

STORED_NAMES = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    *("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)
REMOVED_NAMES = ("block_hashes", "medium", "group_idx")
ALWAYS_WRITTEN = frozenset(
    {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"}
)

hashes = st.integers(0, 2**64 - 1)
names = st.text(min_size=1, max_size=6)
features = st.lists(names | st.binary(max_size=4) | st.tuples(names, st.integers(-9, 9)), max_size=3).map(tuple)
media = st.sampled_from(["GPU", "CPU", "STORAGE", "CPU_TIER1"])
groups = st.none() | st.integers(0, 300)
kinds = st.sampled_from([None, "full_attention", "mla_attention", "sliding_window", "mamba"])


@st.composite
def stores(draw: st.DrawFn) -> BlockStored:
    count, block_size = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    lora_name = draw(st.none() | names)
    return BlockStored(
        block_hashes=tuple(draw(st.lists(hashes, min_size=count, max_size=count))),
        parent_block_hash=draw(st.none() | st.integers(1, 2**64 - 1)),
        tokens=array("I", draw(st.lists(st.integers(0, 2**32 - 1), max_size=20))).tobytes(),
        block_size=block_size,
        lora_id=draw(st.integers(1, 9)) if lora_name else None,
        medium=draw(media),
        lora_name=lora_name,
        extra_keys=draw(st.none() | st.lists(st.none() | features, min_size=count, max_size=count).map(tuple)),
        group_idx=draw(groups),
        kv_cache_spec_kind=draw(kinds),
        kv_cache_spec_sliding_window=draw(st.none() | st.integers(1, 4096)),
        locality=draw(st.sampled_from([None, "LOCAL", "REMOTE"])),
        ownership=draw(st.none() | names),
        session_id=draw(st.none() | names),
        cache_salt=draw(st.none() | names),
    )


removals = st.builds(
    BlockRemoved,
    block_hashes=st.lists(hashes, max_size=4).map(tuple),
    medium=media,
    group_idx=groups,
    locality=st.sampled_from([None, "LOCAL"]),
    ownership=st.none() | names,
)
events: st.SearchStrategy[Event] = st.one_of(stores(), removals, st.just(AllBlocksCleared()))
batches = st.builds(
    EventBatch,
    ts=st.floats(0, 1e10),
    events=st.lists(events, max_size=5).map(tuple),
    data_parallel_rank=st.none() | st.integers(0, 64),
)


def written(event: Event) -> dict[str, Any]:
    """Return the fields as a publisher names them."""
    fields = msgspec.structs.asdict(event)
    if isinstance(event, BlockStored):
        fields["token_ids"] = list(array("I", fields.pop("tokens")))
    return fields


def signed(value: int) -> int:
    """Return a hash as the oldest vLLM writes it: the same 64 bit as a signed integer."""
    return value - 2**64 if value >= 2**63 else value


def digest(value: int) -> bytes:
    """Return a hash as 32 bytes, of which only the last 8 are known to us."""
    return b"\x5a" * 24 + value.to_bytes(8, "big")


def array_batch(
    batch: EventBatch, *, stored: int, removed: int, rank: bool = True, spell: Callable[[int], Any] = int
) -> list[Any]:
    """Write a batch with events as arrays of the given lengths, the event's name included."""
    written_events: list[Any] = []
    for event in batch.events:
        fields = written(event)
        for name in ("block_hashes", "parent_block_hash"):
            fields[name] = respell(fields.get(name), spell)
        match event:
            case BlockStored():
                written_events.append(["BlockStored", *(fields[name] for name in STORED_NAMES)][:stored])
            case BlockRemoved():
                written_events.append(["BlockRemoved", *(fields[name] for name in REMOVED_NAMES)][:removed])
            case _:
                written_events.append(["AllBlocksCleared"])
    return [batch.ts, written_events, *([batch.data_parallel_rank] if rank else [])]


def respell(value: Any, spell: Callable[[int], Any]) -> Any:
    if isinstance(value, Sequence):
        return [spell(each) for each in value]
    return None if value is None else spell(value)


def map_batch(batch: EventBatch, *, whole: bool = False, spell: Callable[[int], Any] = int) -> Any:
    """Write a batch with events as maps, absent fields left out; `whole`: the batch as a map too."""
    written_events = []
    for event in batch.events:
        fields = written(event)
        for name in ("block_hashes", "parent_block_hash"):
            fields[name] = respell(fields.get(name), spell)
        kept = {name: value for name, value in fields.items() if value is not None or name in ALWAYS_WRITTEN}
        written_events.append({"type": type(event).__name__, **kept})
    if whole:
        return {"ts": batch.ts, "events": written_events, "data_parallel_rank": batch.data_parallel_rank}
    return [batch.ts, written_events, batch.data_parallel_rank]


def sglang_batch(batch: EventBatch) -> Any:
    """Write a batch as SGLang 0.5.18 does: arrays, with a map of further fields in the adapter's position."""
    array_form = array_batch(batch, stored=7, removed=3, rank=False)
    for event, row in zip(batch.events, array_form[1], strict=True):
        if isinstance(event, BlockStored) and (event.cache_salt or event.session_id):
            row.append({"cache_salt": event.cache_salt, "session_id": event.session_id})
    return array_form


def only(batch: EventBatch, stored: Sequence[str], removed: Sequence[str], *, rank: bool = True) -> EventBatch:
    """Drop from the normal form what a generation has no field for; such an adapter keeps nothing but its number."""
    kept: list[Event] = []
    for event in batch.events:
        if isinstance(event, AllBlocksCleared):
            kept.append(event)
            continue
        known = {
            "tokens" if name == "token_ids" else name
            for name in (stored if isinstance(event, BlockStored) else removed)
        }
        values = {name: value for name, value in msgspec.structs.asdict(event).items() if name in known}
        if isinstance(event, BlockStored) and "lora_name" not in known and event.lora_id:
            values["lora_name"] = f"\0lora-id:{event.lora_id}"
        kept.append(type(event)(**values))
    return EventBatch(ts=batch.ts, events=tuple(kept), data_parallel_rank=batch.data_parallel_rank if rank else None)


def _arrays(stored: int, removed: int, **how: Any) -> tuple[Encode, Encode]:
    return (
        lambda batch: array_batch(batch, stored=stored, removed=removed, **how),
        lambda batch: only(
            batch, STORED_NAMES[: stored - 1], REMOVED_NAMES[: removed - 1], rank=bool(how.get("rank", True))
        ),
    )


GENERATIONS: dict[str, tuple[Encode, Encode]] = {
    # name -> (how it is written, what of the normal form survives)
    "vllm-0.8.5": _arrays(6, 2, rank=False, spell=signed),
    "vllm-0.9.2": _arrays(6, 2, spell=signed),
    "vllm-0.10.2": _arrays(7, 3),
    "vllm-0.10.2-bytes": _arrays(7, 3, spell=digest),
    "vllm-0.14": _arrays(8, 3),
    "vllm-0.17": _arrays(9, 3),
    "vllm-0.20": _arrays(10, 4),
    "vllm-0.22": _arrays(12, 4),
    "vllm-0.24": (map_batch, lambda batch: batch),
    "vllm-0.24-bytes": (lambda batch: map_batch(batch, spell=digest), lambda batch: batch),
    "vllm-0.24-map-batch": (lambda batch: map_batch(batch, whole=True), lambda batch: batch),
    "sglang-0.5.18": (
        sglang_batch,
        lambda batch: only(batch, (*STORED_NAMES[:6], "cache_salt", "session_id"), REMOVED_NAMES[:2], rank=False),
    ),
}
