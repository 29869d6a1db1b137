"""The `policy` setting (YAML or JSON, already parsed) -> PickPolicy; strict: an error names the path of what is wrong.

The document's fields are those of `core.policy`, so that neither can have one more; `docs/policy.md` explains them.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec

from extproc.core.endpoint import Role
from extproc.core.policy import PRESETS, PickPolicy, Strategy
from extproc.core.scorers import SCORERS
from extproc.errors import ConfigError

SHARES = frozenset({"saturated_kv_usage", "failure_share", "most_avoided_share"})
# every other number must be above 0
MAY_BE_ZERO = frozenset(
    {
        *("fallbacks", "copies", "pressure", "recent_prefix_seconds", "unfollowed_prefix_seconds"),
        *("slow_floor_seconds", "request_tokens", "waiting_tokens", "least_requests"),
    }
)
# what a message of msgspec's ends with where it knows the place
PLACE = " - at `$"


def parse_policy(document: object, *, path: str = "policy", base: PickPolicy | None = None) -> PickPolicy:
    """Read the setting on top of `base`, field by field.

    `strategy` sets all weights, `weights` then changes single ones. Raise ConfigError with the path, such as
    `policy.weights.prefx`.
    """
    base = base or PickPolicy()
    given = _mapping(document, path)
    _refuse_unknown(given, base, path)
    _check_mappings(given, path)
    merged = _merged(given, base) | {"weights": _weights(given, base, path)}
    try:
        policy = msgspec.convert(merged, PickPolicy)
    except msgspec.ValidationError as error:
        raise ConfigError(_placed(str(error), path)) from error
    for where, name, number in _numbers(policy, path):
        _check(where, name, number)
    if not policy.weights:
        raise ConfigError(f"{path}.weights: every weight is 0")
    return policy


def _weights(given: Mapping[str, Any], base: PickPolicy, path: str) -> dict[str, Any]:
    weights: Mapping[str, Any] = base.weights
    if "strategy" in given:
        weights = PRESETS[_strategy(given["strategy"], f"{path}.strategy")]
    changed = _mapping(given.get("weights", {}), f"{path}.weights")
    for name, weight in changed.items():
        if name not in SCORERS:
            raise ConfigError(f"{path}.weights.{name}: unknown scorer{_nearest(name, SCORERS)}")
        if not _is_number(weight):
            raise ConfigError(f"{path}.weights.{name}: must be a number >= 0, not {weight!r}")
    return {name: weight for name, weight in {**weights, **changed}.items() if weight != 0}


def _check_mappings(given: Mapping[str, Any], path: str) -> None:
    for endpoint, role in _mapping(given.get("roles", {}), f"{path}.roles").items():
        if role not in list(Role):
            raise ConfigError(f"{path}.roles.{endpoint}: must be one of {', '.join(Role)}, not {role!r}")
    for tier, worth in _mapping(given.get("tier_weights", {}), f"{path}.tier_weights").items():
        if not _is_number(worth) or not 0 <= worth <= 1:
            raise ConfigError(f"{path}.tier_weights.{tier}: must be a number between 0 and 1, not {worth!r}")


def _strategy(value: object, path: str) -> Strategy:
    try:
        return Strategy(str(value))
    except ValueError:
        raise ConfigError(f"{path}: there is no strategy {value!r}; there are {', '.join(Strategy)}") from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mapping(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{path}: must be a mapping, not {value!r}")
    return value


def _refuse_unknown(given: Mapping[str, Any], base: Any, path: str) -> None:
    known = [field.name for field in fields(base)]
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"{path}.{key}: unknown field{_nearest(key, known)}")
        if is_dataclass(getattr(base, key)):
            _refuse_unknown(_mapping(value, f"{path}.{key}"), getattr(base, key), f"{path}.{key}")


def _merged(given: Mapping[str, Any], base: Any) -> dict[str, Any]:
    """Return the fields of `base` as plain values, with those that are given in their place."""
    merged: dict[str, Any] = {}
    for field in fields(base):
        below = getattr(base, field.name)
        if is_dataclass(below):
            merged[field.name] = _merged(given.get(field.name, {}), below)
        elif field.name in given:
            merged[field.name] = given[field.name]
        else:
            merged[field.name] = dict(below) if isinstance(below, Mapping) else below
    return merged


def _numbers(value: Any, path: str) -> Iterator[tuple[str, str, float]]:
    for field in fields(value):
        inner = getattr(value, field.name)
        where = f"{path}.{field.name}"
        if is_dataclass(inner):
            yield from _numbers(inner, where)
        elif isinstance(inner, int | float) and not isinstance(inner, bool):
            yield where, field.name, inner
        elif field.name == "weights":
            yield from ((f"{where}.{name}", "fallbacks", weight) for name, weight in inner.items())


def _check(where: str, name: str, number: float) -> None:
    if not 0 <= number < float("inf"):
        raise ConfigError(f"{where}: must be a number >= 0, not {number!r}")
    if name in SHARES and number > 1:
        raise ConfigError(f"{where}: must be between 0 and 1, not {number!r}")
    if not number and name not in MAY_BE_ZERO:
        raise ConfigError(f"{where}: must be above 0")


def _placed(message: str, path: str) -> str:
    words, separator, place = message.partition(PLACE)
    return f"{path}{place.rstrip('`')}: {words[:1].lower()}{words[1:]}" if separator else f"{path}: {message}"


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
    return f"; the nearest valid one is {close[0]!r}" if close else ""
