"""Random damage to policy documents, seeded: what people, templates and old versions do to them."""

import copy
import json
import random
from typing import Any

Place = tuple[Any, Any]  # container, key or index

JUNK: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        0.5,
        1.0,
        3.7,
        -0.001,
        1e-9,
        1e9,
        1e308,
        2**31,
        -(2**31),
        2**63,
        10**30,
        429,
        503,
    ),
    *(
        "",
        "*",
        "a",
        "1",
        "true",
        "standard",
        "x" * 64,
        "x" * 5000,
        "/a/../b",
        "A b",
        "ä€😀",
        "a\nb",
        "\x00",
        "..",
        "x-a",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        [{}],
        {"a": 1},
        {"name": "a"},
        ["a", "a"],
        [{"name": "a"}, {"name": "a"}],
        list(range(300)),
    ),
)
NAMES = (
    *(
        "name",
        "tokens",
        "model",
        "weight",
        "prefx",
        "ttft_seconds",
        "ttftSecond",
        "enabled",
        "",
        "a.b",
        "a]b",
        'q"',
        "x" * 300,
    ),
    *(
        "targetRef",
        "spec",
        "leave",
        "enter",
        "step",
        "kind",
        "group",
        "sheddable",
        "targets",
        "stickyHeader",
        "scaleUp",
    ),
)


def mutated(document: str, chance: random.Random, *, most: int = 3) -> dict[str, Any]:
    """A JSON document with one to `most` pieces of damage."""
    damaged: dict[str, Any] = json.loads(document)
    for _ in range(chance.randint(1, most)):
        if damaged:
            _damage(damaged, chance)
    return damaged


def _damage(document: dict[str, Any], chance: random.Random) -> None:
    container, key = _place(document, chance)
    value = container[key]
    kind = chance.randrange(9)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[chance.choice(NAMES)] = container.pop(key)
    elif kind == 2 and isinstance(container, dict):
        container[chance.choice(NAMES)] = copy.deepcopy(chance.choice(JUNK))
    elif kind == 3 and isinstance(value, list) and value:
        value.append(copy.deepcopy(chance.choice(value)))
    elif kind == 4:
        other, other_key = _place(document, chance)
        container[key] = copy.deepcopy(other[other_key])
    elif kind == 5 and isinstance(value, int | float) and not isinstance(value, bool):
        container[key] = chance.choice(
            (-value, value * 10, value / 10, value + 1, value - 1, value * 1000, float(value))
        )
    elif kind == 6 and isinstance(value, str):
        container[key] = chance.choice((value.upper(), value + "x", value[1:], f" {value}", value * 30, [value]))
    elif kind == 7 and isinstance(value, list):
        container[key] = value[:1] * chance.choice((0, 2, 20, 70, 300, 1100))
    else:
        container[key] = copy.deepcopy(chance.choice(JUNK))


def _place(document: dict[str, Any], chance: random.Random) -> Place:
    """Walk down to a random field or item; nine in ten times on, where there is more below."""
    at: Any = document
    while True:
        key = chance.choice(list(at)) if isinstance(at, dict) else chance.randrange(len(at))
        below = at[key]
        is_more = isinstance(below, dict | list) and len(below) > 0
        if not is_more or chance.random() < 0.1:
            return at, key
        at = below
