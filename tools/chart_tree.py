"""From many renderings of one object to one template: what all share stands once, what differs depends on a condition.

A rendering is drawn with known conditions (`Sample.holds`). Where values differ, the condition that tells them apart
best becomes an `{{ if }}`. What stands for an element of a list (`$pool`, `$route`) becomes a `{{ range }}`.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FEWEST_SAMPLES = 3  # that a branch rests on; fewer may be chance


class _Missing:
    """The object, the field or the element is not there."""


MISSING = _Missing()


@dataclass(frozen=True, slots=True)
class Sample:
    """One rendering of a part."""

    holds: frozenset[str]  # the conditions that are true
    value: Any


@dataclass(frozen=True, slots=True)
class If:
    """One of two nodes."""

    condition: str
    then: "Node"
    otherwise: "Node"


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of an object."""

    nodes: Mapping[str, "Node"]


@dataclass(frozen=True, slots=True)
class Items:
    """The elements of a list; those of one `loop` beside each other repeat together."""

    groups: Sequence[tuple[str | None, Sequence["Node"]]]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A string, a number, a truth value."""

    value: Any


Node = If | Fields | Items | Leaf | _Missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What a template's author knows of the values that stand for others."""

    conditions: Sequence[str]
    loop_of: Callable[[Any, frozenset[str]], str | None]  # the loop that a part needs and is not in yet
    variables: Callable[[Any], frozenset[str]]  # the loops' variables that a part names
    bound: Callable[[str], frozenset[str]]  # the variables that a loop sets


def build(samples: Sequence[Sample], words: Words, inside: frozenset[str] = frozenset()) -> Node:
    """Return the node that renders each sample under its conditions. Raise ValueError where none tells them apart."""
    kinds = {_kind(each.value) for each in samples}
    if len(kinds) > 1:
        return _split(samples, words, inside)
    first = samples[0].value
    if isinstance(first, dict):
        names = _in_order([list(each.value) for each in samples])
        return Fields(
            {
                name: build([Sample(each.holds, each.value.get(name, MISSING)) for each in samples], words, inside)
                for name in names
            }
        )
    if isinstance(first, list):
        return items(samples, words, inside)
    return first if first is MISSING else Leaf(first)


def items(samples: Sequence[Sample], words: Words, inside: frozenset[str] = frozenset()) -> Items:
    """Return the node of a list: elements that are the same thing are laid upon each other."""
    signed = [Sample(each.holds, dict(_signed(each.value, words))) for each in samples]
    groups: list[tuple[str | None, list[Node]]] = []
    for signature in _in_order([list(each.value) for each in signed]):
        elements = [Sample(each.holds, each.value.get(signature, MISSING)) for each in signed]
        shown = next(each.value for each in elements if each.value is not MISSING)
        loop = words.loop_of(shown, inside)
        node = build(elements, words, inside | words.bound(loop) if loop else inside)
        if loop and groups and groups[-1][0] == loop:
            groups[-1][1].append(node)
        else:
            groups.append((loop, [node]))
    return Items(groups)


def _kind(value: Any) -> str:
    if value is MISSING:
        return "missing"
    if isinstance(value, dict) and value:
        return "fields"
    if isinstance(value, list) and value:
        return "items"
    return json.dumps(value)


def _split(samples: Sequence[Sample], words: Words, inside: frozenset[str]) -> If:
    best: tuple[int, str, list[Sample], list[Sample]] | None = None
    for condition in words.conditions:
        then = [each for each in samples if condition in each.holds]
        otherwise = [each for each in samples if condition not in each.holds]
        if min(len(then), len(otherwise)) < FEWEST_SAMPLES:
            continue
        mixed = sum(len({_kind(each.value) for each in half}) for half in (then, otherwise))
        if best is None or mixed < best[0]:
            best = (mixed, condition, then, otherwise)
    if best is None:
        values = sorted({_kind(each.value)[:200] for each in samples})
        raise ValueError(f"no condition tells these apart, or there are too few samples ({len(samples)}): {values}")
    _, condition, then, otherwise = best
    return If(condition, build(then, words, inside), build(otherwise, words, inside))


def _signed(elements: Iterable[Any], words: Words) -> Iterator[tuple[str, Any]]:
    """Return elements by what they are: their name, what a patch applies to, or else how they begin."""
    seen: dict[str, int] = {}
    for element in elements:
        signature = _signature(element, words)
        seen[signature] = seen.get(signature, 0) + 1
        yield f"{signature} {seen[signature]}", element


def _signature(element: Any, words: Words) -> str:
    if not isinstance(element, dict):
        return json.dumps(element)
    if "kind" in element and "metadata" in element:
        meta = element["metadata"]
        return f"{element['kind']} {meta.get('namespace')} {meta['name']}"
    if "name" in element:
        return str(element["name"])
    if "applyTo" in element:
        name = element["patch"]["value"].get("name", "")
        return f"{element['applyTo']} {name} {sorted(words.variables(element))}"
    first = next(iter(element.values()))
    return json.dumps(first if isinstance(first, dict | list) and len(element) > 1 else element)


def _in_order(lists: Iterable[Sequence[str]]) -> list[str]:
    """Merge lists into one that has all their elements, each list's in its own order."""
    after: dict[str, set[str]] = {}
    for each in {tuple(one): None for one in lists}:
        for place, name in enumerate(each):
            after.setdefault(name, set()).update(each[:place])
    merged: list[str] = []
    while len(merged) < len(after):
        ready = [name for name, before in after.items() if name not in merged and before <= set(merged)]
        if not ready:
            raise ValueError(f"their order differs: {sorted(set(after) - set(merged))}")
        merged.append(ready[0])
    return merged


@dataclass(slots=True)
class Writer:
    """Writes nodes as the lines of a template."""

    scalar: Callable[[Any], str]
    whole: Callable[[Mapping[str, Node]], str | None]  # the expression that stands for all fields of an object
    lines: list[str] = field(default_factory=list)

    def documents(self, listed: Items) -> None:
        """Write objects of their own."""
        for loop, nodes in listed.groups:
            with_loop = [f"{{{{- range {loop} }}}}"] if loop else []
            self.lines += with_loop
            for node in nodes:
                self._document(node)
            self.lines += ["{{- end }}"] * len(with_loop)

    def _document(self, node: Node) -> None:
        if isinstance(node, If):
            self._either(node, self._document, "")
        elif isinstance(node, Fields):
            self.lines.append("---")
            self._fields(node, "")

    def _fields(self, node: Fields, indent: str) -> None:
        for name, each in node.nodes.items():
            self._entry(f"{_key(name)}:", each, indent)

    def _entry(self, prefix: str, node: Node, indent: str) -> None:
        if isinstance(node, If):
            self._either(node, lambda each: self._entry(prefix, each, indent), indent)
        elif isinstance(node, Leaf):
            self.lines.append(f"{indent}{prefix} {self.scalar(node.value)}")
        elif isinstance(node, Fields) and node.nodes:
            self._object(prefix, node, indent)
        elif isinstance(node, Fields):
            self.lines.append(f"{indent}{prefix} {{}}")
        elif isinstance(node, Items):
            self.lines.append(f"{indent}{prefix}")
            self._items(node, indent + "  ")

    def _object(self, prefix: str, node: Fields, indent: str) -> None:
        inner = indent + "  "
        whole = self.whole(node.nodes)
        if whole:
            self.lines += [f"{indent}{prefix}", f"{inner}{{{{- toYaml {whole} | nindent {len(inner)} }}}}"]
            return
        place = len(self.lines)
        self._fields(node, inner)
        if prefix == "-" and not self.lines[place].lstrip().startswith("{{-"):
            self.lines[place] = f"{indent}- {self.lines[place].lstrip()}"
        else:
            self.lines.insert(place, f"{indent}{prefix}")

    def _items(self, node: Items, indent: str) -> None:
        for loop, nodes in node.groups:
            if loop:
                self.lines.append(f"{indent}{{{{- range {loop} }}}}")
            for each in nodes:
                self._entry("-", each, indent)
            if loop:
                self.lines.append(f"{indent}{{{{- end }}}}")

    def _either(self, node: If, write: Callable[[Node], None], indent: str) -> None:
        if node.then is MISSING:
            self.lines.append(f"{indent}{{{{- if not ({node.condition}) }}}}")
            write(node.otherwise)
        else:
            self.lines.append(f"{indent}{{{{- if {node.condition} }}}}")
            write(node.then)
            if node.otherwise is not MISSING:
                self.lines.append(f"{indent}{{{{- else }}}}")
                write(node.otherwise)
        self.lines.append(f"{indent}{{{{- end }}}}")


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() and not name.isdigit() else json.dumps(name)
