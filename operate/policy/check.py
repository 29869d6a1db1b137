"""`kvmesh policy check`: reads and merges the policies of files as a picker does, and shows its findings with lines.

A policy may be a custom resource or only its `spec`: the forms of `--policy`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.table import Table
from rich.text import Text

from extproc.policy.inference_policy import API_VERSION, KIND, TOP_LEVEL
from extproc.policy.reading import child, nearest
from extproc.policy.resource import name_of, resource_text
from extproc.policy.schema import kind_of
from extproc.policy.spec import Spec
from extproc.reach.mesh_policy import MeshPolicy, MeshState
from extproc.reach.outcomes import OBJECTIVE, REWRITE
from extproc.translation.translated import translated
from extproc.translation.translation import Note, Translation
from kvmesh.documents.document_files import MAX_BYTES, DocumentFileError, all_values, read_document
from kvmesh.documents.document_kinds import MESH_KINDS, OWN_GROUP, is_foreign_policy
from kvmesh.documents.documents import Document, DocumentKey, Snapshot, document_key
from kvmesh.output.forms import people_console
from kvmesh.plain_text import printable

ERROR, WARNING, NOTE = "error", "warning", "note"
SUFFIXES = frozenset({".yaml", ".yml", ".json"})  # as in a `--policies` folder
SHOWN_KINDS = frozenset({KIND, OBJECTIVE, REWRITE})  # pools and routes only serve to judge these
OUR_KINDS = frozenset(kind.kind for kind in MESH_KINDS)
FIELDS = frozenset(kind_of(Spec).properties)
LINE = re.compile(r"line (\d+)")  # in a YAML parser's error message
PATH = re.compile(r"[A-Za-z]\w*(?:\.[A-Za-z][-\w]*|\[[^\]]*\])*(?=: )")  # at the start of a message
TAKEN = (
    "taken as `spec` of an InferencePolicy, the form of --policy; a cluster or a --policies folder needs the custom "
    "resource: --resource prints it"
)
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
STEP = re.compile(r"\.?([^.\[\]]+)|\[(\"(?:[^\"\\]|\\.)*\"|[^\]]*)\]")
NAMES = ("name", "model", "type")  # fields that identify a list item in a path: classes[chat], rules[org/llama]
NULL = "tag:yaml.org,2002:null"


def document_nodes(text: bytes) -> list[yaml.Node]:
    """Return the non-empty documents of a text as nodes, which have line numbers."""
    return [node for node in yaml.compose_all(text, Loader=_Base) if node is not None and node.tag != NULL]


def first_line(node: yaml.Node) -> int:
    """Return the first line of a document."""
    return int(node.start_mark.line) + 1


def items_of(node: yaml.Node, count: int) -> list[yaml.Node]:
    """Return the `count` items of a List of documents, or the List itself for each if they come from a `<<` merge."""
    _, items = _fields(node).get("items", (node, node))
    found: list[yaml.Node] = items.value if isinstance(items, yaml.SequenceNode) else []
    return found if len(found) == count else [node] * count


def line_of(node: yaml.Node, path: str) -> int:
    """Return the line of a path, or of its nearest existing parent."""
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


class Remark(NamedTuple):
    """An error, warning or note on a document."""

    level: str  # error, warning, note
    message: str
    line: int  # in its file; 0 if unknown
    path: str = ""  # of the field


@dataclass(slots=True, kw_only=True)
class Checked:
    """A document, or the invalid content in its place."""

    file: str
    line: int = 0  # its first line
    remarks: list[Remark] = field(default_factory=list)
    document: Document | None = None  # as the picker reads it, or None
    node: yaml.Node | None = None
    below: str = ""  # path of the node in the document if the text holds only a part of it
    translation: Translation = field(default_factory=Translation)  # of a policy of another system

    @property
    def name(self) -> str:
        """Return "Kind namespace/name", or "" without a document."""
        return "" if self.document is None else str(document_key(self.document))

    @property
    def is_wrong(self) -> bool:
        """Whether the picker would reject it."""
        return any(remark.level == ERROR for remark in self.remarks)

    def note(self, level: str, message: str, *, path: str = "") -> None:
        """Add a remark with the line of `path`, or else of the path at the start of the message."""
        if not path and (begins := PATH.match(message)):
            path = begins[0]
        line = self.line if self.node is None else line_of(self.node, path.removeprefix(self.below))
        self.remarks.append(Remark(level, message, line, path))

    def shown(self) -> dict[str, Any]:
        """Return the fields for JSON output."""
        found, notes = ([each._asdict() for each in some] for some in (self.remarks, self.translation.notes))
        return {"file": self.file, "line": self.line, "document": self.name, "findings": found, "translation": notes}


class Source(NamedTuple):
    """A file's content, or the error when reading it."""

    file: str
    text: bytes | str  # str: the error
    is_meant: bool = True  # named by the user; a folder may contain unrelated files


def sources_of(paths: Iterable[Path], *, stdin: Callable[[], bytes]) -> Iterator[Source]:
    """Yield the files, the files in folders, and standard input for `-`."""
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
    """Return the policies of all files with a picker's findings on them, and the contents that cannot be read."""
    found = [each for source in sources for each in _documents_of(source)]
    firsts: dict[DocumentKey, Checked] = {}
    by_kind: dict[str, list[Document]] = {}
    for each in found:
        if each.document is None:
            continue
        key = document_key(each.document)
        if (first := firsts.setdefault(key, each)) is not each:
            each.remarks.append(
                Remark(ERROR, f"{key} is in {first.file}, line {first.line}, already: that one counts", each.line)
            )
        else:
            by_kind.setdefault(each.document["kind"], []).append(each.document)
    snapshot = Snapshot(documents={kind: tuple(each) for kind, each in by_kind.items()}, synced=True)
    state = MeshPolicy(root_namespace=root_namespace).update(snapshot, now=now)
    by_name = {each.name: each for each in firsts.values()}
    for where, level, message in dict.fromkeys(_findings(state)):
        if where in by_name:
            by_name[where].note(level, message)
    return [each for each in found if each.document is None or each.document["kind"] in SHOWN_KINDS]


def _findings(state: MeshState) -> Iterator[tuple[str, str, str]]:
    """Yield "Kind namespace/name", level and message of each finding; without pools, none on what policies reach."""
    for source, finding in state.settled.findings.items():
        where = f"{KIND} {source}"
        if finding.invalid:
            yield where, ERROR, finding.invalid
        reach = (*finding.missing_targets, *([finding.emptiness] if finding.emptiness else []))
        for words in (
            (*reach, *finding.warnings) if state.configs else [each for each in finding.warnings if each not in reach]
        ):
            yield where, WARNING, words
        for winner, paths in finding.conflicts.items():
            yield where, WARNING, f"{', '.join(paths)}: {winner}, of the same level, decides"
        if finding.is_lost:
            yield where, WARNING, "every field that it sets is decided by others wherever it reaches"
    for problem in state.problems:
        if not problem.where.startswith(KIND):  # a policy's problems are its findings
            yield problem.where, ERROR if problem.reason.endswith("not-valid") else WARNING, problem.words


# --- the documents of a file -----------------------------------------------------------------------------------------


def _documents_of(source: Source) -> Iterator[Checked]:
    """Yield our documents, and an error, or in a folder a warning, for content that is none and no policy."""
    file, text, is_meant = source
    try:
        if isinstance(text, str):
            raise DocumentFileError(text)
        values = all_values(text)
    except DocumentFileError as error:
        found = LINE.search(str(error))
        line = int(found[1]) if found else 0
        yield Checked(file=file, line=line, remarks=[Remark(ERROR, str(error), line)])
        return
    nodes = document_nodes(text)
    pairs = [pair for value, node in zip(values, nodes, strict=True) for pair in _items(value, node)]
    stem = name_of(Path(file).stem)
    for place, (value, node) in enumerate(pairs, 1):
        checked = Checked(file=file, line=first_line(node), node=node)
        try:
            if _read(checked, value, own_name=stem if len(pairs) == 1 else f"{stem}-{place}"):
                yield checked
        except DocumentFileError as error:
            checked.note(ERROR, str(error))
            yield checked
        except _NoPolicyError as error:
            checked.note(ERROR if is_meant else WARNING, str(error))
            yield checked


class _NoPolicyError(Exception):
    """Neither a document nor a policy."""


def _items(value: Any, node: yaml.Node) -> Iterator[tuple[Any, yaml.Node]]:
    if isinstance(value, Mapping) and value.get("kind") == "List" and isinstance(value.get("items"), list):
        for item, place in zip(value["items"], items_of(node, len(value["items"])), strict=True):
            yield from _items(item, place)
    else:
        yield value, node


def _read(checked: Checked, value: Any, *, own_name: str) -> bool:
    """Read one value, or return False for a foreign kind. Raise DocumentFileError or _NoPolicyError."""
    if not isinstance(value, Mapping):
        raise _NoPolicyError("must be a mapping: a document, or the fields of a policy's spec")
    if is_foreign_policy(value):
        value, checked.translation = translated(value, name=own_name)
    elif "apiVersion" not in value and "kind" not in value:
        value = _enveloped(checked, value, own_name)
    elif str(value.get("kind")) not in OUR_KINDS and not str(value.get("apiVersion")).startswith(f"{OWN_GROUP}/"):
        return False  # such as a Deployment
    elif value.get("kind") == KIND:
        for name in value:  # dropped by a --policies folder and by the Kubernetes API
            if name not in TOP_LEVEL:
                place = child("", name).lstrip(".")
                hint = "; it belongs into `spec`" if name in FIELDS else nearest(name, TOP_LEVEL)
                checked.note(WARNING, f"{place}: unknown field beside `spec`, which is dropped{hint}", path=place)
    checked.document = next(iter(read_document(dict(value), where="this document")), None)
    return checked.document is not None


def _enveloped(checked: Checked, value: Mapping[str, Any], own_name: str) -> Document:
    if 2 * sum(name in {*FIELDS, "spec", "metadata"} for name in value) < len(value):
        word = str(next(iter(value)))
        close = nearest(word, FIELDS)
        raise _NoPolicyError(f"neither a document (apiVersion, kind) nor fields of a policy: {word}{close}")
    spec, checked.below = dict(value), "spec"
    if "spec" in value and set(value) <= {"spec", "metadata"}:
        spec, checked.below = value["spec"], ""
    named = value.get("metadata")
    metadata = named if isinstance(named, Mapping) and named.get("name") else {"name": own_name}
    checked.remarks.append(Remark(NOTE, TAKEN, checked.line))
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": dict(metadata), "spec": spec}


# --- for people ------------------------------------------------------------------------------------------------------


def check_lines(found: Sequence[Checked]) -> Iterator[str]:
    """Yield `FILE:LINE: DOCUMENT: …` per remark, preceded by an `ok` line for documents without errors."""
    for checked in found:
        if checked.name and not checked.is_wrong:
            yield _line(checked, checked.line, "ok")
        for level, message, line, _ in checked.remarks:
            yield _line(checked, line, f"{level.upper() if level == ERROR else level} {message}")
        if checked.translation.notes:
            yield from _table(checked.translation.notes)
    if not found:
        yield "no policies in these files"


def _table(notes: Iterable[Note]) -> Iterator[str]:
    table = Table("KEY", "INFERENCEPOLICY", "DIFFERENCE", box=None, padding=(0, 2, 0, 0), header_style="")
    for key, became, difference in notes:
        table.add_row(*(Text(cell, overflow="fold") for cell in (key, "\n".join(became) or "-", difference)))
    console = people_console()
    with console.capture() as shown:
        console.print(table)
    return (printable(line.rstrip()) for line in shown.get().splitlines())


def _line(checked: Checked, line: int, words: str) -> str:
    place = f"{checked.file}:{line}" if line else checked.file
    return printable(": ".join(part for part in (place, checked.name, words) if part))


def check_resources(found: Iterable[Checked]) -> str:
    """Return the valid policies as custom resources in YAML."""
    return "---\n".join(
        resource_text(
            document.get("spec") or {},
            name=document["metadata"]["name"],
            namespace=document["metadata"].get("namespace", ""),
            head=[
                f"from {checked.file}, line {checked.line}",
                *(f"{note.key}: {note.difference}" for note in checked.translation.notes if note.difference),
            ],
            words=checked.translation.origins,
        )
        for checked in found
        if (document := checked.document) is not None and document["kind"] == KIND and not checked.is_wrong
    )
