"""What stands around the picker in a replay: pods that compute by a few numbers, an index, a tokenizer.

The index finds of each prompt what was found when it was recorded, at every pod; the tokenizer knows its length.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from extproc.models.models import ModelTable
from extproc.pods.endpoint import EndpointModels, EndpointStatus, Reachability
from extproc.pods.endpoint_samples import TrendWatch
from extproc.policy.values import PickPolicy
from extproc.pools.picker_books import PickerBooks
from extproc.prefixes.prompt_match import LIVE, IndexHits
from extproc.prompts.token_ids import PromptTokens, TokenizedPrompt
from extproc.quotas.quota import QuotaAsk
from extproc.quotas.shared_quotas import Quotas
from extproc.records.request_events import RequestObserver
from extproc.replay_log.arrivals import Arrival
from extproc.replay_log.simulated_pod import Generation, PodPace, SimulatedPod
from extproc.replay_log.virtual_pool import VirtualPool
from extproc.requests.request import InferenceRequest
from kvmesh.blocks.source import Registry
from kvmesh.index.prefix_match import PrefixLookup

SCRAPE_SECONDS = 0.2  # as `kvmesh extproc` by default
IDLE_SECONDS = 600.0  # after which nothing is learned from pods that do nothing: a night is not replayed round by round
TOKEN_BYTES = 4
SEED = 1


class SimulatedPods:
    """All pods, their reports, and who waits for which of their answers."""

    def __init__(
        self,
        addresses: Sequence[str],
        pace: PodPace,
        *,
        models: Mapping[str, EndpointModels],
        clock: Callable[[], float],
    ) -> None:
        self.pods = {address: SimulatedPod(pace) for address in addresses}
        self.learned_adapters: Mapping[str, str] = {}
        self._models = models
        self._clock = clock
        self._trends = {address: TrendWatch() for address in addresses}
        self._statuses = {address: self._status(address) for address in addresses}
        self._end: dict[Generation, asyncio.Future[None]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._asked = asyncio.Event()

    def snapshot(self, *, now: float) -> Sequence[EndpointStatus]:  # noqa: ARG002 - reports are never too old
        """Implements `extproc.choosing.choose.Endpoints`."""
        return list(self._statuses.values())

    async def scrape(self, books: PickerBooks) -> None:
        """Have the pods report one after the other, until cancelled: real ones do not report all at once, either."""
        every, busy_at = SCRAPE_SECONDS / max(len(self.pods), 1), self._clock()
        while True:
            if self._end:
                busy_at = self._clock()
            elif self._clock() - busy_at > IDLE_SECONDS:
                self._asked.clear()
                await self._asked.wait()
                busy_at = self._clock()
            for address in self.pods:
                await asyncio.sleep(every)
                status = self._statuses[address] = self._status(address)
                assert status.load is not None, "it always reports"
                books.reported(address, status.load, status.trend)

    async def answer(self, address: str, generation: Generation) -> None:
        """Wait until a request has been answered."""
        loop, pod = asyncio.get_running_loop(), self.pods[address]
        self._asked.set()
        await asyncio.sleep(pod.pace.base_seconds)
        self._end[generation] = ended = loop.create_future()
        try:
            pod.add(generation, now=self._clock())
            self._set_timer(address)
            await ended
        finally:
            del self._end[generation]
            if generation.ended_at is None:
                pod.leave(generation)

    def _set_timer(self, address: str) -> None:
        timer, ends_at = self._timers.pop(address, None), self.pods[address].ends_at
        if timer is not None:
            timer.cancel()
        if ends_at is not None:
            self._timers[address] = asyncio.get_running_loop().call_at(ends_at, self._advance, address)

    def _advance(self, address: str) -> None:
        for generation in self.pods[address].advance(now=self._clock()):
            if (
                generation.ended_at is not None
                and (ended := self._end.get(generation)) is not None
                and not ended.done()
            ):
                ended.set_result(None)
        self._set_timer(address)

    def _status(self, address: str) -> EndpointStatus:
        load = self.pods[address].report(now=self._clock())
        return EndpointStatus(
            address=address,
            reachability=Reachability.READY,
            load=load,
            trend=self._trends[address].report(load),
            models=self._models.get(address),
        )


class SimulatedIndex:
    """Finds as much of a prompt as was found when it was recorded, at every pod; and decides quotas, as Redis does."""

    def __init__(self, arrivals: Sequence[Arrival], addresses: Sequence[str], quotas: Quotas) -> None:
        self._arrivals = arrivals
        self._addresses = tuple(addresses)
        self._states = dict.fromkeys(addresses, LIVE)
        self._sizes = dict.fromkeys(addresses, 1)
        self._quotas = quotas

    async def lookup(self, prompts: Sequence[TokenizedPrompt], *, quota: QuotaAsk | None = None, **_: Any) -> IndexHits:
        """Implements `admission.prepared_request.PrefixIndex`."""
        verdict = None
        if quota is not None:  # one picker, so that its share is all of it
            verdict = self._quotas.alone(quota, "simulated", was_done=False)
        if not prompts:
            return IndexHits(states=self._states, quota=verdict)
        arrival = self._arrivals[int.from_bytes(prompts[0].tokens[:TOKEN_BYTES], "little")]
        held = dict.fromkeys(self._addresses, arrival.cached_tokens) if arrival.cached_tokens else {}
        hits = PrefixLookup(
            matched_blocks=held,
            block_size=self._sizes,
            tiers={address: {"GPU": tokens} for address, tokens in held.items()},
            endpoints={},
            registry=Registry(version=b""),
            indexer_alive=True,
        )
        return IndexHits(prompts=(hits,), states=self._states, quota=verdict)


class SimulatedTokens:
    """Knows how long each prompt is. Its first token is the number of the request, by which the index knows it."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._arrivals = arrivals

    async def prompts(self, request: InferenceRequest, body: bytes | None, **_: Any) -> PromptTokens:  # noqa: ARG002
        """Implements `admission.prepared_request.PromptSource`."""
        number = int(request.user or 0)
        tokens = number.to_bytes(TOKEN_BYTES, "little")
        return PromptTokens(
            prompts=(TokenizedPrompt(tokens=tokens),), estimated_tokens=self._arrivals[number].prompt_tokens
        )


def simulated_pool(
    pods: SimulatedPods,
    arrivals: Sequence[Arrival],
    *,
    policy: PickPolicy,
    models: ModelTable,
    observer: RequestObserver,
    clock: Callable[[], float],
) -> VirtualPool:
    """Return a picker before simulated pods."""
    addresses = list(pods.pods)
    return VirtualPool(
        addresses,
        endpoints=pods,
        prompts=SimulatedTokens(arrivals),
        index=lambda quotas: SimulatedIndex(arrivals, addresses, quotas),
        policy=policy,
        models=models,
        clock=clock,
        seed=SEED,
        observer=observer,
    )
