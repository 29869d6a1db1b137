"""Which policy says what for a pool: layers in their order of precedence -> one merged document with origins. Pure.

Called by `mesh_policy` once for each distinct set of layers. docs/policy-precedence.md has the rules in words.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

Path = tuple[str, ...]

Resets = Mapping[Path, tuple[Path, ...]]
"""What a layer that gives the key takes away from the layers below it: corrections of a value that is none any more."""

NO_AGE = "9999"  # sorts as youngest: whoever has no creation time (a file) displaces nobody who has


class Level(IntEnum):
    """How specific a layer is; the greater one wins."""

    SETTINGS = 0  # the picker's own flags
    MESH = 1
    NAMESPACE = 2
    GATEWAY = 3
    ROUTE = 4
    POOL = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one policy says at one level."""

    source: str  # "namespace/name"
    level: Level
    created_at: str | None  # RFC 3339 in UTC, so that texts sort as times
    fields: Mapping[str, Any]  # nested; mappings are merged, everything else is taken whole
    leaves: tuple[tuple[Path, Any], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "leaves", tuple(leaves_of(self.fields)))  # once, and merged often


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One field of a layer that another layer's value has taken the place of."""

    loser: str
    winner: str
    path: Path  # the loser's field
    is_conflict: bool  # both at one level: only age or name has decided


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The outcome. Every leaf of `fields` has its origin."""

    fields: Mapping[str, Any]
    origins: Mapping[Path, str]
    losses: tuple[Loss, ...]


@dataclass(frozen=True, slots=True)
class _Leaf:
    value: Any
    layer: Layer


def merge_layers(layers: Iterable[Layer], *, resets: Resets) -> Merged:
    """Merge leaf by leaf: the more specific layer wins; at one level the oldest, then the first by name."""
    ordered = sorted(layers, key=precedence, reverse=True)  # the winner comes last and overwrites
    merging = _Merging(resets)
    for layer in ordered:
        merging.apply(layer)
    leaves = merging.leaves
    return Merged(
        fields=_nested({path: leaf.value for path, leaf in leaves.items()}),
        origins={path: leaf.layer.source for path, leaf in leaves.items()},
        losses=tuple(loss for layer in ordered for loss in merging.losses(layer)),
    )


def precedence(layer: Layer) -> tuple[int, str, str]:
    """Return a key that sorts the winner first."""
    return (-layer.level, layer.created_at or NO_AGE, layer.source)


def leaves_of(fields: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what is decided by itself: everything that is no mapping, and empty mappings, which declare a name."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, (*path, name))
        else:
            yield (*path, name), value


def lay_over(below: Mapping[str, Any], above: Mapping[str, Any], *, resets: Resets) -> dict[str, Any]:
    """Return the fields of two layers of one source, the second one before the first, merged leaf by leaf."""
    layers = [
        Layer(source=source, level=level, created_at=None, fields=fields)
        for source, level, fields in (("below", Level.SETTINGS, below), ("above", Level.MESH, above))
    ]
    return dict(merge_layers(layers, resets=resets).fields)


class _Merging:
    """The leaves so far; each layer overwrites those below it."""

    def __init__(self, resets: Resets) -> None:
        self._resets = resets
        self.leaves: dict[Path, _Leaf] = {}
        self._replaced: dict[Path, Layer] = {}  # who has removed a leaf without putting one in the same place
        self._above: set[Path] = set()  # all that ever had a leaf below it

    def apply(self, layer: Layer) -> None:
        for path, _ in layer.leaves:
            for corrections in self._resets.get(path, ()):
                self._remove_below(corrections, layer)
        for path, value in layer.leaves:
            if value == {} and (path in self.leaves or self._has_below(path)):
                continue  # a name that is declared already; nothing is said about it
            if path not in self.leaves:
                self._make_room(path, layer)
            self.leaves[path] = _Leaf(value, layer)

    def losses(self, layer: Layer) -> Iterator[Loss]:
        for path, value in layer.leaves:
            leaf = self.leaves.get(path)
            winner = leaf.layer if leaf is not None else self._replaced.get(path)
            if winner is None or winner is layer or value == {} or (leaf is not None and leaf.value == value):
                continue  # in force, or saying the same
            yield Loss(loser=layer.source, winner=winner.source, path=path, is_conflict=winner.level == layer.level)

    def _make_room(self, path: Path, layer: Layer) -> None:
        """Take out what cannot be beside this leaf: one in the place of a mapping on its way, those below it."""
        for length in range(1, len(path)):
            if path[:length] in self.leaves:
                del self.leaves[path[:length]]
                self._replaced[path[:length]] = layer
            self._above.add(path[:length])
        self._remove_below(path, layer)

    def _remove_below(self, path: Path, layer: Layer) -> None:
        if path in self._above:
            for other in [other for other in self.leaves if _is_below(other, path)]:
                del self.leaves[other]
                self._replaced[other] = layer

    def _has_below(self, path: Path) -> bool:
        return path in self._above and any(_is_below(other, path) for other in self.leaves)


def _is_below(path: Path, above: Path) -> bool:
    return len(path) > len(above) and path[: len(above)] == above


def _nested(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, value in leaves.items():
        place = root
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = value
    return root
