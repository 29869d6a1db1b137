"""`kvmesh policy check`: what is wrong or doubtful in policies, with file and line, and in all of them together.

A policy may be a custom resource, its `spec` alone, or a section of it: the forms that `--policy`, `--priorities` and
`--models` take.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from extproc.errors import ConfigError
from extproc.policy.inference_extension import read_model_rewrite, read_objective
from extproc.policy.inference_policy import (
    API_VERSION,
    FORMER_FIELDS,
    KIND,
    TOP_LEVEL,
    parse_inference_policy,
    read_settings,
)
from extproc.policy.mesh_policy import MeshPolicy
from extproc.policy.priority import Priorities
from extproc.policy.reading import PolicyDocumentError, child, nearest
from extproc.policy.resource import name_of
from extproc.policy.schema import kind_of
from extproc.policy.spec import Models, Spec
from extproc.policy.warnings import warnings
from extproc.policy.yaml_lines import document_nodes, first_line, items_of, line_of
from kvmesh.documents.document_files import MAX_BYTES, DocumentFileError, all_values, read_document
from kvmesh.documents.document_kinds import MESH_KINDS, OWN_GROUP
from kvmesh.documents.documents import Document, DocumentKey, Snapshot, document_key

ERROR, WARNING, NOTE = "error", "warning", "note"
READERS: Mapping[str, Callable[[Document], object]] = {
    KIND: parse_inference_policy,
    "InferenceObjective": read_objective,
    "InferenceModelRewrite": read_model_rewrite,
}
SUFFIXES = frozenset({".yaml", ".yml", ".json"})  # as a `--policies` folder has them
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


class Source(NamedTuple):
    """A file, or what stands for one."""

    file: str
    text: bytes | str  # or why it cannot be read
    is_meant: bool = True  # to have policies; in a folder there may be other things beside them


def sources_of(paths: Iterable[Path], *, stdin: Callable[[], bytes]) -> Iterator[Source]:
    """Yield each file, those in folders, and `-`."""
    for path in paths:
        if str(path) == "-":
            yield Source("stdin", stdin())
            continue
        is_meant = not path.is_dir()
        for file in [path] if is_meant else _files_of(path):
            try:
                with file.open("rb") as opened:
                    yield Source(str(file), opened.read(MAX_BYTES + 1), is_meant)
            except OSError as error:
                yield Source(str(file), f"cannot be read: {error.strerror}", is_meant)


def _files_of(folder: Path) -> list[Path]:
    below = (path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    return sorted(path for path in below if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def check_sources(sources: Iterable[Source], *, root_namespace: str, now: datetime) -> list[Checked]:
    """Return what is to be said of all policies in these files, each by itself and then all together."""
    found = [
        checked
        for file, text, is_meant in sources
        for checked in (
            [_unreadable(file, text)] if isinstance(text, str) else check_text(file, text, is_meant=is_meant)
        )
    ]
    return [each for each in _together(found, root_namespace=root_namespace, now=now) if each.is_policy]


def check_text(file: str, text: bytes, *, is_meant: bool = True) -> list[Checked]:
    """Return what is to be said of each document of a text by itself, pools and routes among them.

    `is_meant`: what is neither a document nor a policy is an error, and not only doubtful.
    """
    try:
        values = all_values(text)
    except DocumentFileError as error:
        return [_unreadable(file, str(error))]
    nodes = document_nodes(text)
    pairs = [pair for value, node in zip(values, nodes, strict=True) for pair in _items(value, node)]
    stem = name_of(Path(file).stem)
    names = [stem if len(pairs) == 1 else f"{stem}-{place}" for place in range(1, len(pairs) + 1)]
    odd = ERROR if is_meant else WARNING
    found = (_check_value(file, value, node, name, odd) for (value, node), name in zip(pairs, names, strict=True))
    return [checked for checked in found if checked is not None]


def _unreadable(file: str, message: str) -> Checked:
    place = LINE.search(message)
    line = int(place[1]) if place else 0
    return Checked(file=file, line=line, remarks=(Remark(level=ERROR, message=message, line=line),))


def _items(value: Any, node: yaml.Node) -> Iterator[tuple[Any, yaml.Node]]:
    if isinstance(value, Mapping) and value.get("kind") == "List" and isinstance(value.get("items"), list):
        for item, place in zip(value["items"], items_of(node), strict=True):
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
    return next((_with(_check_document(file, document, node), lost) for document in documents), None)


def _lost_fields(value: Mapping[str, Any], node: yaml.Node) -> Iterator[Remark]:
    """Yield what is beside the `spec` of a policy and no part of a document: a folder and the API drop it."""
    for name in value:
        if name not in TOP_LEVEL:
            place = child("", name).lstrip(".")
            hint = "; it belongs into `spec`" if name in FIELDS else nearest(name, TOP_LEVEL)
            yield _remark(WARNING, f"{place}: unknown field beside `spec`, which is dropped{hint}", node, path=place)


def _check_document(file: str, document: Document, node: yaml.Node) -> Checked:
    name = str(document_key(document))
    checked = Checked(file=file, line=first_line(node), name=name, document=document, node=node)
    return _with(checked, _remarks(document, node))


def _remarks(document: Document, node: yaml.Node, *, below: str = "") -> list[Remark]:
    """`below`: the path that the node itself has, where the text gives less than the whole document."""
    reader = READERS.get(document["kind"])
    if reader is None:
        return []
    try:
        read = reader(document)
    except PolicyDocumentError as error:
        return [_remark(ERROR, str(error), node, path=error.path, below=below)]
    except ConfigError as error:
        return [_remark(ERROR, str(error), node, below=below)]
    doubtful = warnings(read) if document["kind"] == KIND else []  # type: ignore[arg-type]  # its own reader's
    return [_remark(WARNING, words, node, below=below) for words in doubtful]


def _remark(level: str, message: str, node: yaml.Node, *, path: str = "", below: str = "") -> Remark:
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
        remarks = [_remark(ERROR, str(error), node, path=error.path, below=below)]
    name = str(document_key(document)) if not any(each.level == ERROR for each in remarks) else f"{KIND} {own_name}"
    return Checked(file=file, line=line, name=name, document=document, node=node, remarks=(*remarks, note))


# --- all together ----------------------------------------------------------------------------------------------------


def _together(found: Sequence[Checked], *, root_namespace: str, now: datetime) -> list[Checked]:
    """Return the same with what only all of them show: doubles, contradictions, targets that are not there."""
    places: dict[DocumentKey, int] = {}
    result = list(found)
    for place, checked in enumerate(found):
        if checked.document is None or checked.is_wrong:
            continue
        key = document_key(checked.document)
        if key not in places:
            places[key] = place
            continue
        first = found[places[key]]
        message = f"{key} is in {first.file}, line {first.line}, already: that one counts"
        result[place] = _with(checked, [Remark(level=ERROR, message=message, line=checked.line)])
    by_kind: dict[str, list[Document]] = {}
    for place in places.values():
        document = found[place].document
        assert document is not None, "those without one have no place"
        by_kind.setdefault(document["kind"], []).append(document)
    mesh = MeshPolicy(root_namespace=root_namespace)
    mesh.update(Snapshot(documents={kind: tuple(each) for kind, each in by_kind.items()}, synced=True), now=now)
    if not mesh.state.configs:
        return result  # without a pool nothing meets
    by_name = {str(key): place for key, place in places.items()}
    for where, level, message in _findings(mesh):
        place = by_name.get(where, -1)
        if place >= 0 and (node := result[place].node) is not None:
            known = {remark.message for remark in result[place].remarks}
            if message not in known:
                result[place] = _with(result[place], [_remark(level, message, node)])
    return result


def _findings(mesh: MeshPolicy) -> Iterator[tuple[str, str, str]]:
    """Yield "Kind namespace/name", the level and the words of what is to be said of each policy among the others."""
    for source, finding in mesh.state.settled.findings.items():
        where = f"{KIND} {source}"
        if finding.invalid:
            yield where, ERROR, finding.invalid
        for words in (*finding.missing_targets, *finding.warnings, *([finding.emptiness] if finding.emptiness else [])):
            yield where, WARNING, words
        for winner, paths in finding.conflicts.items():
            yield where, WARNING, f"{', '.join(paths)}: {winner}, of the same level, decides"
        if finding.is_lost:
            yield where, WARNING, "every field that it sets is decided by others wherever it reaches"
    for problem in mesh.state.problems:
        if not problem.where.startswith(KIND):
            yield problem.where, WARNING, problem.words


def _with(checked: Checked, remarks: Sequence[Remark]) -> Checked:
    return replace(checked, remarks=(*checked.remarks, *remarks))
