"""Connects what an indexer needs for pools beside what it needs anyway. Made by the service where it follows pools.

A source of documents, what is made of them, and one task for each pod that is asked where it publishes.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache

from kv_indexer.apply.apply_events import root_keys
from kv_indexer.apply.change_plan import RootKeys
from kv_indexer.pools.ask_members import MemberDirectory
from kv_indexer.pools.find_streams import StreamFinder
from kv_indexer.pools.follow_pools import PoolFollowing, Scrapes
from kv_indexer.pools.members import PoolFeed
from kv_indexer.pools.pace import slowdown
from kv_indexer.pools.pool_report import IndexFacts, PoolsReport, pools_report
from kv_indexer.ports import PodDirectory
from kvmesh.documents.documents import DocumentProblem, DocumentSource, Snapshot
from kvmesh.documents.pool_resolver import PoolResolver
from kvmesh.documents.pools import pool_seed

log = logging.getLogger(__name__)


class PoolParts:
    """The pools of one indexer."""

    def __init__(
        self,
        source: DocumentSource,
        *,
        finder: StreamFinder,
        scrapes: Scrapes,
        answer_for: Callable[[Collection[str]], None],
        forget: Callable[[Collection[str]], None],
    ) -> None:
        self.following = PoolFollowing(inquiries=self, scrapes=scrapes, answer_for=answer_for, forget=forget)
        self._source = source
        self._finder = finder
        self._resolver = PoolResolver()
        self._problems: tuple[DocumentProblem, ...] = ()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._directory: MemberDirectory | None = None

    def slowdown(self) -> float:
        """Return by what to multiply the time between two looks at one pod."""
        return slowdown(len(self.following.members))

    def start(self, group: asyncio.TaskGroup, pods: PodDirectory) -> None:
        """Follow the documents from now on, in tasks of this group."""
        self._group = group
        self._directory = MemberDirectory(members=self.following.members, pods=pods)
        group.create_task(self._source.run(self._take), name="watch-documents")

    def begin(self, endpoint: str) -> None:
        """See `follow_pools.Inquiries`."""
        self._stop(endpoint)
        assert self._group is not None and self._directory is not None
        self._finder.expect(endpoint)
        watch = self._finder.watch(endpoint, self._directory)
        self._tasks[endpoint] = self._group.create_task(watch, name=f"find-{endpoint}")

    def end(self, endpoint: str) -> None:
        """See `follow_pools.Inquiries`."""
        self._stop(endpoint)
        self._finder.forget(endpoint)

    def report(self, facts: IndexFacts) -> PoolsReport:
        """Return how the pools stand."""
        report = pools_report(self.following.known, facts)
        return replace(report, problems=self._problems, synced=self.following.is_known)

    def _stop(self, endpoint: str) -> None:
        task = self._tasks.pop(endpoint, None)
        if task is not None:
            task.cancel()

    def _take(self, snapshot: Snapshot) -> None:
        """Take a snapshot; one that is not complete yet must not look like pods that have gone."""
        if not snapshot.synced and not self.following.is_known:
            return
        resolved = self._resolver.resolve(snapshot.documents)
        for problem in resolved.problems:  # the source says what is wrong with it by itself
            if problem not in self._problems:
                log.error("%s: %s (%s)", problem.where, problem.words, problem.reason)
        self._problems = (*snapshot.problems, *resolved.problems)
        self.following.apply(resolved.pools.values())


def pool_roots(hash_seed: str) -> Callable[[PoolFeed], RootKeys]:
    """Return what gives the root keys of a pool's model; no two pools have any in common."""

    @cache
    def roots(pool: str, model: str) -> RootKeys:
        return root_keys(hash_seed=pool_seed(hash_seed, pool), model=model)

    return lambda feed: roots(feed.pool, feed.model)
