"""A pod's part in prefill/decode disaggregation: what NixlConnector is to a vLLM pod (0.32, pull mode).

The pod asks it at each turn of a generation that came with `kv_transfer_params`; other generations never get here.
`run` holds the side channel's connections and the loads, and lives in a task.
"""

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from podsim.core.link import LinkSettings
from podsim.core.scheduler import Generation, Scheduler
from podsim.errors import RequestRefusedError
from podsim.kv_loader import KvLoader
from podsim.kv_source import KvSource
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


class KvTransfer:
    """Both roles in one, as in vLLM: which leg a request is, its parameters say."""

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
        self._request_ids: dict[Generation, str] = {}  # of prefill legs
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
        """Open the side channel on a free port. PortInUseError."""
        await self._listener.bind(host)
        self.side_channel_host = advertised_host
        self.side_channel_port = self._listener.port

    def close(self) -> None:
        """Close the side channel."""
        self._source.close()
        self._listener.close()

    async def run(self) -> None:
        """Serve and load until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                await self._loader.send_heartbeats()
            finally:
                self._tasks = None

    def admit(self, generation: Generation, params: Mapping[str, Any], *, request_id: str, pins: bool) -> None:
        """A leg was submitted; `pins` says whether its end leaves blocks: those of an answer cut short do not stay."""
        if wants_remote_decode(params) and pins:
            generation.keeps_blocks = True
            self._request_ids[generation] = request_id
        if wants_remote_prefill(params):
            generation.loads_prompt = True
            self._loader.expect(generation, remote_prompt(params))

    def start_loads(self) -> None:
        """Begin what the step that was just planned has made room for."""
        for generation in self._scheduler.take_started_loads():
            self._loader.start(generation)

    def hand_over(self, generation: Generation) -> dict[str, Any]:
        """A prefill leg has ended: keep its blocks; returns the answer's `kv_transfer_params`."""
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
        """A generation was aborted, of whatever kind."""
        self._request_ids.pop(generation, None)
        self._loader.drop(generation)

    def reject(self, params: Mapping[str, Any]) -> None:
        """A request was refused, or its client left before an answer began: the blocks kept for it are freed."""
        if wants_remote_prefill(params):
            self._loader.give_back(remote_prompt(params))

    def render_metrics(self) -> bytes:
        """Lines for /metrics."""
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
        if self._tasks is None:  # the pod is going
            work.close()
            return
        self._tasks.create_task(work, name="podsim-kv-work")
