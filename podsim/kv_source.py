"""The prefill side of KV transfers: blocks of ended prefill legs stay until they are fetched or their lease ends.

The KV transfer of a pod owns it; decode pods ask it over the side channel. As vLLM 0.32's NixlPullConnectorWorker.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from podsim.core.generate import prompt_seed
from podsim.core.scheduler import Generation, Scheduler
from podsim.transfer_link import TransferLink
from podsim.wire.kv_transfer import KvTransferConfig
from podsim.wire.nixl_metrics import NixlMetrics
from podsim.wire.side_channel import Heartbeat, Hello, Message, Read, Release, Reply

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Lease:
    generation: Generation
    ends_at: float  # the event loop's clock
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
        """Begin the lease of a finished prefill leg."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._config.kv_lease_duration
        timer = loop.call_at(ends_at, self._check, request_id)
        self._leases[request_id] = _Lease(generation=generation, ends_at=ends_at, timer=timer)

    def close(self) -> None:
        """Forget the leases; their timers end nothing any more."""
        for lease in self._leases.values():
            lease.timer.cancel()
        self._leases.clear()

    async def answer(self, message: Message) -> Reply:
        """What a decode pod gets for its message."""
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
        if lease.ends_at > loop.time():  # heartbeats came since the timer was set
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
    """Whether the blocks that are read have the KV of the reader's prompt, each at its place."""
    blocks = kept.blocks[read.first_block : read.first_block + len(read.block_ids)]
    return (
        blocks == list(read.block_ids)
        and kept.computed >= read.prompt_tokens
        and prompt_seed(kept.token_ids[: read.prompt_tokens], seed=0) == read.prompt_checksum
    )
