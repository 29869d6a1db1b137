"""A pod's part in prefill/decode disaggregation, like NixlConnector in a vLLM pod (0.32, pull mode).

The pod calls it at each stage of a generation that came with `kv_transfer_params`, and never for other generations.
`run` runs as a task and handles the side channel's connections and the loads.

The prefill side keeps the blocks of ended prefill requests until they are read or the lease ends, as vLLM's
NixlPullConnectorWorker; decode pods send it messages over the side channel.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from podsim.core.generate import prompt_seed
from podsim.core.link import LinkSettings
from podsim.core.scheduler import Generation, Scheduler
from podsim.errors import RequestRefusedError
from podsim.kv_loader import KvLoader
from podsim.side_channel import Listener
from podsim.transfer_link import TransferLink
from podsim.wire.kv_transfer import (
    KvTransferConfig,
    prefilled_params,
    remote_prompt,
    wants_remote_decode,
    wants_remote_prefill,
)
from podsim.wire.nixl_metrics import NixlMetrics
from podsim.wire.side_channel import Heartbeat, Hello, Message, Read, Release, Reply

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Lease:
    generation: Generation
    ends_at: float  # on the event loop's clock
    timer: asyncio.TimerHandle


class KvSource:
    """The leases of one pod."""

    def __init__(
        self,
        *,
        engine_id: str,
        model: str,
        config: KvTransferConfig,
        block_bytes: int,
        link: TransferLink,
        scheduler: Scheduler,
        metrics: NixlMetrics,
        on_free: Callable[[], None],
    ) -> None:
        self._engine_id = engine_id
        self._model = model
        self._config = config
        self._block_bytes = block_bytes
        self._link = link
        self._scheduler = scheduler
        self._metrics = metrics
        self._on_free = on_free
        self._leases: dict[str, _Lease] = {}

    def keep(self, generation: Generation, request_id: str) -> None:
        """Start the lease of a finished prefill request."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._config.kv_lease_duration
        timer = loop.call_at(ends_at, self._check, request_id)
        self._leases[request_id] = _Lease(generation=generation, ends_at=ends_at, timer=timer)

    def close(self) -> None:
        """Forget the leases, so that their timers do nothing."""
        for lease in self._leases.values():
            lease.timer.cancel()
        self._leases.clear()

    async def answer(self, message: Message) -> Reply:
        """Return the reply to a decode pod's message."""
        if message.engine_id != self._engine_id:
            return Reply(
                error=f"Remote NIXL agent engine ID mismatch. Expected {message.engine_id}, received {self._engine_id}."
            )
        match message:
            case Hello():
                return self._greet(message)
            case Read():
                return await self._send(message)
            case Release():
                return Reply(valid=self._release(message.request_id))
            case Heartbeat():
                self._renew(message)
                return Reply()

    def _greet(self, hello: Hello) -> Reply:
        theirs = (hello.model, hello.block_size)
        ours = (self._model, self._scheduler.settings.block_size)
        if theirs != ours:
            return Reply(
                error="NIXL compatibility hash mismatch. Prefill and decode instances have incompatible "
                f"configurations: (model, block size) is {theirs} there, {ours} here."
            )
        return Reply()

    async def _send(self, read: Read) -> Reply:
        lease = self._leases.get(read.request_id)
        valid = lease is not None and _holds(lease.generation, read)
        await self._link.carry(len(read.block_ids) * self._block_bytes)
        return Reply(valid=valid)

    def _release(self, request_id: str) -> bool:
        lease = self._leases.pop(request_id, None)
        if lease is None:
            self._metrics.late_notifications += 1
            log.error(
                "Potentially invalid KV blocks for unrecognized request %s were retrieved by a decode worker. "
                "They may have expired.",
                request_id,
            )
            return False
        lease.timer.cancel()
        self._free(lease)
        return True

    def _renew(self, heartbeat: Heartbeat) -> None:
        ends_at = asyncio.get_running_loop().time() + self._config.renewal_seconds
        for request_id in heartbeat.request_ids:
            if lease := self._leases.get(request_id):
                lease.ends_at = max(lease.ends_at, ends_at)

    def _check(self, request_id: str) -> None:
        lease = self._leases[request_id]
        loop = asyncio.get_running_loop()
        if lease.ends_at > loop.time():  # heartbeats have extended it since the timer was set
            lease.timer = loop.call_at(lease.ends_at, self._check, request_id)
            return
        del self._leases[request_id]
        self._metrics.expired_leases += 1
        log.warning("Releasing expired KV blocks for request %s: no decode pod has fetched them.", request_id)
        self._free(lease)

    def _free(self, lease: _Lease) -> None:
        self._scheduler.release_kept(lease.generation)
        self._on_free()


def _holds(kept: Generation, read: Read) -> bool:
    """Tell whether the requested blocks hold the KV of the reader's prompt, each at its position."""
    blocks = kept.blocks[read.first_block : read.first_block + len(read.block_ids)]
    return (
        blocks == list(read.block_ids)
        and kept.computed >= read.prompt_tokens
        and prompt_seed(kept.token_ids[: read.prompt_tokens], seed=0) == read.prompt_checksum
    )


class KvTransfer:
    """Handles prefill and decode requests, as vLLM's connector does; a request's parameters tell which it is."""

    def __init__(
        self,
        config: KvTransferConfig,
        link_settings: LinkSettings,
        *,
        model: str,
        metric_labels: str,
        scheduler: Scheduler,
        on_change: Callable[[], None],
        on_failed: Callable[[Generation, RequestRefusedError], None],
    ) -> None:
        self.engine_id = config.engine_id or str(uuid.uuid4())
        self.metrics = NixlMetrics(labels=metric_labels)
        self.side_channel_host, self.side_channel_port = "", 0
        self._config = config
        self._scheduler = scheduler
        self._tasks: asyncio.TaskGroup | None = None
        self._request_ids: dict[Generation, str] = {}  # of prefill requests
        link = TransferLink(link_settings.bytes_per_second)
        self._source = KvSource(
            engine_id=self.engine_id,
            model=model,
            config=config,
            block_bytes=link_settings.bytes_per_token * scheduler.settings.block_size,
            link=link,
            scheduler=scheduler,
            metrics=self.metrics,
            on_free=on_change,
        )
        self._listener = Listener(self._source.answer, spawn=self._spawn)
        self._loader = KvLoader(
            engine_id=self.engine_id,
            model=model,
            config=config,
            link_settings=link_settings,
            link=link,
            scheduler=scheduler,
            metrics=self.metrics,
            spawn=self._spawn,
            on_loaded=on_change,
            on_failed=on_failed,
        )

    async def listen(self, host: str, *, advertised_host: str) -> None:
        """Open the side channel on a free port; raise PortInUseError if that fails."""
        await self._listener.bind(host)
        self.side_channel_host = advertised_host
        self.side_channel_port = self._listener.port

    def close(self) -> None:
        """Close the side channel."""
        self._source.close()
        self._listener.close()

    async def run(self) -> None:
        """Answer other pods and load prompts until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                await self._loader.send_heartbeats()
            finally:
                self._tasks = None

    def admit(self, generation: Generation, params: Mapping[str, Any], *, request_id: str, pins: bool) -> None:
        """Register a submitted generation; `pins` is false if its answer is cut short and its blocks are not kept."""
        if wants_remote_decode(params) and pins:
            generation.keeps_blocks = True
            self._request_ids[generation] = request_id
        if wants_remote_prefill(params):
            generation.loads_prompt = True
            self._loader.expect(generation, remote_prompt(params))

    def start_loads(self) -> None:
        """Start the loads that the step just planned has made room for."""
        for generation in self._scheduler.take_started_loads():
            self._loader.start(generation)

    def hand_over(self, generation: Generation) -> dict[str, Any]:
        """Keep the blocks of an ended prefill request and return the `kv_transfer_params` for its answer."""
        request_id = self._request_ids.pop(generation)
        self._source.keep(generation, request_id)
        return prefilled_params(
            block_ids=generation.blocks,
            engine_id=self.engine_id,
            request_id=request_id,
            host=self.side_channel_host,
            port=self.side_channel_port,
            tokens=generation.computed,
            cached_tokens=generation.cached_tokens if generation.produced == 1 else None,
        )

    def abort(self, generation: Generation) -> None:
        """Clean up after any aborted generation."""
        self._request_ids.pop(generation, None)
        self._loader.drop(generation)

    def reject(self, params: Mapping[str, Any]) -> None:
        """Free the blocks kept for a request that was refused, or whose client left before the answer began."""
        if wants_remote_prefill(params):
            self._loader.give_back(remote_prompt(params))

    def render_metrics(self) -> bytes:
        """Return the lines for /metrics."""
        if not self._config.shows_loads:
            return self.metrics.render(None)
        scheduler = self._scheduler
        return self.metrics.render(
            {
                "waiting_to_start": scheduler.waiting_to_load(),
                "in_progress": scheduler.loading,
                "completed_waiting": scheduler.loaded,
            }
        )

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        if self._tasks is None:  # the pod is shutting down
            work.close()
            return
        self._tasks.create_task(work, name="podsim-kv-work")
