"""Keeps the indexer in step with the pools: which pods to ask, which to scrape, which endpoints to answer for.

A pod is asked from the moment it is ready (before that nothing listens there) until it has left its pool. A pod that
moves to another pool is asked anew, and its follower is restarted with the answer (`share_streams`).
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from operator import is_
from typing import Protocol

from kv_indexer.apply.apply_events import root_keys
from kv_indexer.apply.change_plan import RootKeys
from kv_indexer.pools.event_sources import MemberDirectory
from kv_indexer.pools.find_streams import StreamFinder
from kv_indexer.pools.members import Member, Membership, PoolFeed, is_other_feed, membership
from kv_indexer.pools.pool_report import IndexFacts, PoolsReport, pools_report
from kv_indexer.ports import PodDirectory
from kvmesh.documents.documents import DocumentProblem, DocumentSource, Snapshot
from kvmesh.documents.pool_resolver import PoolResolver
from kvmesh.documents.pools import Pool, pool_seed

FULL_PACE_PODS = 200  # up to so many, each is looked at as often as a single one
SLOWEST = 20.0


def slowdown(pods: int) -> float:
    """Return by what to multiply the time between two looks at one pod: 1.0 up to 200 pods, 10.0 at 2,000."""
    return min(max(pods / FULL_PACE_PODS, 1.0), SLOWEST)


log = logging.getLogger(__name__)

NAMED = 3  # addresses that one log line names


class Inquiries(Protocol):
    """Asks pods where they publish, for ever."""

    def begin(self, endpoint: str) -> None:
        """Ask this pod from now on; at once, if it was asked before."""

    def end(self, endpoint: str) -> None:
        """Ask no more, and forget what it said."""


class Scrapes(Protocol):
    """Scrapes the pods' metrics."""

    def add(self, endpoint: str) -> None:
        """Scrape this pod, too."""

    def remove(self, endpoint: str) -> None:
        """Forget a pod."""


class PoolFollowing:
    """The pools as they are now."""

    def __init__(
        self,
        *,
        inquiries: Inquiries,
        scrapes: Scrapes,
        answer_for: Callable[[Collection[str]], None],
        forget: Callable[[Collection[str]], None],
    ) -> None:
        """Take `answer_for` to tell all endpoints that are ours, and `forget` for those that are no more."""
        self.members: dict[str, Member] = {}  # by address; changes in place, so that others may look at it
        self.known = Membership()
        self.is_known = False  # a first answer has come: until then nothing may be dropped from the index
        self._inquiries = inquiries
        self._scrapes = scrapes
        self._answer_for = answer_for
        self._forget = forget
        self._asked: set[str] = set()
        self._given: tuple[Pool, ...] = ()

    @property
    def asked(self) -> Collection[str]:
        """The endpoints that have been ready once."""
        return self._asked

    def pool_of(self, endpoint: str) -> str:
        """Return the pool that an endpoint is indexed for, or ''."""
        member = self.members.get(endpoint)
        return member.pool if member else ""

    def apply(self, pools: Iterable[Pool]) -> None:
        """Take the pools as they are now; what has not changed is not touched."""
        given = tuple(pools)
        if self.is_known and len(given) == len(self._given) and all(map(is_, given, self._given)):
            return  # something else has changed in the cluster
        self._given = given
        now = membership(given)
        before, self.known = self.known, now
        gone = self.members.keys() - now.members.keys()
        changed = [
            address
            for address, member in now.members.items()
            if address in self._asked and is_other_feed(self.members[address], member)
        ]
        self.members.update(now.members)
        for address in gone:
            del self.members[address]
        self._tell(before, now)
        if gone or not self.is_known or len(before.members) != len(now.members):
            self._answer_for(now.members.keys())
        self.is_known = True
        self._end(gone)
        for address in changed:
            self._inquiries.begin(address)
        self._begin(now.members)

    def _begin(self, members: Mapping[str, Member]) -> None:
        fresh = [each for each, member in members.items() if member.endpoint.ready and each not in self._asked]
        for address in fresh:
            self._asked.add(address)
            self._scrapes.add(address)
            self._inquiries.begin(address)

    def _end(self, gone: Collection[str]) -> None:
        for address in self._asked.intersection(gone):
            self._asked.remove(address)
            self._inquiries.end(address)
            self._scrapes.remove(address)
        if gone:
            self._forget(gone)

    def _tell(self, before: Membership, now: Membership) -> None:
        for line in _pool_news(before.pools, now.pools):
            log.info("%s", line)
        fresh = sorted(address for address, pools in now.shared.items() if before.shared.get(address) != pools)
        if fresh:
            named = "; ".join(f"{each} in {', '.join(now.shared[each])}" for each in fresh[:NAMED])
            log.error(
                "%d endpoints are in several pools and indexed for the first alone, the others see none of their "
                "blocks: %s%s",
                len(fresh),
                named,
                "; …" if len(fresh) > NAMED else "",
            )


def _pool_news(before: Mapping[str, Pool], now: Mapping[str, Pool]) -> Iterator[str]:
    for name in now.keys() - before.keys():
        pool = now[name]
        yield f"{pool.kind} {name}: {len(pool.endpoints)} endpoints, model {pool.model or 'as its pods say'}"
    for name in before.keys() - now.keys():
        yield f"{before[name].kind} {name} is gone"
    for name in now.keys() & before.keys():
        if now[name].model != before[name].model:
            yield f"{now[name].kind} {name}: its model is now {now[name].model or 'what its pods say'}"


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
