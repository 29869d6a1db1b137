"""Holds documents and makes snapshots of them; what has not changed stays the same object. Pure, for every source."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvmesh.documents.documents import Document, DocumentKey, DocumentProblem, Snapshot, document_key


@dataclass(slots=True)
class DocumentStore:
    """The last known state of every document."""

    source: str = ""
    _documents: dict[str, dict[DocumentKey, Document]] = field(default_factory=dict)  # by kind
    _sorted: dict[str, tuple[Document, ...]] = field(default_factory=dict)  # of the kinds that have not changed since

    def put(self, document: Document) -> bool:
        """Take a document in; False if it says what was known."""
        key = document_key(document)
        kind = self._documents.setdefault(key.kind, {})
        if kind.get(key) == document:
            return False
        kind[key] = document
        self._sorted.pop(key.kind, None)
        return True

    def remove(self, key: DocumentKey) -> bool:
        """Forget a document; False if there was none."""
        if self._documents.get(key.kind, {}).pop(key, None) is None:
            return False
        self._sorted.pop(key.kind, None)
        return True

    def replace(self, documents: Iterable[Document], *, known: Iterable[DocumentKey]) -> bool:
        """Take in all documents that there are, in place of those `known` so far; False if nothing differs."""
        changed = False
        gone = set(known)
        for document in documents:
            changed |= self.put(document)
            gone.discard(document_key(document))
        for key in gone:
            changed |= self.remove(key)
        return changed

    def keys(self, *, group: str, kind: str, namespace: str | None = None) -> tuple[DocumentKey, ...]:
        """Return the keys of one kind, in one namespace or (None) in all."""
        known = self._documents.get(kind, {})
        return tuple(key for key in known if key.group == group and namespace in (None, key.namespace))

    def all_keys(self) -> tuple[DocumentKey, ...]:
        """Return the keys of everything."""
        return tuple(key for documents in self._documents.values() for key in documents)

    def snapshot(
        self, *, synced: bool, problems: tuple[DocumentProblem, ...] = (), missing_kinds: frozenset[str] = frozenset()
    ) -> Snapshot:
        """Return everything as it is now."""
        return Snapshot(
            documents=self._by_kind(),
            synced=synced,
            problems=problems,
            source=self.source,
            missing_kinds=missing_kinds,
        )

    def _by_kind(self) -> Mapping[str, tuple[Document, ...]]:
        for kind, documents in self._documents.items():
            if kind not in self._sorted:
                order = sorted(documents, key=lambda key: (key.namespace, key.name, key.group))
                self._sorted[kind] = tuple(documents[key] for key in order)
        return dict(self._sorted)
