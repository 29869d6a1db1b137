"""The sources of documents: a folder here, and a Kubernetes API through lightkube, imported only if used.

The folder of YAML and JSON files is polled a few times per second: that works where inotify does not (network file
systems, the links of ConfigMaps), and a thread needs only a few milliseconds for 1,000 files. A file counts once two
consecutive polls find it unchanged, so that no half-written file is read. An unreadable file keeps its last good
documents.
"""

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvmesh.documents.document_files import MAX_BYTES, DocumentFileError, read_documents
from kvmesh.documents.document_kinds import MESH_KINDS, DocumentKind
from kvmesh.documents.document_store import DocumentStore, SnapshotPublisher
from kvmesh.documents.documents import (
    ClusterAccess,
    Document,
    DocumentKey,
    DocumentProblem,
    DocumentSource,
    Snapshot,
    document_key,
)

if TYPE_CHECKING:
    from kvmesh.documents.status_writer import StatusWriter

log = logging.getLogger(__name__)
LOOK_SECONDS = 0.25  # while a change is in progress
REST_SECONDS = 0.5
_SUFFIXES = (".yaml", ".yml", ".json")
FileTranslator = Callable[[str, str, Mapping[str, Any]], Document]  # path, place in the file, value


class FileStamp(NamedTuple):
    """Identifies one state of a file."""

    changed_at: int  # its own nanoseconds; never compared with a clock
    size: int
    inode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    stamp: FileStamp | None = None  # of the content read
    documents: tuple[Document, ...] = ()
    problem: DocumentProblem | None = None


@dataclass(slots=True)
class FolderFiles:
    """The files of one folder."""

    revision: int = 0  # grows whenever `documents` may have changed
    _files: dict[str, _File] = field(default_factory=dict)  # by path
    _seen: Mapping[str, FileStamp] = field(default_factory=dict)  # at the previous look
    _first: bool = True

    def look(self, stamps: Mapping[str, FileStamp]) -> list[str]:
        """Note the current files and return the ones to read: new or changed, and unchanged since the last look."""
        if stamps == self._seen and not self.restless and not self._first:
            return []
        for path in [path for path in self._files if path not in stamps and path not in self._seen]:
            del self._files[path]  # missing at two looks: not just between an editor's two steps
            self.revision += 1
        changed = [path for path, stamp in stamps.items() if self._files.get(path, _File()).stamp != stamp]
        at_rest = [path for path in changed if self._first or self._seen.get(path) == stamps[path]]
        self._seen = dict(stamps)
        self._first = False
        return sorted(at_rest)

    @property
    def restless(self) -> bool:
        """Tell whether some file has changed and is not read yet."""
        return self._seen.keys() != self._files.keys() or any(
            self._files[path].stamp != stamp for path, stamp in self._seen.items()
        )

    def read(self, path: str, documents: tuple[Document, ...]) -> None:
        """Store a file's documents; unchanged ones stay the same objects."""
        before = self._files.get(path, _File())
        if before.documents and not documents and self._seen[path].size == 0:
            self.refuse(path, "is empty; its documents stay. Delete the file to be rid of them")
            return
        known = {document_key(each): each for each in before.documents}
        kept = tuple(same if (same := known.get(document_key(each))) == each else each for each in documents)
        self._files[path] = _File(stamp=self._seen[path], documents=kept)
        self.revision += 1

    def refuse(self, path: str, message: str) -> None:
        """Note that a file is unusable; its last documents stay."""
        problem = DocumentProblem(reason="file-refused", where=path, words=message)
        before = self._files.get(path, _File())
        self._files[path] = replace(before, stamp=self._seen[path], problem=problem)
        self.revision += 1

    def documents(self) -> tuple[dict[DocumentKey, Document], tuple[DocumentProblem, ...]]:
        """Return all documents and all problems; if two documents have the same name, the first file's counts."""
        found: dict[DocumentKey, Document] = {}
        owners: dict[DocumentKey, str] = {}
        problems: list[DocumentProblem] = []
        for path in sorted(self._files):
            file = self._files[path]
            if file.problem is not None:
                problems.append(file.problem)
            for document in file.documents:
                key = document_key(document)
                if key in found:
                    message = f"{key} is in {owners[key]} already: that one counts"
                    problems.append(DocumentProblem(reason="document-twice", where=path, words=message))
                    continue
                found[key], owners[key] = document, path
        return found, tuple(problems)


class FolderSource:
    """The documents of a folder and its subfolders."""

    def __init__(self, folder: Path, *, translate: FileTranslator | None = None) -> None:
        """The folder need not exist yet. `translate` reads the policies of other systems."""
        self._folder = folder
        self._translate = translate
        self._files = FolderFiles()
        self._store = DocumentStore(source="folder")
        self._folder_problem: DocumentProblem | None = None
        self._problems: tuple[DocumentProblem, ...] = ()
        self._looked = False

    async def run(self, on_change: Callable[[Snapshot], None]) -> None:
        """Follow the folder until cancelled."""
        publisher = SnapshotPublisher(self._snapshot, on_change)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(publisher), name="folder-looks")
            tasks.create_task(publisher.run(), name="folder-snapshots")

    async def _follow(self, publisher: SnapshotPublisher) -> None:
        while True:
            if await asyncio.to_thread(self._look):
                self._gather()
                publisher.changed()
            await asyncio.sleep(LOOK_SECONDS if self._files.restless else REST_SECONDS)

    def _look(self) -> bool:
        """Scan the folder and read changed files; True if anything changed. In a thread: the disk may be slow."""
        try:
            stamps = dict(_stamps(self._folder))
        except OSError as error:
            message = f"cannot be read ({error.strerror or error}); what was known stays"
            problem = DocumentProblem(reason="folder-unreadable", where=str(self._folder), words=message)
            changed, self._folder_problem = problem != self._folder_problem, problem
            return changed
        changed = self._folder_problem is not None or not self._looked
        self._folder_problem, self._looked = None, True
        before = self._files.revision
        for path in self._files.look(stamps):
            self._read(path)
        return changed or self._files.revision != before

    def _read(self, path: str) -> None:
        try:
            with Path(path).open("rb") as file:
                translate = self._translate and partial(self._translate, path)
                self._files.read(path, read_documents(file.read(MAX_BYTES + 1), translate=translate))
        except DocumentFileError as error:
            self._files.refuse(path, str(error))
        except OSError as error:
            self._files.refuse(path, f"cannot be read ({error.strerror or error})")
        except Exception as error:  # a defect triggered by one file must not end the watch over all
            log.exception("%s: a defect", path)
            self._files.refuse(path, f"cannot be read ({type(error).__name__})")

    def _gather(self) -> None:
        documents, problems = self._files.documents()
        self._store.replace(documents.values(), known=self._store.all_keys())
        problems = (*problems, self._folder_problem) if self._folder_problem is not None else problems
        for problem in problems:
            if problem not in self._problems:
                log.warning("%s: %s", problem.where, problem.words, extra={"reason": problem.reason})
        self._problems = problems

    def _snapshot(self) -> Snapshot | None:
        return self._store.snapshot(synced=True, problems=self._problems) if self._looked else None


def _stamps(folder: Path) -> Iterator[tuple[str, FileStamp]]:
    """Yield the relevant files, links followed; not those with a leading dot: ConfigMaps keep versions there."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    yield from _stamps(Path(entry.path))
                elif entry.name.endswith(_SUFFIXES) and entry.is_file():
                    state = entry.stat()
                    yield entry.path, FileStamp(state.st_mtime_ns, state.st_size, state.st_ino)
            except FileNotFoundError:
                continue  # deleted since it was listed
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                continue  # a link to itself


def kubernetes_source(
    access: ClusterAccess, *, kinds: Sequence[DocumentKind] = MESH_KINDS, namespaces: Sequence[str] = ()
) -> DocumentSource:
    """Return the documents of a cluster, or of some of its namespaces."""
    from kvmesh.documents.kubernetes_watch import KubernetesSource  # noqa: PLC0415 # 0.1 s and 20 MB

    return KubernetesSource(access, kinds=kinds, namespaces=namespaces)


def status_writer(
    access: ClusterAccess, *, lease_namespace: str, identity: str, lease_name: str = "kvmesh-status-writer"
) -> "StatusWriter":
    """Return a writer of policy statuses, active while it leads; `identity` is this replica's own: the pod's name."""
    from kvmesh.documents.status_writer import StatusWriter  # noqa: PLC0415

    return StatusWriter(access, lease_namespace=lease_namespace, lease_name=lease_name, identity=identity)
