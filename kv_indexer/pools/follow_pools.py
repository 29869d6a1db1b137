"""Use case: keep the indexer in step with the pools: whom to ask, whom to scrape, which endpoints to answer for.

Called by the service with each new set of pools. A pod is asked from the moment it is ready (before that nothing
listens there) until it has left its pool; one that becomes another pool's is asked anew, and its follower is started
anew with what it answers (`share_streams`). Decides nothing about streams.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from operator import is_
from typing import Protocol

from kv_indexer.pools.members import Member, Membership, is_other_feed, membership
from kvmesh.documents.pools import Pool

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
