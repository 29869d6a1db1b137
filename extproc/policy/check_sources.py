"""The files of `kvmesh policy check`: read, judged one by one, and all of them together."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from extproc.policy.check import ERROR, WARNING, Checked, Remark, check_text, remark_of, unreadable
from extproc.policy.inference_policy import KIND
from extproc.policy.mesh_policy import MeshPolicy
from kvmesh.documents.document_files import MAX_BYTES
from kvmesh.documents.documents import Document, DocumentKey, Snapshot, document_key

SUFFIXES = frozenset({".yaml", ".yml", ".json"})  # as a `--policies` folder has them


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
            [unreadable(file, text)] if isinstance(text, str) else check_text(file, text, is_meant=is_meant)
        )
    ]
    return [each for each in _together(found, root_namespace=root_namespace, now=now) if each.is_policy]


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
        result[place] = checked.also([Remark(level=ERROR, message=message, line=checked.line)])
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
                result[place] = result[place].also([remark_of(level, message, node)])
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
