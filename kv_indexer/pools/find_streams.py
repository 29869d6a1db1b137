"""Asks every configured pod repeatedly where it publishes its events; one task per endpoint.

Every indexer asks every pod, so that it could take over any stream at once. `share_streams` decides which streams it
follows. An address belongs to one endpoint: a pod that announces another's address gets nothing.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import inf
from typing import Protocol

from kv_indexer.pools.members import PodAnswer, known_streams
from kv_indexer.ports import IndexerTelemetry
from kvmesh.blocks.source import EventAddresses, SourceState, Stream
from kvmesh.errors import FeedLostError, NoEventSourceError

log = logging.getLogger(__name__)

NOT_ASKED = "not asked yet"
NAMED_MODELS, NAMED_CHARACTERS = 5, 100  # maximum that one log line names, and characters of each
DOUBLINGS = 16  # every limit is reached by then


class EventDirectory(Protocol):
    """Tells where pods publish their events."""

    async def find(self, endpoint: str) -> Mapping[int, EventAddresses]:
        """Return data-parallel rank -> addresses. Raise FeedLostError, or NoEventSourceError if there are none."""

    async def served_models(self, endpoint: str) -> AbstractSet[str]:
        """Return the model names that the pod answers to. Raise FeedLostError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryPolicy:
    """The intervals between requests to one pod."""

    well_seconds: float = 10.0  # for a healthy pod
    lost_seconds: float = 0.5  # for a pod that does not answer, or whose events are lost
    lost_a_second: float = inf  # for all such pods together


class StreamFinder:
    """Keeps each pod's last answer, which stays valid until the next one."""

    def __init__(
        self,
        *,
        endpoints: Collection[str],
        model: str,
        telemetry: IndexerTelemetry,
        is_lost: Callable[[str], bool],
        changed: Callable[[], None],
        policy: DiscoveryPolicy,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        slowdown: Callable[[], float] = lambda: 1.0,
        is_registered: Callable[[Stream], bool] = lambda _: False,
    ) -> None:
        """`is_lost` tells whether an endpoint's events are lost; `changed` is called when an answer differs.

        `is_registered` tells whether the index knows a stream: known streams have precedence. Every pod must serve
        `model`; if it is "", models are not compared. `slowdown` is a factor on the interval between requests to a
        healthy pod.
        """
        self.answers: dict[str, PodAnswer] = {}
        self.waiting = dict.fromkeys(endpoints, NOT_ASKED)  # endpoints without an answer yet -> why
        self._streams: Mapping[Stream, EventAddresses] | None = None  # in the answers; None if out of date
        self._model = model
        self._telemetry = telemetry
        self._is_lost = is_lost
        self._changed = changed
        self._policy = policy
        self._sleep = sleep
        self._clock = clock
        self._slowdown = slowdown
        self._is_registered = is_registered
        self._owners: dict[str, str] = {}  # address -> endpoint that publishes there
        self._trouble: dict[str, str] = {}  # endpoint -> the last logged message
        self._shown_lost: set[str] = set()  # endpoints without a known stream, shown as lost under their own name

    @property
    def streams(self) -> Mapping[Stream, EventAddresses]:
        """The streams in the answers; the same object until an answer changes."""
        if self._streams is None:
            self._streams = known_streams(self.answers)
        return self._streams

    async def watch(self, endpoint: str, directory: EventDirectory) -> None:
        """Ask one pod forever."""
        is_model_checked = False
        known, same = None, 0  # its last answer, and how often in a row it came
        while True:
            is_well = await self._ask(endpoint, directory)
            if is_well and self._model and not is_model_checked:
                await self._check_model(endpoint, directory)
            is_model_checked = is_well
            is_well = is_well and not self._is_lost(endpoint)
            answer = self.answers.get(endpoint)
            same = same + 1 if is_well and answer and answer.ranks == known else 0
            known = answer.ranks if answer else None
            await self._sleep(self._well_seconds(same) if is_well else self._lost_seconds())

    def _well_seconds(self, same: int) -> float:
        """Return the wait for a healthy pod: with many pods, longer after each equal answer."""
        slowdown = self._slowdown()
        return self._policy.well_seconds * slowdown * min(float(1 << min(same, DOUBLINGS)), slowdown)

    def _lost_seconds(self) -> float:
        """Return the wait for a lost pod: a single one is asked again soon, a thousand share the rate."""
        return max(self._policy.lost_seconds, len(self._trouble) / self._policy.lost_a_second)

    def expect(self, endpoint: str) -> None:
        """Note a new pod that will be asked."""
        if endpoint not in self.answers:
            self.waiting[endpoint] = NOT_ASKED

    def forget(self, endpoint: str) -> None:
        """Forget a pod that we no longer have to ask; end its `watch` first."""
        self.waiting.pop(endpoint, None)
        self._trouble.pop(endpoint, None)
        if endpoint in self._shown_lost:
            self._shown_lost.remove(endpoint)
            self._telemetry.forget(Stream(endpoint=endpoint))
        answer = self.answers.pop(endpoint, None)
        if answer is not None:
            self._give_up(endpoint, answer)
            self._news()

    async def _ask(self, endpoint: str, directory: EventDirectory) -> bool:
        asked_at = self._clock()
        try:
            answer = PodAnswer(asked_at=asked_at, ranks=await directory.find(endpoint))
            self._settle(endpoint, answer)
            self._learn(endpoint, answer)
            if self._trouble.pop(endpoint, ""):
                log.info("%s says where it publishes", endpoint)
            if endpoint in self._shown_lost:
                self._shown_lost.remove(endpoint)
                self._telemetry.forget(Stream(endpoint=endpoint))
            return True
        except FeedLostError as error:
            self._tell(endpoint, str(error), error.reason)
        except NoEventSourceError as error:
            self._learn(endpoint, PodAnswer(asked_at=asked_at, ranks={}))
            self._tell(endpoint, str(error), error.reason)
        finally:
            self.waiting.pop(endpoint, None)
        return False

    def _learn(self, endpoint: str, answer: PodAnswer) -> None:
        known = self.answers.get(endpoint)
        self.answers[endpoint] = answer
        if known is None or known.ranks != answer.ranks:
            if known is not None:
                self._give_up(endpoint, known)
            self._owners.update(dict.fromkeys(_addresses(answer), endpoint))
            self._news()

    def _give_up(self, endpoint: str, answer: PodAnswer) -> None:
        for address in _addresses(answer):
            if self._owners.get(address) == endpoint:
                del self._owners[address]

    def _settle(self, endpoint: str, answer: PodAnswer) -> None:
        """Check that no other endpoint publishes at the announced addresses. Raise NoEventSourceError if one does."""
        for rank, addresses in answer.ranks.items():
            stream = Stream(endpoint=endpoint, dp_rank=rank)
            for address in _given(addresses):
                owner = self._owners.get(address, endpoint)
                if owner == endpoint:
                    continue
                is_named = not all(each.announced for each in self.answers[owner].ranks.values())
                if is_named and not addresses.announced:
                    continue  # both are configured on purpose
                if is_named or (addresses.announced and not self._goes_before(stream, owner)):
                    raise NoEventSourceError(
                        f"{endpoint} announces its events at {address}, where {owner} publishes: give each process "
                        "ports of its own, or name the addresses in --event-sources"
                    )
                log.error("%s: %s publishes at %s, which it has announced as its own", owner, endpoint, address)
                self._learn(owner, PodAnswer(asked_at=self.answers[owner].asked_at, ranks={}))

    def _goes_before(self, stream: Stream, owner: str) -> bool:
        of_owner = (Stream(endpoint=owner, dp_rank=rank) for rank in self.answers[owner].ranks)
        return self._is_registered(stream) and not any(map(self._is_registered, of_owner))

    def _news(self) -> None:
        self._streams = None
        self._changed()

    def _tell(self, endpoint: str, message: str, reason: str) -> None:
        """Log it once; known streams show their own state."""
        if self._trouble.get(endpoint) != message:
            log.error("%s", message, extra={"endpoint": endpoint})
        self._trouble[endpoint] = message
        answer = self.answers.get(endpoint)
        if answer is None or not answer.ranks:
            self._shown_lost.add(endpoint)
            self._telemetry.state(Stream(endpoint=endpoint), state=SourceState.LOST, reason=reason)

    async def _check_model(self, endpoint: str, directory: EventDirectory) -> None:
        try:
            served = await directory.served_models(endpoint)
        except FeedLostError as error:
            log.warning(
                "cannot compare the model name with what the pod serves: %s", error, extra={"endpoint": endpoint}
            )
            return
        if self._model not in served:
            names = ", ".join(name[:NAMED_CHARACTERS] for name in sorted(served)[:NAMED_MODELS]) or "none"
            log.error("%s does not serve --model %s but %s: nothing will match", endpoint, self._model, names)


def _given(addresses: EventAddresses) -> list[str]:
    return [addresses.events, addresses.replay] if addresses.replay else [addresses.events]


def _addresses(answer: PodAnswer) -> list[str]:
    return [address for each in answer.ranks.values() for address in _given(each)]
