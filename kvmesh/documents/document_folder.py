"""Documents from a folder of YAML and JSON files, looked at a few times a second. A `DocumentSource`.

Looking works where inotify does not (network file systems, ConfigMaps' links), and 1,000 files take a thread few
milliseconds. `documents.folder_files` decides what the files mean.
"""

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from kvmesh.documents.document_files import MAX_BYTES, DocumentFileError, read_documents
from kvmesh.documents.document_store import DocumentStore
from kvmesh.documents.documents import DocumentProblem, Snapshot
from kvmesh.documents.folder_files import FileStamp, FolderFiles
from kvmesh.documents.snapshot_publisher import SnapshotPublisher

log = logging.getLogger(__name__)
LOOK_SECONDS = 0.25  # while something is changing
REST_SECONDS = 0.5
_SUFFIXES = (".yaml", ".yml", ".json")


class FolderSource:
    """The documents of one folder and of those in it."""

    def __init__(self, folder: Path) -> None:
        """The folder need not exist yet."""
        self._folder = folder
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
        """Look at the folder and read what has changed; True if anything did. In a thread: the disk may be slow."""
        try:
            stamps = dict(_stamps(self._folder))
        except OSError as error:
            words = f"cannot be read ({error.strerror or error}); what was known stays"
            problem = DocumentProblem(reason="folder-unreadable", where=str(self._folder), words=words)
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
                self._files.read(path, read_documents(file.read(MAX_BYTES + 1)))
        except DocumentFileError as error:
            self._files.refuse(path, str(error))
        except OSError as error:
            self._files.refuse(path, f"cannot be read ({error.strerror or error})")
        except Exception as error:  # a defect that one file meets must not end the following of all
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
    """Yield the files that count, links followed; not what begins with a dot: ConfigMaps keep their versions there."""
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
                continue  # gone since it was listed
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                continue  # a link to itself
