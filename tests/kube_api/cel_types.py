"""Rules before they run: types that do not fit, fields that are not declared, and what a rule may cost at worst. Pure.

The limits and the way of estimating are those of the real server (apiextensions' limits, cel-go's checker/cost.go), to
within a factor of about two; what is unknown here counts as right.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.kube_api.cel_names import escaped
from tests.kube_api.cel_parser import Node
from tests.kube_api.errors import Document

RULE_LIMIT = 10_000_000.0  # of one rule, times how often it is asked at most
REQUEST_BYTES = 3 * 1024 * 1024

_MACROS = frozenset({"all", "exists", "exists_one", "map", "filter"})
_NUMBERS = frozenset({"int", "uint", "double"})
_RESULTS = {
    **dict.fromkeys(("size", "int", "indexOf", "lastIndexOf", "compareTo"), "int"),
    **dict.fromkeys(("contains", "startsWith", "endsWith", "matches", "bool", "isIP", "isCIDR", "isURL"), "bool"),
    **dict.fromkeys(("string", "lowerAscii", "upperAscii", "replace", "substring", "trim", "join", "charAt"), "string"),
    "double": "double",
    "duration": "duration",
    "timestamp": "timestamp",
}


class CelTypeError(ValueError):
    """The server would not compile this rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CelType:
    """What an expression can be: dyn where nothing is known. `most`: items of a list or map, bytes of a text."""

    kind: str = "dyn"
    schema: Document = field(default_factory=dict, hash=False)
    item: "CelType | None" = None
    most: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """An expression's type and its cost at worst."""

    type: CelType
    cost: float


DYN = CelType(most=1)


def type_of(schema: Document) -> CelType:
    """The CEL type of a value of that schema."""
    if schema.get("x-kubernetes-int-or-string") or not schema.get("type"):
        return CelType(kind="dyn", most=REQUEST_BYTES)
    kind = schema["type"]
    if kind == "array":
        return CelType(kind="list", item=type_of(schema["items"]), most=most_items(schema))
    if kind == "object":
        others = schema.get("additionalProperties")
        if isinstance(others, dict):
            return CelType(kind="map", item=type_of(others), most=most_items(schema))
        if schema.get("x-kubernetes-preserve-unknown-fields") and not schema.get("properties"):
            return CelType(kind="dyn", most=REQUEST_BYTES)
        return CelType(kind="object", schema=schema, most=1)
    if kind == "string":
        formats = {"date-time": "timestamp", "date": "timestamp", "duration": "duration", "byte": "bytes"}
        return CelType(kind=formats.get(schema.get("format", ""), "string"), most=_most_bytes(schema))
    return CelType(kind={"integer": "int", "number": "double", "boolean": "bool"}[kind], most=1)


def times_asked(schema: Document, outside: float | None) -> float:
    """How often a rule at this place is asked at most; `outside` is None where a list or map around it has no limit."""
    return (REQUEST_BYTES - 2) // (_least_bytes(schema) + 1) if outside is None else outside


def most_items(schema: Document) -> float:
    """How many items a list or map may have: as declared, or what fits into a request."""
    if schema["type"] == "array":
        declared, least = schema.get("maxItems"), _least_bytes(schema["items"]) + 1
    else:
        declared, least = schema.get("maxProperties"), _least_bytes(schema["additionalProperties"]) + 6
    return float(declared if declared is not None else (REQUEST_BYTES - 2) // least)


def _most_bytes(schema: Document) -> float:
    if "enum" in schema:
        return float(max((len(str(one)) for one in schema["enum"]), default=0))
    return float(4 * schema["maxLength"]) if "maxLength" in schema else float(REQUEST_BYTES - 2)


def _least_bytes(schema: Document) -> int:
    kind = schema.get("type")
    if kind == "object":
        properties = schema.get("properties", {})
        required = [name for name in schema.get("required", ()) if name in properties]
        return 2 + sum(len(name) + 4 + _least_bytes(properties[name]) for name in required)
    return {"string": 2, "array": 2, "boolean": 4}.get(str(kind), 1)


def check(node: Node, names: Mapping[str, CelType]) -> Checked:
    """Type and cost; raises CelTypeError where the server's compiler would refuse."""
    if node.kind == "literal":
        return Checked(type=CelType(kind=node.word, most=max(1, len(node.text) - 2)), cost=0)
    if node.kind == "name":
        if node.word not in names:
            if node.word in {"int", "string", "double", "bool", "list", "map", "bytes", "uint", "sets", "math", "cel"}:
                return Checked(type=DYN, cost=1)
            raise CelTypeError(f"undeclared reference to '{node.word}' (in container '')")
        return Checked(type=names[node.word], cost=1)
    if node.kind == "select" and node.on is not None:
        on = check(node.on, names)
        return Checked(type=_field(on.type, node.word), cost=on.cost + 1)
    if node.kind == "index" and node.on is not None:
        on, key = check(node.on, names), check(node.parts[0], names)
        return Checked(type=on.type.item or DYN, cost=on.cost + key.cost + 1)
    if node.kind in {"list", "map"}:
        parts = [check(part, names) for part in node.parts]
        item = parts[0].type if parts else DYN
        made = CelType(kind=node.kind, item=item if node.kind == "list" else DYN, most=len(parts))
        return Checked(type=made, cost=sum(part.cost for part in parts) + (10 if node.kind == "list" else 30))
    return _call(node, names)


def _field(on: CelType, name: str) -> CelType:
    if on.kind == "map":
        return on.item or DYN
    if on.kind != "object":
        if on.kind in {"dyn", "list"}:
            return DYN
        raise CelTypeError(f"type '{on.kind}' does not support field selection")
    for given, inner in on.schema.get("properties", {}).items():
        if escaped(given) == name:
            return type_of(inner)
    raise CelTypeError(f"undefined field '{name}'")


def _call(node: Node, names: Mapping[str, CelType]) -> Checked:
    if node.word == "has" and node.on is None:
        asked = check(node.parts[0], names)
        return Checked(type=CelType(kind="bool"), cost=asked.cost - 1)  # being there costs nothing beyond the way to it
    if node.on is not None and node.word in _MACROS:
        return _macro(node, names)
    given = [check(part, names) for part in (*((node.on,) if node.on else ()), *node.parts)]
    cost = sum(one.cost for one in given)
    if node.word in {"_&&_", "_||_", "!_"}:
        for one in given:
            if one.type.kind not in {"bool", "dyn"}:
                raise CelTypeError(_no_overload(node.word, [one.type for one in given]))
        return Checked(type=CelType(kind="bool"), cost=cost + (node.word == "!_"))
    if node.word == "_?_:_":
        return Checked(type=given[1].type, cost=given[0].cost + max(given[1].cost, given[2].cost))
    if node.word.startswith("_"):
        return _operator(node.word, given[0], given[1])
    result = given[0].type if node.word == "-_" else CelType(kind=_RESULTS.get(node.word, "dyn"), most=_longest(given))
    return Checked(type=result, cost=cost + 1 + _traversal(node.word, given))


def _operator(word: str, left: Checked, right: Checked) -> Checked:
    """Kubernetes lets numbers of different types be ordered, but not be equal or be added."""
    kinds, cost = (left.type.kind, right.type.kind), left.cost + right.cost
    smaller = min(_size(left.type), _size(right.type))
    if word == "_in_":
        if right.type.item is not None:
            _operator("_==_", left, Checked(type=right.type.item, cost=0))
        return Checked(type=CelType(kind="bool"), cost=cost + _size(right.type))
    if word in {"_<_", "_<=_", "_>_", "_>=_"}:
        if "dyn" not in kinds and kinds[0] != kinds[1] and not _NUMBERS.issuperset(kinds):
            raise CelTypeError(_no_overload(word, [left.type, right.type]))
        return Checked(type=CelType(kind="bool"), cost=cost + max(1, math.ceil(0.1 * smaller)))
    if not {"dyn", "null"} & set(kinds) and kinds[0] != kinds[1] and set(kinds) != {"object", "map"}:
        raise CelTypeError(_no_overload(word, [left.type, right.type]))
    if word in {"_==_", "_!=_"}:
        return Checked(type=CelType(kind="bool"), cost=cost + max(1, math.ceil(0.1 * smaller)))
    most = _size(left.type) + _size(right.type)
    known = left.type if left.type.kind != "dyn" else right.type
    return Checked(type=CelType(kind=known.kind, item=known.item, most=most), cost=cost + max(1, math.ceil(0.1 * most)))


def _macro(node: Node, names: Mapping[str, CelType]) -> Checked:
    if node.on is None or not node.parts:
        raise CelTypeError(f"{node.word} needs a variable")
    on = check(node.on, names)
    if on.type.kind not in {"list", "map", "dyn"}:
        raise CelTypeError(f"expression of type '{on.type.kind}' cannot be range of a comprehension")
    each = CelType(kind="string", most=0) if on.type.kind == "map" else on.type.item or DYN
    bodies = [check(part, {**names, node.parts[0].word: each}) for part in node.parts[1:]]
    body = sum(one.cost for one in bodies)
    result = CelType(kind="bool")
    if node.word in {"map", "filter"}:
        item = bodies[-1].type if node.word == "map" else each
        result = CelType(kind="list", item=item, most=_size(on.type))
    elif bodies and bodies[0].type.kind not in {"bool", "dyn"}:
        raise CelTypeError(f"expected type 'bool' but found '{bodies[0].type.kind}'")
    return Checked(type=result, cost=on.cost + 1 + _size(on.type) * (body + 3))


def _size(kind: CelType) -> float:
    return 1.0 if math.isinf(kind.most) else kind.most


def _longest(given: list[Checked]) -> float:
    return max((_size(one.type) for one in given), default=1)


def _traversal(word: str, given: list[Checked]) -> float:
    """What a function costs beyond being called: texts are read, some for each byte of a pattern."""
    sizes = [_size(one.type) for one in given]
    if word in {"contains", "matches", "find", "findAll"} and len(sizes) > 1:
        return math.ceil(0.1 * (sizes[0] + 1)) * math.ceil((0.25 if word != "contains" else 0.1) * sizes[1])
    if word in {"startsWith", "endsWith"} and len(sizes) > 1:
        return math.ceil(0.1 * sizes[1])
    read_once = {"lowerAscii", "upperAscii", "trim", "substring", "replace", "split", "join", "indexOf", "lastIndexOf"}
    return math.ceil(0.1 * sum(sizes)) if word in read_once else 0


def _no_overload(word: str, kinds: list[CelType]) -> str:
    listed = ", ".join(one.kind for one in kinds)
    return f"found no matching overload for '{word}' applied to '({listed})'"
