"""Keeps the indexer in step with the pools: the pods to ask and to scrape, and the indexer's own endpoints.

A pod is asked from the moment it is ready (before that nothing listens there) until it has left its pool. A pod that
moves to another pool is asked again, and its follower is restarted with the answer (`share_streams`).
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from operator import is_

from kv_indexer.apply.apply_events import root_keys
from kv_indexer.pools.event_sources import EventSourceDirectory, MemberDirectory
from kv_indexer.pools.find_streams import StreamFinder
from kv_indexer.pools.members import Member, Membership, PoolFeed, is_other_feed, membership
from kv_indexer.pools.pool_report import IndexFacts, PoolsReport, pools_report
from kvmesh.blocks.block_keys import RootKeys
from kvmesh.documents.documents import DocumentProblem, DocumentSource, Snapshot
from kvmesh.documents.pool_resolver import PoolResolver
from kvmesh.documents.pools import Pool, pool_seed

log = logging.getLogger(__name__)

FULL_PACE_PODS = 200  # up to this many, each is checked as often as a single one
SLOWEST = 20.0
MOST_ROOTS = 4096  # pairs of pool and model: pods may name any model
NAMED = 3  # addresses that one log line names


def slowdown(pods: int) -> float:
    """Return the factor on the interval between two checks of one pod: 1.0 up to 200 pods, 10.0 at 2,000.

    So a quiet fleet costs next to nothing. Published events arrive at once at any pace; only polled facts come later.
    """
    return min(max(pods / FULL_PACE_PODS, 1.0), SLOWEST)


class PoolFollower:
    """The current pools, and one task for each pod that is asked where it publishes."""

    def __init__(
        self,
        source: DocumentSource,
        *,
        finder: StreamFinder,
        scrape: Callable[[str], None],
        answer_for: Callable[[Collection[str]], None],
        forget: Callable[[Collection[str]], None],
    ) -> None:
        """`scrape` gets each new pod, `answer_for` all endpoints of the pools, `forget` the departed endpoints."""
        self.members: dict[str, Member] = {}  # by address; updated in place, so that others may read it
        self.known = Membership()
        self.is_known = False  # until the first complete answer nothing may be dropped from the index
        self.asked: set[str] = set()  # endpoints that have been ready at least once
        self._source = source
        self._finder = finder
        self._scrape = scrape
        self._answer_for = answer_for
        self._forget = forget
        self._resolver = PoolResolver()
        self._problems: tuple[DocumentProblem, ...] = ()
        self._pools: tuple[Pool, ...] = ()  # the last given ones
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._directory: MemberDirectory | None = None

    def slowdown(self) -> float:
        """Return the factor on the interval between two checks of one pod."""
        return slowdown(len(self.members))

    def pool_of(self, endpoint: str) -> str:
        """Return the pool that an endpoint is indexed for, or ''."""
        member = self.members.get(endpoint)
        return member.pool if member else ""

    def start(self, group: asyncio.TaskGroup, pods: EventSourceDirectory) -> None:
        """Follow the documents from now on, in tasks of this group."""
        self._group = group
        self._directory = MemberDirectory(members=self.members, pods=pods)
        group.create_task(self._source.run(self._take), name="watch-documents")

    def begin(self, endpoint: str) -> None:
        """Ask this pod from now on; at once if it was asked before."""
        self._stop(endpoint)
        assert self._group is not None and self._directory is not None
        self._finder.expect(endpoint)
        watch = self._finder.watch(endpoint, self._directory)
        self._tasks[endpoint] = self._group.create_task(watch, name=f"find-{endpoint}")

    def end(self, endpoint: str) -> None:
        """Stop asking, and forget the answer."""
        self._stop(endpoint)
        self._finder.forget(endpoint)

    def report(self, facts: IndexFacts) -> PoolsReport:
        """Return the state of the pools."""
        report = pools_report(self.known, facts)
        return replace(report, problems=self._problems, synced=self.is_known)

    def apply(self, pools: Iterable[Pool]) -> None:
        """Apply the current pools; unchanged ones are not touched."""
        given = tuple(pools)
        if self.is_known and len(given) == len(self._pools) and all(map(is_, given, self._pools)):
            return  # another part of the cluster has changed
        self._pools = given
        now = membership(given)
        before, self.known = self.known, now
        gone = self.members.keys() - now.members.keys()
        changed = [
            address
            for address, member in now.members.items()
            if address in self.asked and is_other_feed(self.members[address], member)
        ]
        self.members.update(now.members)
        for address in gone:
            del self.members[address]
        _log_changes(before, now)
        if gone or not self.is_known or len(before.members) != len(now.members):
            self._answer_for(now.members.keys())
        self.is_known = True
        for address in self.asked.intersection(gone):
            self.asked.remove(address)
            self.end(address)
        if gone:
            self._forget(gone)
        for address in changed:
            self.begin(address)
        for address, member in now.members.items():
            if member.endpoint.ready and address not in self.asked:
                self.asked.add(address)
                self._scrape(address)
                self.begin(address)

    def _stop(self, endpoint: str) -> None:
        task = self._tasks.pop(endpoint, None)
        if task is not None:
            task.cancel()

    def _take(self, snapshot: Snapshot) -> None:
        """Handle a snapshot; in an incomplete first one, missing pods have not left."""
        if not snapshot.synced and not self.is_known:
            return
        resolved = self._resolver.resolve(snapshot.documents)
        for problem in resolved.problems:  # the source logs its own problems
            if problem not in self._problems:
                log.error("%s: %s (%s)", problem.where, problem.words, problem.reason)
        self._problems = (*snapshot.problems, *resolved.problems)
        self.apply(resolved.pools.values())


def _log_changes(before: Membership, now: Membership) -> None:
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


def pool_roots(hash_seed: str) -> Callable[[PoolFeed], RootKeys]:
    """Return a function that gives the root keys of a pool's model; two pools never share any."""

    @lru_cache(maxsize=MOST_ROOTS)
    def roots(pool: str, model: str) -> RootKeys:
        return root_keys(hash_seed=pool_seed(hash_seed, pool), model=model)

    return lambda feed: roots(feed.pool, feed.model)
