"""`kvmesh policy check`: what is wrong or doubtful in one document, with the line of it.

A policy may be a custom resource, its `spec` alone, or a section of it: the forms that `--policy`, `--priorities` and
`--models` take.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from extproc.errors import ConfigError
from extproc.policy.inference_extension import read_model_rewrite, read_objective
from extproc.policy.inference_policy import (
    API_VERSION,
    FORMER_FIELDS,
    KIND,
    TOP_LEVEL,
    InferencePolicy,
    parse_inference_policy,
    read_settings,
)
from extproc.policy.priority import Priorities
from extproc.policy.reading import PolicyDocumentError, child, nearest
from extproc.policy.resource import name_of
from extproc.policy.schema import kind_of
from extproc.policy.spec import Models, Spec
from extproc.policy.warnings import warnings
from extproc.policy.yaml_lines import document_nodes, first_line, items_of, line_of
from kvmesh.documents.document_files import DocumentFileError, all_values, read_document
from kvmesh.documents.document_kinds import MESH_KINDS, OWN_GROUP
from kvmesh.documents.documents import Document, document_key

ERROR, WARNING, NOTE = "error", "warning", "note"
READERS: Mapping[str, Callable[[Document], object]] = {
    KIND: parse_inference_policy,
    "InferenceObjective": read_objective,
    "InferenceModelRewrite": read_model_rewrite,
}
OUR_KINDS = frozenset(kind.kind for kind in MESH_KINDS)
SECTIONS = {"priorities": frozenset(kind_of(Priorities).properties), "models": frozenset(kind_of(Models).properties)}
FIELDS = frozenset(kind_of(Spec).properties)
LINE = re.compile(r"line (\d+)")  # in the message of a text that is no YAML
PATH = re.compile(r"(?:spec|metadata)(?:\.[A-Za-z][-\w]*|\[[^\]]*\])*(?=: )")  # that a message begins with
TAKEN = (
    "taken as {what} of an InferencePolicy, the form of {flag}; a cluster or a --policies folder needs the custom "
    "resource: --resource prints it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """One thing to say of a document."""

    level: str  # error, warning, note
    message: str
    line: int  # in its file; 0: not known
    path: str = ""  # of the field


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One document, or what stands where one should be."""

    file: str
    line: int = 0  # where it begins
    name: str = ""  # "Kind namespace/name"
    remarks: tuple[Remark, ...] = ()
    document: Document | None = None  # as the picker has it; None: it has none
    node: yaml.Node | None = field(default=None, compare=False, repr=False)

    @property
    def is_policy(self) -> bool:
        """Whether it is to be shown: pools and routes are only there for the policies."""
        return self.document is None or self.document["kind"] in READERS

    @property
    def is_wrong(self) -> bool:
        """Whether the picker would refuse it."""
        return any(remark.level == ERROR for remark in self.remarks)

    def also(self, remarks: Sequence[Remark]) -> "Checked":
        """Return it with more remarks."""
        return replace(self, remarks=(*self.remarks, *remarks))

    def shown(self) -> dict[str, Any]:
        """Return the JSON of it."""
        of: dict[str, list[str]] = {level: [] for level in (ERROR, WARNING, NOTE)}
        for remark in self.remarks:
            of[remark.level].append(remark.message)
        return {
            "file": self.file,
            "line": self.line,
            "document": self.name,
            "error": "; ".join(of[ERROR]),
            "warnings": of[WARNING],
            "notes": of[NOTE],
            "findings": [
                {"level": each.level, "line": each.line, "path": each.path, "message": each.message}
                for each in self.remarks
            ],
        }


def check_text(file: str, text: bytes, *, is_meant: bool = True) -> list[Checked]:
    """Return what is to be said of each document of a text by itself, pools and routes among them.

    `is_meant`: what is neither a document nor a policy is an error, and not only doubtful.
    """
    try:
        values = all_values(text)
    except DocumentFileError as error:
        return [unreadable(file, str(error))]
    nodes = document_nodes(text)
    pairs = [pair for value, node in zip(values, nodes, strict=True) for pair in _items(value, node)]
    stem = name_of(Path(file).stem)
    names = [stem if len(pairs) == 1 else f"{stem}-{place}" for place in range(1, len(pairs) + 1)]
    odd = ERROR if is_meant else WARNING
    found = (_check_value(file, value, node, name, odd) for (value, node), name in zip(pairs, names, strict=True))
    return [checked for checked in found if checked is not None]


def unreadable(file: str, message: str) -> Checked:
    """Return what is to be said of a file that cannot be read, or not as YAML."""
    place = LINE.search(message)
    line = int(place[1]) if place else 0
    return Checked(file=file, line=line, remarks=(Remark(level=ERROR, message=message, line=line),))


def _items(value: Any, node: yaml.Node) -> Iterator[tuple[Any, yaml.Node]]:
    if isinstance(value, Mapping) and value.get("kind") == "List" and isinstance(value.get("items"), list):
        for item, place in zip(value["items"], items_of(node, len(value["items"])), strict=True):
            yield from _items(item, place)
    else:
        yield value, node


def _check_value(file: str, value: Any, node: yaml.Node, own_name: str, odd: str) -> Checked | None:
    """`own_name`: what a policy is called that has no name itself. `odd`: the level of what is no policy at all."""
    line = first_line(node)

    def refused(message: str, level: str) -> Checked:
        return Checked(file=file, line=line, remarks=(Remark(level=level, message=message, line=line),))

    if not isinstance(value, Mapping):
        return refused("must be a mapping: a document, or the fields of a policy's spec", odd)
    if "apiVersion" not in value and "kind" not in value and _has_fields(value):
        return _check_fields(file, value, node, own_name)
    if "apiVersion" not in value and "kind" not in value:
        word = str(next(iter(value)))
        close = nearest(word, FIELDS)
        return refused(f"neither a document (apiVersion, kind) nor fields of a policy: {word}{close}", odd)
    if str(value.get("kind")) not in OUR_KINDS and not str(value.get("apiVersion")).startswith(f"{OWN_GROUP}/"):
        return None  # of another's concern, such as a Deployment
    try:
        documents = read_document(dict(value), where="this document")
    except DocumentFileError as error:
        return refused(str(error), ERROR)
    lost = list(_lost_fields(value, node)) if value.get("kind") == KIND else []
    return next((_check_document(file, document, node).also(lost) for document in documents), None)


def _lost_fields(value: Mapping[str, Any], node: yaml.Node) -> Iterator[Remark]:
    """Yield what is beside the `spec` of a policy and no part of a document: a folder and the API drop it."""
    for name in value:
        if name not in TOP_LEVEL:
            place = child("", name).lstrip(".")
            hint = "; it belongs into `spec`" if name in FIELDS else nearest(name, TOP_LEVEL)
            yield remark_of(WARNING, f"{place}: unknown field beside `spec`, which is dropped{hint}", node, path=place)


def _check_document(file: str, document: Document, node: yaml.Node) -> Checked:
    name = str(document_key(document))
    checked = Checked(file=file, line=first_line(node), name=name, document=document, node=node)
    return checked.also(_remarks(document, node))


def _remarks(document: Document, node: yaml.Node, *, below: str = "") -> list[Remark]:
    """`below`: the path that the node itself has, where the text gives less than the whole document."""
    reader = READERS.get(document["kind"])
    if reader is None:
        return []
    try:
        read = reader(document)
    except PolicyDocumentError as error:
        return [remark_of(ERROR, str(error), node, path=error.path, below=below)]
    except ConfigError as error:
        return [remark_of(ERROR, str(error), node, below=below)]
    doubtful = warnings(read) if isinstance(read, InferencePolicy) else []
    return [remark_of(WARNING, words, node, below=below) for words in doubtful]


def remark_of(level: str, message: str, node: yaml.Node, *, path: str = "", below: str = "") -> Remark:
    """Return a remark with the line of its path, by default of the one that the message begins with."""
    if not path and (begins := PATH.match(message)):
        path = begins[0]
    return Remark(level=level, message=message, line=line_of(node, path.removeprefix(below)), path=path)


# --- a policy without its envelope -----------------------------------------------------------------------------------


def _has_fields(value: Mapping[str, Any]) -> bool:
    """Tell whether a mapping is meant as a policy: at least half of its names are those of fields, in either format."""
    known = FIELDS | FORMER_FIELDS | {"spec", "metadata"}
    return 2 * sum(name in known for name in value) >= len(value) or any(map(_is_section(value), SECTIONS))


def _is_section(value: Mapping[str, Any]) -> Callable[[str], bool]:
    return lambda section: bool(value) and SECTIONS[section].issuperset(value)


def _check_fields(file: str, value: Mapping[str, Any], node: yaml.Node, own_name: str) -> Checked:
    line, below, spec = first_line(node), "spec", dict(value)
    what, flag = "`spec`", "--policy"
    section = next(filter(_is_section(value), SECTIONS), None)
    if "spec" in value and set(value) <= {"spec", "metadata"}:
        below, spec = "", value["spec"]
    elif section is not None and not FIELDS.issuperset(value):
        below, spec, what, flag = f"spec.{section}", {section: spec}, f"`spec.{section}`", f"--{section}"
    named = value.get("metadata")
    metadata = named if isinstance(named, Mapping) and named.get("name") else {"name": own_name}
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": dict(metadata), "spec": spec}
    note = Remark(level=NOTE, message=TAKEN.format(what=what, flag=flag), line=line)
    remarks: list[Remark]
    try:
        read_settings(spec)
        remarks = _remarks(document, node, below=below)
    except PolicyDocumentError as error:
        remarks = [remark_of(ERROR, str(error), node, path=error.path, below=below)]
    name = str(document_key(document)) if not any(each.level == ERROR for each in remarks) else f"{KIND} {own_name}"
    return Checked(file=file, line=line, name=name, document=document, node=node, remarks=(*remarks, note))
