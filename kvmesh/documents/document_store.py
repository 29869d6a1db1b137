"""Holds the last known documents of a source and publishes snapshots: at once after quiet, at most four per second.

An unchanged document stays the same object, and so does the tuple of a kind without changes.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvmesh.documents.documents import Document, DocumentKey, DocumentProblem, Snapshot, document_key

log = logging.getLogger(__name__)
INTERVAL_SECONDS = 0.25


@dataclass(slots=True)
class DocumentStore:
    """The last known state of every document."""

    source: str = ""
    _documents: dict[str, dict[DocumentKey, Document]] = field(default_factory=dict)  # by kind
    _sorted: dict[str, tuple[Document, ...]] = field(default_factory=dict)  # of the kinds that have not changed since

    def put(self, document: Document) -> bool:
        """Store a document; return False if it equals the known one."""
        key = document_key(document)
        kind = self._documents.setdefault(key.kind, {})
        if kind.get(key) == document:
            return False
        kind[key] = document
        self._sorted.pop(key.kind, None)
        return True

    def remove(self, key: DocumentKey) -> bool:
        """Forget a document; return False if there was none."""
        if self._documents.get(key.kind, {}).pop(key, None) is None:
            return False
        self._sorted.pop(key.kind, None)
        return True

    def replace(self, documents: Iterable[Document], *, known: Iterable[DocumentKey]) -> bool:
        """Store all current documents in place of the `known` ones; return False if nothing differs."""
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
        """Return the keys of all documents."""
        return tuple(key for documents in self._documents.values() for key in documents)

    def snapshot(
        self, *, synced: bool, problems: tuple[DocumentProblem, ...] = (), missing_kinds: frozenset[str] = frozenset()
    ) -> Snapshot:
        """Return a snapshot of the current documents."""
        for kind, documents in self._documents.items():
            if kind not in self._sorted:
                order = sorted(documents, key=lambda key: (key.namespace, key.name, key.group))
                self._sorted[kind] = tuple(documents[key] for key in order)
        return Snapshot(
            documents=dict(self._sorted),
            synced=synced,
            problems=problems,
            source=self.source,
            missing_kinds=missing_kinds,
        )


class SnapshotPublisher:
    """Calls `on_change` with the result of `snapshot`, some time after a call of `changed` and if it differs."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot | None],
        on_change: Callable[[Snapshot], None],
        *,
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        """`snapshot` may return None if it is too early."""
        self._snapshot = snapshot
        self._on_change = on_change
        self._interval_seconds = interval_seconds
        self._dirty = asyncio.Event()
        self._last: Snapshot | None = None

    def changed(self) -> None:
        """Report a possible change; cheap, so call it as often as you like."""
        self._dirty.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            snapshot = self._snapshot()
            if snapshot is None or (self._last is not None and _same(snapshot, self._last)):
                continue
            self._last = snapshot
            try:
                self._on_change(snapshot)
            except Exception:  # a defect triggered by one document must not end the watch over all
                log.exception("documents could not be taken in; what was known stays")
            await asyncio.sleep(self._interval_seconds)


def _same(one: Snapshot, other: Snapshot) -> bool:
    """Tell whether two snapshots are equal; documents by identity, which is fast and guaranteed by the sources."""
    if (one.synced, one.problems, one.missing_kinds) != (other.synced, other.problems, other.missing_kinds):
        return False
    kinds = one.documents.keys() | other.documents.keys()
    return all(one.of(kind) is other.of(kind) for kind in kinds)
