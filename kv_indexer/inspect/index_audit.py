"""What must hold between the records of the index: rules and differences. Pure; `verify_index` reads what is judged.

A block key in Redis names the slots that hold it, a slot's hash names the blocks that it holds: each must be the
other's mirror. A lookup believes the first, the indexer removes by the second.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvmesh.blocks.groups import DENSE_KINDS

KINDS = {
    "extra": "a block key names a source that does not hold the block: requests are sent there in vain",
    "missing": "a source holds a block whose key does not name it: a hit is lost",
    "leftover": "a block key names a slot that no source has: the sweep has left something behind",
    "holders": "a block key's value cannot be read, or is not in its one form",
    "entry": "an entry of a source cannot be read",
    "orphan-slot": "a slot holds blocks and is in no record: an idle sweep removes it within a minute",
    "unnamed-slot": "a live slot that its stream does not name: nobody will remove its blocks",
    "wrong-slot": "a stream names a slot that is not its own, is being swept, or does not exist",
    "stream": "a stream's record is missing, or is not registered",
    "counter": "a counter is behind what it has given out: an epoch or a fence could come twice",
    "type": "a key is of another type than ours",
    "foreign": "a key under our prefix that we do not write",
    "unreadable": "a record that readers do not believe",
    "unchecked": "more suspects than are looked at again: most are differences, or the index changes very fast",
}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Difference:
    """One thing that is not as it must be."""

    kind: str  # of KINDS
    where: str
    detail: str = ""


@dataclass(slots=True, kw_only=True)
class Differences:
    """Differences, all counted, the first ones listed."""

    limit: int  # how many are listed
    listed: list[Difference] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, difference: Difference) -> None:
        """Count one, and list it if there is room."""
        self.counts[difference.kind] += 1
        if len(self.listed) < self.limit:
            self.listed.append(difference)

    def add_all(self, differences: Iterable[Difference]) -> None:
        """Count several."""
        for difference in differences:
            self.add(difference)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOwner:
    """What the record of a slot says."""

    stream: str  # HOST:PORT#RANK
    tier: str
    epoch: int
    live: bool

    @property
    def label(self) -> str:
        """Return how people name the source."""
        return f"{self.stream} {self.tier}" + ("" if self.live else " (waits for its sweep)")


def read_owner(record: bytes) -> SlotOwner | None:
    """Read a slot's record; None if it cannot be read."""
    try:
        value = json.loads(record)
        owner = SlotOwner(
            stream=f"{value['endpoint']}#{int(value['rank'])}",
            tier=str(value["tier"]),
            epoch=int(value["epoch"]),
            live=value["state"] == "live",
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return owner if owner.live or value["state"] == "sweeping" else None


def holds_several_groups(stream: Mapping[str, str]) -> bool:
    """Tell whether a stream's blocks are held by several KV cache groups that are indexed.

    There a block key's bit is cleared by the first group that drops the block, and the others still hold it.
    """
    try:
        groups = json.loads(stream.get("groups") or "{}")
        return sum(group.get("kind") in {None, *DENSE_KINDS} for group in groups.values()) > 1
    except (ValueError, AttributeError, TypeError, RecursionError):
        return False


def judge_records(
    *,
    slots: Mapping[int, SlotOwner],
    streams: Mapping[str, Mapping[str, str]],
    held: Mapping[int, int],
    counters: Mapping[str, str],
) -> Iterator[Difference]:
    """Compare the records of slots and streams with each other. `held`: slots that hold anything -> fields, or -1."""
    named: dict[int, set[str]] = {}
    for name, fields in streams.items():
        if "epoch" not in fields:
            yield Difference(kind="stream", where=name, detail="registered, but has no record")
        for slot, tier in _named_slots(fields):
            named.setdefault(slot, set()).add(name)
            yield from _judge_named(name, fields, slot, tier, slots.get(slot))
    for slot, owner in slots.items():
        if owner.live and owner.stream not in named.get(slot, ()):
            yield Difference(kind="unnamed-slot", where=f"{owner.label}, slot {slot}")
    for slot, count in held.items():
        if count < 0:
            yield Difference(kind="type", where=f"slot {slot}", detail="its blocks are not a hash")
        elif slot not in slots:
            yield Difference(kind="orphan-slot", where=f"slot {slot}", detail=f"{count} blocks")
    yield from _judge_counters(streams, counters)


def _judge_counters(streams: Mapping[str, Mapping[str, str]], counters: Mapping[str, str]) -> Iterator[Difference]:
    for counter, of_stream in (("epochs", "epoch"), ("fences", "fence")):
        greatest = max((_number(fields.get(of_stream)) for fields in streams.values()), default=0)
        if _number(counters.get(counter)) < greatest:
            detail = f"{counters.get(counter, 'missing')}, but a stream has {greatest}"
            yield Difference(kind="counter", where=counter, detail=detail)


def _named_slots(fields: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    for field_name, value in fields.items():
        kind, colon, tier = field_name.partition(":")
        if colon and kind in {"slot", "old"}:
            yield _number(value, otherwise=-1), tier


def _judge_named(
    name: str, fields: Mapping[str, str], slot: int, tier: str, owner: SlotOwner | None
) -> Iterator[Difference]:
    if owner is None:
        fault = "has no readable record"
    elif not owner.live:
        fault = "waits for its sweep"
    elif (owner.stream, owner.tier) != (name, tier):
        fault = f"belongs to {owner.label}"
    elif owner.epoch != _number(fields.get("epoch")):
        fault = f"is of epoch {owner.epoch}, the stream of {fields.get('epoch')}"
    else:
        return
    yield Difference(kind="wrong-slot", where=f"{name} {tier}, slot {slot}", detail=fault)


def _number(text: str | None, *, otherwise: int = 0) -> int:
    return int(text) if text and text.isdecimal() and len(text) < 20 else otherwise
