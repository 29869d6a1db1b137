"""What a folder's files mean over time: which are worth reading, whose documents count, what is wrong. Pure.

A file counts when it looks the same twice, so that none is read while it is being written, and one that cannot be read
keeps the documents that it had. Fed by `documents.document_folder`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvmesh.documents.documents import Document, DocumentKey, DocumentProblem, document_key


class FileStamp(NamedTuple):
    """What tells one state of a file from another."""

    changed_at: int  # its own nanoseconds; never compared with a clock
    size: int
    inode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    stamp: FileStamp | None = None  # of what was read
    documents: tuple[Document, ...] = ()
    problem: DocumentProblem | None = None


@dataclass(slots=True)
class FolderFiles:
    """The files of one folder."""

    revision: int = 0  # grows whenever `documents` may say something else
    _files: dict[str, _File] = field(default_factory=dict)  # by path
    _seen: Mapping[str, FileStamp] = field(default_factory=dict)  # at the look before
    _first: bool = True

    def look(self, stamps: Mapping[str, FileStamp]) -> list[str]:
        """Take note of what is there and return the files to read: new or changed, and at rest since the last look."""
        if stamps == self._seen and not self.restless and not self._first:
            return []
        for path in [path for path in self._files if path not in stamps and path not in self._seen]:
            del self._files[path]  # gone at two looks: not just between an editor's two steps
            self.revision += 1
        changed = [path for path, stamp in stamps.items() if self._files.get(path, _File()).stamp != stamp]
        at_rest = [path for path in changed if self._first or self._seen.get(path) == stamps[path]]
        self._seen = dict(stamps)
        self._first = False
        return sorted(at_rest)

    @property
    def restless(self) -> bool:
        """Tell whether some file has changed and not been read yet."""
        return self._seen.keys() != self._files.keys() or any(
            self._files[path].stamp != stamp for path, stamp in self._seen.items()
        )

    def read(self, path: str, documents: tuple[Document, ...]) -> None:
        """Take in what a file says; documents that have not changed stay the same objects."""
        before = self._files.get(path, _File())
        if before.documents and not documents and self._seen[path].size == 0:
            self.refuse(path, "is empty; its documents stay. Delete the file to be rid of them")
            return
        known = {document_key(each): each for each in before.documents}
        kept = tuple(same if (same := known.get(document_key(each))) == each else each for each in documents)
        self._files[path] = _File(stamp=self._seen[path], documents=kept)
        self.revision += 1

    def refuse(self, path: str, words: str) -> None:
        """Note that a file is no use; the documents that it had stay."""
        problem = DocumentProblem(reason="file-refused", where=path, words=words)
        before = self._files.get(path, _File())
        self._files[path] = replace(before, stamp=self._seen[path], problem=problem)
        self.revision += 1

    def documents(self) -> tuple[dict[DocumentKey, Document], tuple[DocumentProblem, ...]]:
        """Return all documents and all problems; of two documents of one name, the first file's counts."""
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
                    words = f"{key} is in {owners[key]} already: that one counts"
                    problems.append(DocumentProblem(reason="document-twice", where=path, words=words))
                    continue
                found[key], owners[key] = document, path
        return found, tuple(problems)
