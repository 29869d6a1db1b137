"""One watch: which events a client sees from where it begins, in the order in which things changed. No HTTP here."""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.kube_api.calls import Call
from tests.kube_api.errors import Document, bad_request, expired
from tests.kube_api.listing import selection, too_large
from tests.kube_api.registry import Resource
from tests.kube_api.selectors import Predicate
from tests.kube_api.store import Event, Store
from tests.kube_api.writing import in_version


@dataclass(slots=True, kw_only=True)
class Watch:
    """Where a client's watch stands. `ended` once the client was told that it must list again."""

    resource: Resource
    holds: Predicate
    revision: int
    bookmarks: bool
    initial: list[Document]
    initial_bookmark: bool = False
    bookmark_asked: bool = False
    ended: bool = False

    def take(self, store: Store) -> Iterator[Document]:
        """The watch events since the last call."""
        for document in self.initial:
            yield self._event("ADDED", document)
        self.initial = []
        if self.initial_bookmark:
            self.initial_bookmark = False
            yield self.bookmark(annotations={"k8s.io/initial-events-end": "true"})
        events = store.since(self.resource.key, self.revision)
        if events is None:
            self.ended = True
            text = f"too old resource version: {self.revision} ({store.compacted})"
            yield {"type": "ERROR", "object": expired(text).status()}
            return
        for event in events:
            self.revision = event.revision
            seen = self._seen(event)
            if seen is not None:
                yield seen
        # other resources' changes move the revision of a bookmark too, as in etcd's progress notifications
        self.revision = max(self.revision, store.revision)
        if self.bookmark_asked:
            self.bookmark_asked = False
            yield self.bookmark()

    def _seen(self, event: Event) -> Document | None:
        """An object that begins or ceases to fit the selectors is ADDED or DELETED for this client."""
        before = event.previous is not None and self.holds(event.previous)
        after = event.type != "DELETED" and self.holds(event.document)
        if after:
            return self._event("MODIFIED" if before else "ADDED", event.document)
        if not before:
            return None
        if event.type == "DELETED" or event.previous is None:
            return self._event("DELETED", event.document)
        metadata = {**event.previous["metadata"], "resourceVersion": str(event.revision)}
        return self._event("DELETED", {**event.previous, "metadata": metadata})

    def _event(self, kind: str, document: Document) -> Document:
        return {"type": kind, "object": in_version(self.resource, document)}

    def bookmark(self, annotations: dict[str, str] | None = None) -> Document:
        metadata: Document = {"resourceVersion": str(self.revision), "creationTimestamp": None}
        if annotations:
            metadata["annotations"] = annotations
        named = {"kind": self.resource.kind, "apiVersion": self.resource.api_version}
        return {"type": "BOOKMARK", "object": {**named, "metadata": metadata}}


def open_watch(call: Call, store: Store) -> Watch:
    """Without a resourceVersion, or from "0", it begins with all objects that there are."""
    given = call.query.get("resourceVersion") or "0"
    if not given.isdigit():
        raise bad_request(f"Invalid value: {given!r}: strconv.ParseUint: parsing {given!r}: invalid syntax")
    streamed = call.flag("sendInitialEvents")
    if int(given) > store.revision:
        raise too_large(int(given), store)
    from_all = given == "0" or streamed
    holds = selection(call)
    objects = store.objects(call.resource.key)
    return Watch(
        resource=call.resource,
        holds=holds,
        revision=store.revision if from_all else int(given),
        bookmarks=call.flag("allowWatchBookmarks"),
        initial=[document for at, document in sorted(objects.items()) if holds(document)] if from_all else [],
        initial_bookmark=streamed and call.flag("allowWatchBookmarks"),
    )
