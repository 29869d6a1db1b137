"""What the index must say, in plain dicts: written apart from the index and its twin, to be compared with both.

A block of a source is visible from the store that brought its first reference to the removal that took the last one
of any of its hashes. Nothing here knows slots, bitmaps or Redis.
"""

from dataclasses import dataclass, field

from kvmesh.blocks.index_changes import Clear, Operation, Remove
from kvmesh.blocks.source import Stream

Field = tuple[int, bytes]  # (group, engine hash)


def eights(packed: bytes) -> list[bytes]:
    return [packed[at : at + 8] for at in range(0, len(packed), 8)]


@dataclass
class Source:
    """One tier of one stream in its present epoch."""

    counts: dict[Field, int] = field(default_factory=dict)
    keys: dict[Field, bytes] = field(default_factory=dict)
    visible: set[bytes] = field(default_factory=set)

    def store(self, name: Field, key: bytes, *, set_only: bool) -> None:
        if name not in self.counts:
            self.counts[name], self.keys[name] = 1, key
            self.visible.add(key)
        elif not set_only:
            self.counts[name] += 1

    def remove(self, name: Field) -> None:
        if name in self.counts:
            self.counts[name] -= 1
            if self.counts[name] == 0:
                self.visible.discard(self.keys.pop(name))
                del self.counts[name]


@dataclass
class Reference:
    """All streams."""

    sources: dict[Stream, dict[str, Source]] = field(default_factory=dict)
    seqs: dict[Stream, int] = field(default_factory=dict)
    degraded: dict[Stream, str] = field(default_factory=dict)

    def register(self, stream: Stream) -> None:
        if stream not in self.seqs:
            self.begin_epoch(stream, last_seq=-1)

    def begin_epoch(self, stream: Stream, *, last_seq: int, degraded: str = "") -> None:
        self.sources[stream], self.seqs[stream], self.degraded[stream] = {}, last_seq, degraded

    def drop(self, stream: Stream) -> None:
        for known in (self.sources, self.seqs, self.degraded):
            known.pop(stream, None)

    def apply(self, stream: Stream, operations: list[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, Clear):
                self.sources[stream], self.degraded[stream] = {}, ""
                continue
            tiers = self.sources[stream]
            names = [(operation.group, engine_hash) for engine_hash in eights(operation.hashes)]
            if isinstance(operation, Remove):
                for name in names if operation.tier in tiers else ():
                    tiers[operation.tier].remove(name)
            else:
                source = tiers.setdefault(operation.tier, Source())
                for name, key in zip(names, eights(operation.keys), strict=True):
                    source.store(name, key, set_only=operation.set_only)
        self.seqs[stream] += 1

    def matched(self, keys: list[bytes]) -> dict[str, int]:
        """Endpoint -> leading blocks of a prompt that it holds, in whichever tiers; of several ranks each, and all."""
        lengths: dict[str, dict[str, int]] = {}
        for stream, tiers in self.sources.items():
            length = 0
            while length < len(keys) and any(keys[length] in source.visible for source in tiers.values()):
                length += 1
            lengths.setdefault(stream.endpoint, {})[stream.name] = length
        found: dict[str, int] = {}
        for endpoint, ranks in lengths.items():
            found[endpoint] = min(ranks.values())
            if len(ranks) > 1:
                found |= ranks
        return {name: length for name, length in found.items() if length}

    def held(self) -> dict[tuple[str, str], dict[Field, tuple[bytes, int]]]:
        """(stream, tier) -> (group, engine hash) -> (block key, references)."""
        return {
            (stream.name, tier): {name: (source.keys[name], count) for name, count in source.counts.items()}
            for stream, tiers in self.sources.items()
            for tier, source in tiers.items()
        }

    def visible(self) -> dict[tuple[str, str], set[bytes]]:
        """(stream, tier) -> block keys that a lookup must find."""
        every = [(stream, tier, source) for stream, tiers in self.sources.items() for tier, source in tiers.items()]
        return {(stream.name, tier): source.visible for stream, tier, source in every}
