"""Documents from a Kubernetes API: one list and one watch for each kind and namespace, and the handling of failures.

lightkube reads pages, follows the stream and counts resource versions; `DocumentFeed` decides what each failure means.
No behaviour of the API stops the source or empties the known documents. Faults are logged and become problems of the
snapshots.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import aclosing
from enum import Enum
from typing import Any

from kvmesh.documents.document_kinds import ESSENTIAL, DocumentKind, trimmed
from kvmesh.documents.document_store import DocumentStore, SnapshotPublisher
from kvmesh.documents.documents import ClusterAccess, Document, DocumentProblem, Snapshot, document_key
from kvmesh.documents.kubernetes_client import Connection, Failure, failure_of, resource_class, watch_granted

log = logging.getLogger(__name__)
PAGE_DOCUMENTS = 500
LIST_SECONDS = 120.0  # for all pages of one kind
WATCH_SECONDS = 120  # then the server ends a watch; lightkube opens the next one at the same position
# without any event the server may hang, so the watch is opened again; bookmarks come every minute
SILENCE_SECONDS = 150.0
MISSING_SECONDS = 10.0  # between two checks for a kind that the API does not serve
FIRST_PAUSE_SECONDS = 0.2
LAST_PAUSE_SECONDS = 10.0
_TRUST = 3  # after this many consecutive failures neither our connections nor our resource version are trusted
_GONE = 410
OF_THE_API = frozenset({"api-unreachable", "api-failing", "api-unauthorized"})  # reasons that affect every kind
# After this many consecutive refusals, about 40 s, they count even if the API server does not report ready.
_STARTS = 8
_PATIENCE = 5  # after this many consecutive failures the first snapshot no longer waits for an inessential kind


class FeedState(Enum):
    """The state of one kind."""

    STARTING = "starting"
    LIVE = "live"  # a watch is open, or was at the last news
    FAILING = "failing"
    MISSING = "missing"  # the API does not serve the kind
    FORBIDDEN = "forbidden"


class DocumentFeed:
    """One kind, in one namespace or in all."""

    def __init__(
        self,
        connection: Connection,
        kind: DocumentKind,
        namespace: str | None,
        store: DocumentStore,
        changed: Callable[[], None],
        *,
        chance: Callable[[], float],
    ) -> None:
        """`namespace` None means all. `changed` is called after each change of the store, the state or the problem."""
        self.kind = kind
        self.name = kind.resource if namespace is None else f"{kind.resource} in {namespace}"
        self.state = FeedState.STARTING
        self.listed = False  # was read completely at least once
        self.failures = 0  # consecutive failures
        self._misses = 0  # trailing failures that were 404: a starting server answers so for all kinds but its own
        self._was_ready = False  # the API server reported ready after a refusal
        self.problem: DocumentProblem | None = None
        self._connection = connection
        self._resource = resource_class(kind)
        self._namespace = namespace
        self._store = store
        self._changed = changed
        self._chance = chance
        self._version: str | None = None  # version to continue the watch from; None to list first

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            try:
                if self._version is None:
                    await self._list()
                await self._watch()
            except Exception as error:  # no failure of the API may end the feed
                pause_seconds = await self._judge(failure_of(error))
            else:
                pause_seconds = FIRST_PAUSE_SECONDS
            await asyncio.sleep(pause_seconds)

    async def _list(self) -> None:
        pages = self._connection.client.list(
            self._resource, namespace=self._namespace or "*", chunk_size=PAGE_DOCUMENTS, labels=_labels(self.kind)
        )
        documents: list[Document] = []
        async with asyncio.timeout(LIST_SECONDS):
            async for document in pages:
                documents.append(trimmed(document, self.kind))
                if len(documents) % PAGE_DOCUMENTS == 0:
                    await asyncio.sleep(0)  # the picker serves requests in the same loop
        known = self._store.keys(group=self.kind.group, kind=self.kind.kind, namespace=self._namespace)
        if self._store.replace(documents, known=known) or not self.listed:
            self.listed = True
            self._changed()
        self._version = pages.resourceVersion

    async def _watch(self) -> None:
        events: Any = self._connection.client.watch(
            self._resource,
            namespace=self._namespace or "*",
            labels=_labels(self.kind),
            server_timeout=int(WATCH_SECONDS * (0.75 + 0.5 * self._chance())),
            resource_version=self._version,
        )
        loop = asyncio.get_running_loop()
        watch_granted.set(self._well)  # of this feed's task only
        try:
            async with aclosing(events), asyncio.timeout(SILENCE_SECONDS) as silence:
                async for event, document in events:
                    silence.reschedule(loop.time() + SILENCE_SECONDS)
                    self._take(event, document)
        except TimeoutError:
            log.debug("%s: nothing heard for %.0f s; watching anew", self.name, SILENCE_SECONDS)

    def _take(self, event: str, document: Document) -> None:
        version = (document.get("metadata") or {}).get("resourceVersion")
        if event in ("ADDED", "MODIFIED"):
            changed = self._store.put(trimmed(document, self.kind))
        elif event == "DELETED":
            changed = self._store.remove(document_key(trimmed(document, self.kind)))
        else:
            changed = False  # a bookmark: only its version counts
        self._version = version or self._version
        if changed:
            self._changed()

    def _well(self) -> None:
        """Note that the watch is open."""
        self.failures = self._misses = 0
        self._was_ready = False
        if self.state is not FeedState.LIVE or self.problem is not None:
            self.state = FeedState.LIVE
            self.problem = None
            self._changed()

    async def _judge(self, failure: Failure) -> float:
        """Note a failure and return the seconds to wait. Documents stay, unless their kind is gone."""
        self.failures += 1
        self._misses = self._misses + 1 if failure.code == 404 else 0
        if failure.code == _GONE:
            self._version = None  # too old: only a new list shows the missed changes
            return self._pause(failure)
        if failure.code == 404:
            return self._missing()
        is_starting = failure.code == 403 and not await self._refuses_for_good()
        state, problem = self._starting() if is_starting else self._describe(failure)
        if self.failures > 1 or state is FeedState.FORBIDDEN:  # one lost connection is normal
            self.state, self.problem = state, problem
        self._changed()
        if state is FeedState.FORBIDDEN:
            self._version = None
            return MISSING_SECONDS
        if self.failures % _TRUST == 0:
            self._version = None  # a server restored from a backup knows none of our versions
            if failure.code in (None, 401):
                await self._renew()
        return self._pause(failure)

    def _missing(self) -> float:
        """Handle a kind that is not served, either not yet, or no longer, so that its documents are gone as well."""
        self._version = None
        if self._misses >= _TRUST or not self.listed:
            self.listed = False
            known = self._store.keys(group=self.kind.group, kind=self.kind.kind, namespace=self._namespace)
            gone = self._store.replace((), known=known)
            if gone:
                log.warning("%s: no longer served by the API; %d documents dropped", self.name, len(known))
            if gone or self.state is not FeedState.MISSING:
                self.state, self.problem = FeedState.MISSING, None
                self._changed()
        return MISSING_SECONDS * (0.75 + 0.5 * self._chance())

    async def _refuses_for_good(self) -> bool:
        """Tell whether a refusal came from a server that was ready before, or that never reports ready."""
        was_ready, self._was_ready = self._was_ready, not await self._connection.is_starting()
        return was_ready or self.failures >= _STARTS

    def _starting(self) -> tuple[FeedState, DocumentProblem]:
        words = f"the Kubernetes API refuses all (403) while it starts; {self._kept}"
        return FeedState.FAILING, self._problem("api-failing", words)

    @property
    def _kept(self) -> str:
        return "what was known stays" if self.listed else "nothing is known of it yet"

    def _describe(self, failure: Failure) -> tuple[FeedState, DocumentProblem]:
        kept = self._kept
        if failure.code == 403:
            where = "in all namespaces, or name those that we may read" if self._namespace is None else "there"
            message = f"we may not list and watch it: give us get, list, watch {where} ({failure.message}); {kept}"
            return FeedState.FORBIDDEN, self._problem("kind-forbidden", message)
        if failure.code == 401:
            message = f"the API does not accept our credentials ({failure.message}); {kept}"
            return FeedState.FAILING, self._problem("api-unauthorized", message)
        reason = "api-unreachable" if failure.code is None else "api-failing"
        return FeedState.FAILING, self._problem(
            reason, f"the Kubernetes API does not answer ({failure.message}); {kept}"
        )

    def _problem(self, reason: str, message: str) -> DocumentProblem:
        return DocumentProblem(reason=reason, where=self.name, words=message)

    async def _renew(self) -> None:
        try:
            await self._connection.renew()
        except Exception as error:
            log.debug("%s: cannot renew the connection: %s", self.name, error)  # the feed's problem is reported already

    def _pause(self, failure: Failure) -> float:
        if failure.retry_after_seconds is not None:
            return min(60.0, failure.retry_after_seconds + self._chance())
        longest = min(LAST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * float(2 ** min(self.failures, 10)))
        return longest * (0.5 + 0.5 * self._chance())


def _labels(kind: DocumentKind) -> dict[str, Any] | None:
    return dict(kind.labels) if kind.labels else None


class KubernetesSource:
    """All documents of some kinds, of some namespaces or of the cluster. A `DocumentSource`."""

    def __init__(
        self,
        access: ClusterAccess,
        *,
        kinds: Sequence[DocumentKind],
        namespaces: Sequence[str] = (),
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`namespaces`: empty means all. `chance`: 0..1, spreads the retries of many replicas."""
        self._access = access
        self._store = DocumentStore(source="kubernetes")
        places: Sequence[str | None] = list(dict.fromkeys(namespaces)) or [None]
        self._scopes = [(kind, place) for kind in kinds for place in places]
        self._chance = chance
        self._feeds: list[DocumentFeed] = []
        self._said: dict[tuple[str, str], DocumentProblem] = {}  # by cause
        self._is_synced = False  # once true it stays so: a kind that fails later must not delay the others

    async def run(self, on_change: Callable[[Snapshot], None]) -> None:
        """Follow the API until cancelled. Raise KubernetesConfigError at once without a usable configuration."""
        connection = Connection(self._access)
        publisher = SnapshotPublisher(self._snapshot, on_change)
        self._feeds = [
            DocumentFeed(connection, kind, place, self._store, publisher.changed, chance=self._chance)
            for kind, place in self._scopes
        ]
        try:
            async with asyncio.TaskGroup() as tasks:
                for feed in self._feeds:
                    tasks.create_task(feed.run(), name=f"kubernetes-{feed.name}")
                tasks.create_task(publisher.run(), name="kubernetes-snapshots")
        finally:
            await connection.close()

    def _snapshot(self) -> Snapshot | None:
        """Return the known documents; None until every kind has been read once, or will not be read soon."""
        problems = _problems(self._feeds)
        self._say(problems)  # even before the first snapshot: it may be the cause of the delay
        self._is_synced = self._is_synced or all(_settled(feed) for feed in self._feeds)
        if not self._is_synced:
            return None
        missing = {feed.kind.kind for feed in self._feeds if feed.state in (FeedState.MISSING, FeedState.FORBIDDEN)}
        served = {feed.kind.kind for feed in self._feeds} - missing
        return self._store.snapshot(synced=True, problems=problems, missing_kinds=frozenset(missing - served))

    def _say(self, problems: Sequence[DocumentProblem]) -> None:
        """Log each cause when it appears and when it is gone, however many kinds it affects one after another."""
        now = {_cause(problem): problem for problem in problems}
        for cause in sorted(now.keys() - self._said.keys()):
            problem = now[cause]
            log.warning("%s: %s", problem.where, problem.words, extra={"reason": problem.reason})
        for cause in sorted(self._said.keys() - now.keys()):
            reason, kinds = cause
            log.info("%s: mended (%s)", kinds or "the Kubernetes API", reason, extra={"reason": reason})
        # The first report stays: later only the affected kinds and the error's words change.
        self._said = {cause: self._said.get(cause, problem) for cause, problem in now.items()}


def _cause(problem: DocumentProblem) -> tuple[str, str]:
    return problem.reason, "" if problem.reason in OF_THE_API else problem.where


def _settled(feed: DocumentFeed) -> bool:
    if feed.listed or feed.state in (FeedState.MISSING, FeedState.FORBIDDEN):
        return True
    return feed.failures >= _PATIENCE and feed.kind.kind not in ESSENTIAL


def _problems(feeds: Sequence[DocumentFeed]) -> tuple[DocumentProblem, ...]:
    sufferers: dict[tuple[str, str], list[str]] = {}
    for feed in feeds:
        if feed.problem is not None:
            sufferers.setdefault((feed.problem.reason, feed.problem.words), []).append(feed.name)
    return tuple(
        DocumentProblem(reason=reason, where=", ".join(names), words=message)
        for (reason, message), names in sufferers.items()
    )
