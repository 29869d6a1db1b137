"""Use case: ask a pool's pod where it publishes, and which model its blocks belong to: a `ports.EventDirectory`.

Used by the service in place of the plain directory where pools are followed; `find_streams` does the asking.
"""

import asyncio
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from kv_indexer.pools.members import Member, PoolFeed, own_rank
from kv_indexer.ports import PodDirectory
from kvmesh.blocks.source import EventAddresses
from kvmesh.errors import FeedLostError, NoEventSourceError, UnknownModelError

QUESTIONS_AT_ONCE = 64  # a question waits for its turn, not for its deadline, when thousands of pods appear at once


class MemberDirectory:
    """Answers for those pods that are members of a pool, as they change."""

    def __init__(self, *, members: Mapping[str, Member], pods: PodDirectory, at_once: int = QUESTIONS_AT_ONCE) -> None:
        """Take `members` by address, as it changes, and `pods` to ask what no pool declares."""
        self._members = members
        self._pods = pods
        self._turns = asyncio.Semaphore(at_once)

    async def find(self, endpoint: str) -> Mapping[int, EventAddresses]:
        """See `ports.EventDirectory`; the addresses are `PoolFeed`s."""
        async with self._turns:
            member = self._member(endpoint)
            ranks = await self._ranks(member)
            model = member.model or await self._model(endpoint)
        return {
            rank: PoolFeed(events=addresses.events, replay=addresses.replay, pool=member.pool, model=model)
            for rank, addresses in ranks.items()
        }

    async def served_models(self, endpoint: str) -> AbstractSet[str]:
        """See `ports.EventDirectory`."""
        async with self._turns:
            return await self._pods.served_models(endpoint)

    def _member(self, endpoint: str) -> Member:
        member = self._members.get(endpoint)
        if member is None:
            raise FeedLostError(f"{endpoint} is in no pool any more")
        return member

    async def _ranks(self, member: Member) -> Mapping[int, EventAddresses]:
        if member.feed is not None:
            return {member.rank or 0: member.feed}
        ranks = own_rank(await self._pods.find(member.address), member)
        if not ranks:
            raise NoEventSourceError(
                f"{member.address} is port {member.rank} of its pod, which names fewer data-parallel ranks: "
                "compare the pool's targetPorts with --data-parallel-size"
            )
        return ranks

    async def _model(self, endpoint: str) -> str:
        model = await self._pods.first_model(endpoint)
        if not model:
            raise UnknownModelError(
                f"{endpoint} names no model in /v1/models: declare it on the pool (annotation kvmesh.io/model)"
            )
        return model
