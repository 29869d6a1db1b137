"""Where a path of a policy is in the text that it was read from: `spec.quotas[1].tenant` -> the number of a line. Pure.

The text has been read before, strictly (`kvmesh.documents.document_files`): here it is well formed.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
STEP = re.compile(r"\.?([^.\[\]]+)|\[(\"(?:[^\"\\]|\\.)*\"|[^\]]*)\]")
NAMES = ("name", "model")  # of an item in a list, by which paths name it: classes[chat], rules[org/llama]
NULL = "tag:yaml.org,2002:null"


def document_nodes(text: bytes) -> list[yaml.Node]:
    """Return the documents of a text with the places of all that is in them, without the empty ones."""
    return [node for node in yaml.compose_all(text, Loader=_Base) if node is not None and node.tag != NULL]


def first_line(node: yaml.Node) -> int:
    """Return the line that a document begins in."""
    return int(node.start_mark.line) + 1


def items_of(node: yaml.Node, count: int) -> list[yaml.Node]:
    """Return the `count` items of a List of documents; the List in their place where `<<` has brought them there."""
    _, items = _fields(node).get("items", (node, node))
    found: list[yaml.Node] = items.value if isinstance(items, yaml.SequenceNode) else []
    return found if len(found) == count else [node] * count


def line_of(node: yaml.Node, path: str) -> int:
    """Return the line of a path, or of the nearest thing above it that is there."""
    line = first_line(node)
    for step in _steps(path):
        found = _below(node, step)
        if found is None:
            return line
        key, node = found
        line = int(key.start_mark.line) + 1
    return line


def _steps(path: str) -> Iterator[str]:
    for plain, inner in STEP.findall(path):
        yield plain or inner.strip('"')


def _below(node: yaml.Node, step: str) -> tuple[yaml.Node, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        return _fields(node).get(step)
    if isinstance(node, yaml.SequenceNode):
        if step.isdigit() and int(step) < len(node.value):
            return node.value[int(step)], node.value[int(step)]
        for item in node.value:
            fields = _fields(item)
            if any(name in fields and fields[name][1].value == step for name in NAMES):
                return item, item
    return None


def _fields(node: yaml.Node) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        return {}
    return {key.value: (key, value) for key, value in node.value if isinstance(key.value, str)}
