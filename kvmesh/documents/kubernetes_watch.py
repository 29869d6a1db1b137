"""Documents from a Kubernetes API: one list and one watch for each kind and namespace, kept alive by `DocumentFeed`.

Made by `documents.cluster_sources`. Nothing that the API does stops it or empties what is known;
what is wrong is said in the log and in the snapshots' problems.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from kvmesh.documents.cluster_access import ClusterAccess
from kvmesh.documents.document_feed import DocumentFeed, FeedState
from kvmesh.documents.document_kinds import ESSENTIAL, DocumentKind
from kvmesh.documents.document_store import DocumentStore
from kvmesh.documents.documents import DocumentProblem, Snapshot
from kvmesh.documents.kubernetes_client import Connection
from kvmesh.documents.snapshot_publisher import SnapshotPublisher

log = logging.getLogger(__name__)
_PATIENCE = 5  # failures in a row after which the first snapshot no longer waits for a kind that is not essential


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
        """`namespaces`: none means all. `chance`: 0..1, spreads retries of many replicas."""
        self._access = access
        self._store = DocumentStore(source="kubernetes")
        places: Sequence[str | None] = list(dict.fromkeys(namespaces)) or [None]
        self._scopes = [(kind, place) for kind in kinds for place in places]
        self._chance = chance
        self._feeds: list[DocumentFeed] = []
        self._said: frozenset[DocumentProblem] = frozenset()
        self._is_synced = False  # once so, for good: a kind that fails later must not hold the others up

    async def run(self, on_change: Callable[[Snapshot], None]) -> None:
        """Follow the API until cancelled. Raises KubernetesConfigError at once where there is no configuration."""
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
        """Return what is known; None until every kind has been read once, or will not be soon."""
        self._is_synced = self._is_synced or all(_settled(feed) for feed in self._feeds)
        if not self._is_synced:
            return None
        problems = _problems(self._feeds)
        self._say(problems)
        missing = {feed.kind.kind for feed in self._feeds if feed.state in (FeedState.MISSING, FeedState.FORBIDDEN)}
        served = {feed.kind.kind for feed in self._feeds} - missing
        return self._store.snapshot(synced=True, problems=problems, missing_kinds=frozenset(missing - served))

    def _say(self, problems: Sequence[DocumentProblem]) -> None:
        now = frozenset(problems)
        for problem in sorted(now - self._said):
            log.warning("%s: %s", problem.where, problem.words, extra={"reason": problem.reason})
        for problem in sorted(self._said - now):
            log.info("%s: no longer true: %s", problem.where, problem.words, extra={"reason": problem.reason})
        self._said = now


def _settled(feed: DocumentFeed) -> bool:
    if feed.listed or feed.state in (FeedState.MISSING, FeedState.FORBIDDEN):
        return True
    return feed.failures >= _PATIENCE and feed.kind.kind not in ESSENTIAL


def _problems(feeds: Sequence[DocumentFeed]) -> tuple[DocumentProblem, ...]:
    """Return one problem for each thing that is wrong, however many feeds suffer from it."""
    sufferers: dict[tuple[str, str], list[str]] = {}
    for feed in feeds:
        if feed.problem is not None:
            sufferers.setdefault((feed.problem.reason, feed.problem.words), []).append(feed.name)
    return tuple(
        DocumentProblem(reason=reason, where=", ".join(names), words=words)
        for (reason, words), names in sufferers.items()
    )
