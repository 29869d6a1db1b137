"""The objects, their revisions and the history that watches read: an etcd in memory. Stored documents never change."""

import asyncio
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from tests.kube_api.errors import Document

ResourceKey = tuple[str, str]  # (group, plural): all versions of a resource share one store
ObjectKey = tuple[str, str]  # (namespace or "", name)

HISTORY_LIMIT = 50_000  # events of one resource, as the real watch cache forgets the oldest


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One change: ADDED and MODIFIED carry the new document, DELETED the last one with the deletion's revision."""

    revision: int
    type: str
    at: ObjectKey
    document: Document
    previous: Document | None


class Store:
    """Every resource's objects, one counter of revisions for all, and what changed since the last compaction."""

    def __init__(self) -> None:
        self.revision = 1
        self.compacted = 0  # watches may begin at this revision or later
        self._objects: dict[ResourceKey, dict[ObjectKey, Document]] = {}
        self._history: dict[ResourceKey, list[Event]] = {}
        self._waiting: dict[ResourceKey, set[asyncio.Future[None]]] = {}

    def objects(self, key: ResourceKey) -> Mapping[ObjectKey, Document]:
        return self._objects.get(key, {})

    def resources(self) -> list[ResourceKey]:
        return list(self._objects)

    def get(self, key: ResourceKey, at: ObjectKey) -> Document | None:
        return self._objects.get(key, {}).get(at)

    def has_content(self, namespace: str) -> bool:
        return any(at[0] == namespace for objects in self._objects.values() for at in objects)

    def put(self, key: ResourceKey, at: ObjectKey, document: Document) -> Document:
        """Create or replace: the document is kept, with its new resourceVersion in its metadata."""
        objects = self._objects.setdefault(key, {})
        previous = objects.get(at)
        stored = self._stamped(document)
        objects[at] = stored
        self._record(key, at, "ADDED" if previous is None else "MODIFIED", stored, previous)
        return stored

    def remove(self, key: ResourceKey, at: ObjectKey) -> Document:
        previous = self._objects[key].pop(at)
        last = self._stamped(previous)
        self._record(key, at, "DELETED", last, previous)
        return last

    def _stamped(self, document: Document) -> Document:
        self.revision += 1
        return {**document, "metadata": {**document["metadata"], "resourceVersion": str(self.revision)}}

    def _record(
        self, key: ResourceKey, at: ObjectKey, kind: str, document: Document, previous: Document | None
    ) -> None:
        history = self._history.setdefault(key, [])
        history.append(Event(revision=self.revision, type=kind, at=at, document=document, previous=previous))
        if len(history) > HISTORY_LIMIT:
            self.compact(history[len(history) // 2].revision)
        self.wake(key)

    def wake(self, key: ResourceKey | None = None) -> None:
        """Let watches look: after a change, or all of them because something else happened to the server."""
        for one in list(self._waiting) if key is None else [key]:
            for waiter in self._waiting.pop(one, set()):
                if not waiter.done():
                    waiter.set_result(None)

    def waiter(self, key: ResourceKey) -> asyncio.Future[None]:
        """Done at the next change of this resource; take it before looking, or a change may be missed."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiting.setdefault(key, set())
        waiters.add(future)
        future.add_done_callback(waiters.discard)
        return future

    def since(self, key: ResourceKey, revision: int) -> list[Event] | None:
        """What changed after that revision, in order; None where that was compacted away."""
        if revision < self.compacted:
            return None
        history = self._history.get(key, [])
        return history[bisect_right(history, revision, key=lambda event: event.revision) :]

    def at_revision(self, key: ResourceKey, revision: int) -> dict[ObjectKey, Document] | None:
        """The objects as they were; None where that was compacted away."""
        events = self.since(key, revision)
        if events is None:
            return None
        objects = dict(self.objects(key))
        for event in reversed(events):
            if event.previous is None:
                objects.pop(event.at, None)
            else:
                objects[event.at] = event.previous
        return objects

    def compact(self, revision: int | None = None) -> None:
        """Forget the history up to a revision (default: all): whoever watches from before gets 410 Gone."""
        self.compacted = self.revision if revision is None else revision
        for key, history in self._history.items():
            keep = bisect_right(history, self.compacted, key=lambda event: event.revision)
            self._history[key] = history[keep:]
        self.wake()
