"""The simulated pods without their HTTP side, in virtual time: podsim's own engine, and what a picker asks of it.

Called by `virtual`. Reports go through the text of /metrics, as real ones do.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.overload.refusable_http import Answer
from bench.overload.script import Request
from bench.perfect_index import cached_blocks
from bench.routing.one_cache import BLOCK_TOKENS
from bench.routing.plan import PodSettings
from extproc.pods.endpoint import EndpointStatus, EndpointTrend, Reachability
from extproc.pods.scrape_target import TrendWatch
from kvmesh.index.prefix_match import PrefixLookup
from kvmesh.pods.engine_metrics import parse_load
from kvmesh.pods.page_steps import at_once
from kvmesh.pods.pod_report import EndpointLoad
from podsim.core.block_hash import extend_chain
from podsim.core.events import CacheEvent
from podsim.core.generate import Limits
from podsim.core.scheduler import EngineSettings
from podsim.model_folder import ModelFolder
from podsim.pod import Pod
from podsim.pod import PodSettings as SimulatedPod

SCRAPE_SECONDS = 0.2  # as `kvmesh extproc` by default
HOP_SECONDS = 0.001  # from the gateway to a pod and back
MODEL = "tiny"

Reported = Callable[[str, EndpointLoad, EndpointTrend], None]


class _NoEvents:
    """In the publisher's place: the index of the virtual world looks into the caches."""

    def publish(self, events: Sequence[CacheEvent], *, timestamp: float) -> None: ...


class Texts:
    """The tokens of prompts, each text tokenized once."""

    def __init__(self, folder: ModelFolder) -> None:
        self.folder = folder
        self._known: dict[str, list[int]] = {}

    def tokens(self, prompt: str) -> list[int]:
        """As the pods and the picker see it."""
        if prompt not in self._known:
            self._known[prompt] = self.folder.encode(prompt, add_special_tokens=True)
        return self._known[prompt]


@dataclass(slots=True, kw_only=True)
class VirtualPods:
    """All pods of one run. `run` is their engines and the scraping of them."""

    settings: PodSettings
    texts: Texts
    clock: Callable[[], float]
    pods: dict[str, Pod] = field(init=False)
    statuses: dict[str, EndpointStatus] = field(default_factory=dict)
    learned_adapters: Mapping[str, str] = field(default_factory=dict)
    _trends: dict[str, TrendWatch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pods = {f"10.0.0.{number + 1}:8000": self._pod() for number in range(self.settings.pods)}
        self._trends = {address: TrendWatch() for address in self.pods}
        for address in self.pods:
            self.scrape(address)

    async def run(self, reported: Reported | None = None) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number, (address, pod) in enumerate(self.pods.items()):
                tasks.create_task(pod.run(), name=f"engine {address}")
                delay = SCRAPE_SECONDS * number / len(self.pods)  # not all at once, as real ones are not
                tasks.create_task(self._scrapes(address, delay, reported), name=f"scrape {address}")

    def empty_caches(self) -> None:
        """Forget every prompt; the pods must be idle."""
        for pod in self.pods.values():
            assert pod.reset_prefix_cache(), "no pod is at work between two loads"

    def scrape(self, address: str) -> EndpointStatus:
        """Read one pod's metrics now."""
        pod = self.pods[address]
        load = at_once(parse_load(pod.metrics.render(pod.engine_state()), reported_at=self.clock()))
        assert load is not None, "podsim reports its load"
        status = EndpointStatus(
            address=address, reachability=Reachability.READY, load=load, trend=self._trends[address].report(load)
        )
        self.statuses[address] = status
        return status

    def snapshot(self, *, now: float) -> Sequence[EndpointStatus]:  # noqa: ARG002
        """Implements `extproc.choosing.choose.Endpoints`."""
        return list(self.statuses.values())

    def cached_blocks(self, tokens: Sequence[int]) -> PrefixLookup:
        """The leading blocks of a prompt that each pod holds."""
        hashes: list[bytes] = []
        extend_chain(hashes, list(tokens), block_size=BLOCK_TOKENS, tokens=len(tokens))
        engines = {address: pod.scheduler for address, pod in self.pods.items()}
        return cached_blocks(engines, hashes, prompt_tokens=len(tokens))

    async def answer(self, address: str, request: Request, answer: Answer, *, responded: Callable[[], None]) -> None:
        """Have a pod answer; `responded` is called when its headers come, which is before the first token."""
        pod = self.pods[address]
        await asyncio.sleep(HOP_SECONDS)
        limits = Limits(max_tokens=request.answer_tokens, ignore_eos=True)
        ticket = pod.submit(list(self.texts.tokens(request.prompt)), limits, streamed=True)
        try:
            responded()
            answer.status = 200
            while not ticket.finished:
                answer.pieces = await ticket.progress(answer.pieces)
                if answer.first_at is None:
                    answer.first_at = self.clock()
            answer.prompt_tokens = ticket.generation.prompt_tokens
            answer.cached_tokens = ticket.generation.cached_tokens
            answer.done = True
        finally:
            pod.abort(ticket)

    def _pod(self) -> Pod:
        settings = self.settings
        engine = EngineSettings(
            total_blocks=settings.kv_blocks,
            max_running=settings.max_num_seqs,
            max_step_tokens=settings.max_num_batched_tokens,
            prefill_tokens_per_second=settings.prefill_tokens_per_second,
            inter_token_seconds=settings.inter_token_ms / 1000,
            stream_seconds=settings.stream_us / 1e6,
            context_token_seconds=settings.context_token_us / 1e6,
        )
        publisher: Any = _NoEvents()
        return Pod(
            SimulatedPod(model=MODEL, max_model_len=settings.max_model_len, engine=engine),
            folder=self.texts.folder,
            publisher=publisher,
            monotonic=self.clock,
            wall_clock=self.clock,
        )

    async def _scrapes(self, address: str, delay: float, reported: Reported | None) -> None:
        await asyncio.sleep(delay)
        while True:
            status = self.scrape(address)
            if reported is not None and status.load is not None:
                reported(address, status.load, status.trend)
            await asyncio.sleep(SCRAPE_SECONDS)
