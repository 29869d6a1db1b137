"""Follows exactly the streams that are leased to this indexer, under the fence of each lease.

The lease book in Redis decides by Redis' clock which indexer gets which stream; this module starts and stops followers
to match. A follower that outlives its lease (this process was frozen, or Redis was unreachable) is harmless: Redis
refuses its writes.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol

from kv_indexer.pools.members import PodAnswer, vanished_streams
from kv_indexer.ports import IndexerTelemetry
from kvmesh.blocks.source import Claim, EventAddresses, Stream
from kvmesh.errors import IndexUnavailableError, LeaseLostError

log = logging.getLogger(__name__)

STOP_SECONDS = 1.0  # time for followers to end; less than a lease, which must be renewed meanwhile

Follow = Callable[[Claim, EventAddresses], Coroutine[Any, Any, None]]  # ends when a write was refused


class LeaseBook(Protocol):
    """Assigns each stream to one indexer; kept in Redis, judged by its clock."""

    async def tick(self, candidates: AbstractSet[Stream]) -> Mapping[Stream, Claim]:
        """Renew this indexer's heartbeat and leases, take free streams; return all streams that it now holds.

        `candidates` are the streams that it could follow. A stream unknown to the index is registered when it is taken.
        Raise IndexUnavailableError.
        """

    async def pulse(self) -> AbstractSet[str]:
        """Report this indexer alive; return the names of the silent indexers. Raise IndexUnavailableError.

        A tick does the same, but is too expensive to run as often.
        """

    async def drop(self, claim: Claim) -> None:
        """Forget a stream that its pod no longer has, and void its claims.

        Raise IndexUnavailableError, or LeaseLostError if another indexer has the stream by now.
        """

    async def release(self) -> None:
        """Give back all leases at once, because this indexer ends. Raise IndexUnavailableError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Following:
    """A running follower; it must end as soon as its claim or its addresses have changed."""

    claim: Claim
    addresses: EventAddresses
    task: asyncio.Task[None]


class StreamSharer:
    """Keeps the followers of this process in step with its leases."""

    def __init__(
        self,
        *,
        leases: LeaseBook,
        answers: Mapping[str, PodAnswer],
        streams: Callable[[], Mapping[Stream, EventAddresses]],
        telemetry: IndexerTelemetry,
        clock: Callable[[], float],
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        """`answers` are the finder's, updated in place; `streams` returns the streams in them.

        `clock` gives monotonic seconds as in the answers.
        """
        self.trouble = "not asked yet"  # why the leases could not be renewed, or ""
        self._leases = leases
        self._answers = answers
        self._streams = streams
        self._telemetry = telemetry
        self._clock = clock
        self._stop_seconds = stop_seconds
        self._followed: dict[Stream, _Following] = {}
        self._ending: dict[Stream, asyncio.Task[None]] = {}  # stopped, but not ended yet
        self._registered_at: dict[Stream, float] = {}  # when we first saw it in the registry
        self._in_step_with: tuple[object, object] | None = None  # claims and addresses that the followers match
        self._silent: AbstractSet[str] = frozenset()  # other indexers, at the last pulse

    @property
    def held(self) -> Collection[Stream]:
        """The streams that this indexer follows."""
        return self._followed.keys()

    def registered(self, streams: Collection[Stream]) -> None:
        """Note the streams that the registry has now."""
        now = self._clock()
        self._registered_at = {stream: self._registered_at.get(stream, now) for stream in streams}

    async def pulse(self) -> bool:
        """Report this indexer alive; tell whether another has just fallen silent: then a tick is due at once."""
        try:
            silent = await self._leases.pulse()
        except IndexUnavailableError as error:
            log.debug("no pulse: %s", error)
            return False
        before, self._silent = self._silent, silent
        return bool(silent - before)

    async def tick(self, group: asyncio.TaskGroup, follow: Follow) -> None:
        """Renew the leases, then start and stop followers accordingly; call it several times within a lease."""
        addresses = self._streams()
        # fast with thousands of streams: announced ones are not compared one by one
        unknown = {stream: self._registered_at[stream] for stream in self._registered_at.keys() - addresses.keys()}
        vanished = vanished_streams(self._answers, unknown)
        try:
            claims = await self._leases.tick(addresses.keys() | vanished if vanished else addresses.keys())
        except IndexUnavailableError as error:
            # followers go on: Redis refuses late writes, and a short outage costs no replay
            if not self.trouble:
                log.error("the leases cannot be renewed: %s", error)
            self.trouble = str(error)
            return
        self.trouble = ""
        if self._is_in_step(claims, addresses):
            return  # with thousands of streams, not each is compared several times per lease
        await self._stop_what_is_not_ours(claims, addresses)
        for stream, claim in claims.items():
            if stream in self._ending:
                continue  # two followers of one stream would only hinder each other
            if stream not in addresses:
                await self._drop(claim)
            elif stream not in self._followed:
                self._start(claim, addresses[stream], group, follow)
        has_ended = any(each.task.done() for each in self._followed.values())  # while others were stopped
        if not self._ending and not has_ended and self._followed.keys() == claims.keys():
            self._in_step_with = (claims, addresses)

    def _is_in_step(self, claims: Mapping[Stream, Claim], addresses: Mapping[Stream, EventAddresses]) -> bool:
        """Tell whether both are the very objects that the followers match, and no follower has ended since."""
        known, self._in_step_with = self._in_step_with, None
        if known is not None and known[0] is claims and known[1] is addresses:
            self._in_step_with = known
        return self._in_step_with is not None

    def _follower_ended(self, _: "asyncio.Task[None]") -> None:
        self._in_step_with = None

    async def release(self) -> None:
        """Let others take over at once; call it after the followers have ended: later writes are refused."""
        try:
            await self._leases.release()
        except IndexUnavailableError as error:
            log.warning("the leases are not given back, others wait until they run out: %s", error)

    def _start(self, claim: Claim, addresses: EventAddresses, group: asyncio.TaskGroup, follow: Follow) -> None:
        stream = claim.stream
        log.info("%s is ours (fence %d)", stream.name, claim.fence)
        self._telemetry.forget(stream)  # its state from before it was found, or from before we held it
        task = group.create_task(_run(follow, claim, addresses), name=f"follow-{stream.name}")
        task.add_done_callback(self._follower_ended)
        self._followed[stream] = _Following(claim=claim, addresses=addresses, task=task)

    async def _stop_what_is_not_ours(
        self, claims: Mapping[Stream, Claim], addresses: Mapping[Stream, EventAddresses]
    ) -> None:
        for stream, following in list(self._followed.items()):
            why = _why_to_stop(following, claims.get(stream), addresses.get(stream))
            if why:
                if following.task.done():
                    log.warning("%s: what was written last was refused; %s", stream.name, why)
                else:
                    log.info("%s: %s", stream.name, why)
                following.task.cancel()
                self._ending[stream] = following.task
                del self._followed[stream]
        if self._ending:
            await asyncio.wait(self._ending.values(), timeout=self._stop_seconds)
        for stream in [stream for stream, task in self._ending.items() if task.done()]:
            del self._ending[stream]
            self._telemetry.forget(stream)
        for stream in self._ending:
            log.error("%s: its follower does not end; not following it anew meanwhile", stream.name)

    async def _drop(self, claim: Claim) -> None:
        try:
            await self._leases.drop(claim)
            log.info("%s is dropped: its pod has no such rank any more", claim.stream.name)
        except (IndexUnavailableError, LeaseLostError) as error:
            log.debug("%s cannot be dropped yet: %s", claim.stream.name, error)


async def _run(follow: Follow, claim: Claim, addresses: EventAddresses) -> None:
    try:
        await follow(claim, addresses)
    except Exception:  # a defect must not end the other streams; the next tick restarts this one
        log.exception("following %s failed", claim.stream.name)


def _why_to_stop(following: _Following, claim: Claim | None, addresses: EventAddresses | None) -> str:
    if claim is None:
        return "another indexer follows it, or none may"
    if addresses is None:
        return "its pod has no such rank any more"
    if addresses is not following.addresses and addresses != following.addresses:
        return "its addresses have changed"
    if claim != following.claim:
        return f"our lease had run out; going on under fence {claim.fence}"
    return "going on" if following.task.done() else ""
