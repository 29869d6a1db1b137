"""Merges the policies of a pool: layers in order of precedence -> merged fields with their origins. Pure.

docs/reference/policy-precedence.md has the rules in prose.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

Path = tuple[str, ...]

Resets = Callable[[Path], Iterable[Path]]
"""What a layer with this field takes away from the layers below it: corrections of a value that is none any more."""

NO_AGE = "9999"  # sorts as youngest: a document without creation time (a file) never outranks one with it


class Level(IntEnum):
    """How specific a layer is; the higher level wins. `explain` shows the names in lower case."""

    PROFILE = 0  # the base that a policy names
    SETTINGS = 1  # the picker's own flags
    MESH = 2
    NAMESPACE = 3
    GATEWAY = 4
    ROUTE = 5
    POOL = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The fields of one policy at one level."""

    source: str  # "namespace/name"
    level: Level
    created_at: str | None  # RFC 3339 in UTC, so that texts sort as times
    fields: Mapping[str, Any]  # nested; mappings are merged, everything else is taken whole
    leaves: tuple[tuple[Path, Any], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "leaves", tuple(leaves_of(self.fields)))  # computed once, as layers are merged often


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One field of a layer, overridden by another layer."""

    loser: str
    winner: str
    path: Path  # the loser's field
    is_conflict: bool  # equal levels: only age or name has decided


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The merged fields. Every leaf of `fields` has an origin."""

    fields: Mapping[str, Any]
    origins: Mapping[Path, str]
    losses: tuple[Loss, ...]


def merge_layers(layers: Iterable[Layer], *, resets: Resets) -> Merged:
    """Merge leaf by leaf: the more specific layer wins; within a level the oldest, then the first by name.

    All layers have one schema: a leaf of one is never a mapping in another, except empty ones, which declare a name.
    """
    ordered = sorted(layers, key=precedence, reverse=True)  # the winner comes last and overwrites
    leaves: dict[Path, tuple[Any, Layer]] = {}
    removed: dict[Path, Layer] = {}  # path -> the layer that removed it without a new value
    for layer in ordered:
        for reset in [reset for path, _ in layer.leaves for reset in resets(path)]:
            for path in [path for path in leaves if path == reset or _is_below(path, reset)]:
                del leaves[path]
                removed[path] = layer
        for path, value in layer.leaves:
            if value == {} and any(other == path or _is_below(other, path) for other in leaves):
                continue  # the name is already declared
            for length in range(1, len(path)):
                leaves.pop(path[:length], None)  # drop the empty declaration of a name that has fields now
            leaves[path] = (value, layer)
    return Merged(
        fields=_nested({path: value for path, (value, _) in leaves.items()}),
        origins={path: layer.source for path, (_, layer) in leaves.items()},
        losses=tuple(loss for layer in ordered for loss in _losses(layer, leaves, removed)),
    )


def _losses(layer: Layer, leaves: Mapping[Path, tuple[Any, Layer]], removed: Mapping[Path, Layer]) -> Iterator[Loss]:
    for path, value in layer.leaves:
        in_force, winner = leaves.get(path, (None, removed.get(path)))
        if winner is None or winner is layer or value in ({}, in_force):
            continue  # in force, or an equal value
        yield Loss(loser=layer.source, winner=winner.source, path=path, is_conflict=winner.level == layer.level)


def precedence(layer: Layer) -> tuple[int, str, str]:
    """Return a key that sorts the winner first."""
    return (-layer.level, layer.created_at or NO_AGE, layer.source)


def leaves_of(fields: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves, which are merged independently: non-mappings, and empty mappings, which declare a name."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, (*path, name))
        else:
            yield (*path, name), value


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
