"""Reads YAML and JSON files into documents: all of a file or none, with the place of the fault. Pure.

Stricter than YAML: no duplicate keys, only text as keys, no dates (a timestamp stays text, as in the API), and nothing
that JSON cannot express.
"""

import re
from collections.abc import Callable, Hashable, Mapping
from math import isfinite
from typing import Any, ClassVar

import yaml

from kvmesh.documents.document_fields import FieldError, mapping_at, text_at
from kvmesh.documents.document_kinds import MESH_KINDS, OWN_GROUP, is_foreign_policy, kind_of, trimmed
from kvmesh.documents.documents import Document

MAX_BYTES = 4 * 1024 * 1024
_MAX_NODES = 200_000  # aliases can make a small file large
_MAX_DEPTH = 64
Translator = Callable[[str, Mapping[str, Any]], Document]  # place in the file, value
_LARGEST_NUMBER = 2**63 - 1  # the API's limit
_HARMLESS_BYTES = 2000  # a file of this size has no more levels than that, which no stack minds
_NAME = re.compile(r"[A-Za-z0-9._:-]{0,253}")  # a slash would make one pool's name another's
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times as fast


class DocumentFileError(ValueError):
    """A file cannot be used; the message says where and why."""


class _Loader(_Base):  # type: ignore[misc]
    """Reads YAML as the API server would."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in _Base.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            name = getattr(key, "value", None)
            if isinstance(name, str) and name != "<<" and name in seen:
                raise DocumentFileError(f"line {key.start_mark.line + 1}: {name!r} is there twice")
            seen.add(name if isinstance(name, str) else id(key))
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def _checked(tag: str) -> Callable[[Any, yaml.Node], Any]:
    construct = _Base.yaml_constructors[tag]

    def checked(loader: Any, node: yaml.Node) -> Any:
        try:
            return construct(loader, node)
        except (KeyError, IndexError, AttributeError, ValueError):
            kind = tag.rpartition(":")[2]
            message = f"line {node.start_mark.line + 1}: {str(node.value)[:40]!r} cannot be read as {kind}"
            raise DocumentFileError(message) from None

    return checked


for _tag in ("bool", "int", "float", "timestamp"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _checked(f"tag:yaml.org,2002:{_tag}"))


def read_documents(text: bytes, *, translate: Translator | None = None) -> tuple[Document, ...]:
    """Return the documents of our kinds in a file, trimmed; others are left out.

    `translate` reads the policies of other systems; their place is "", or "-1", "-2" … in a file of several values.
    Raise DocumentFileError for invalid YAML, for documents without kind or name, for unknown versions of our kinds, and
    for unknown kinds of our group.
    """
    values, found = all_values(text), list[Document]()
    for place, value in enumerate(values, 1):
        if not is_foreign_policy(value):
            found += read_document(value, where=f"document {place}")
        elif translate is not None:
            found.append(translate(f"-{place}" if len(values) > 1 else "", value))
    return tuple(found)


def read_document(value: Any, *, where: str) -> tuple[Document, ...]:
    """Do the same as `read_documents` for a file with this one value; a list of documents gives several."""
    return tuple(found for each in _unpacked(value, where) if (found := _of_our_kinds(each)) is not None)


def all_values(text: bytes) -> list[Any]:
    """Return each document of a file as plain values, whatever it holds; empty ones are left out."""
    if len(text) > MAX_BYTES:
        raise DocumentFileError(f"is {len(text)} bytes long; at most {MAX_BYTES} are read")
    try:
        if len(text) > _HARMLESS_BYTES:
            _check_size(text)
        # still a SafeLoader: it makes only plain values
        loaded = [each for each in yaml.load_all(text, Loader=_Loader) if each is not None]
    except yaml.YAMLError as error:
        raise DocumentFileError(_mistake(error)) from None
    except DocumentFileError:
        raise
    except (ValueError, RecursionError, OverflowError) as error:
        raise DocumentFileError(str(error) or type(error).__name__) from None
    budget = [_MAX_NODES]
    return [_plain(each, f"document {place + 1}", budget, 0) for place, each in enumerate(loaded)]


def _check_size(text: bytes) -> None:
    """Refuse deep nesting before any recursion: libyaml's loader would crash the process."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MAX_DEPTH or count > _MAX_NODES:
            line = f"line {event.start_mark.line + 1}" if event.start_mark is not None else "somewhere"
            raise DocumentFileError(f"{line}: too deep or too large")


def _unpacked(document: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(document, dict):
        raise DocumentFileError(f"{where}: must be a mapping with apiVersion, kind, metadata, spec")
    if document.get("kind") == "List" and isinstance(document.get("items"), list):
        items = enumerate(document["items"])
        return [each for place, item in items for each in _unpacked(item, f"{where}, items[{place}]")]
    try:
        for field in ("apiVersion", "kind", "metadata.name"):
            if not text_at(document, field):
                raise FieldError(field, "is missing")
        for field in ("metadata.name", "metadata.namespace"):
            if not _NAME.fullmatch(text_at(document, field)):
                raise FieldError(field, "may have letters, digits and . - _ : only")
        mapping_at(document, "spec")
    except FieldError as error:
        raise DocumentFileError(f"{where}: {error}") from None
    return [document]


def _of_our_kinds(document: dict[str, Any]) -> Document | None:
    kind = kind_of(document)
    if kind is not None:
        return trimmed(document, kind)
    known = [each for each in MESH_KINDS if each.kind == document["kind"]]
    group = str(document["apiVersion"]).rpartition("/")[0]
    name = f"{document['kind']} {document['metadata']['name']}"
    if any(each.group in (group, OWN_GROUP) for each in known):  # no other group has kinds of these names
        versions = " or ".join(each.api_version for each in known)
        raise DocumentFileError(f"{name}: apiVersion {document['apiVersion']!r} is not known; {versions} is")
    if group == OWN_GROUP:
        kinds = " or ".join(each.kind for each in MESH_KINDS if each.group == OWN_GROUP)
        raise DocumentFileError(f"{name}: {OWN_GROUP} has no kind {document['kind']!r}; {kinds} is one")
    return None


def _plain(value: Any, where: str, budget: list[int], depth: int) -> Any:
    """Copy values that JSON can express, and refuse others; aliases become copies, so that nothing is shared."""
    budget[0] -= 1
    if budget[0] < 0 or depth > _MAX_DEPTH:
        raise DocumentFileError(f"{where}: is too large or too deep, or refers to itself")
    if isinstance(value, dict):
        return {_key(key, where): _plain(item, f"{where}, {key}", budget, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, f"{where}[{place}]", budget, depth + 1) for place, item in enumerate(value)]
    if isinstance(value, float) and not isfinite(value):
        raise DocumentFileError(f"{where}: {value} is no number that JSON knows")
    if isinstance(value, int) and not -_LARGEST_NUMBER <= value <= _LARGEST_NUMBER:
        raise DocumentFileError(f"{where}: a whole number has 64 bits at most")
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise DocumentFileError(f"{where}: a {type(value).__name__} has no meaning here")


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise DocumentFileError(f"{where}: the key {key!r} must be text; put it in quotes")
    return key


def _mistake(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark is not None else str(problem)
