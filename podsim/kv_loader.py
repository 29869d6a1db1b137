"""The decode side of KV transfers: fetches the KV of prompts from the pods that computed it.

The pod's KV transfer owns it. It follows vLLM 0.32's NixlPullConnector: one handshake per engine, one read per prompt,
then a notification that frees the blocks on the other pod. Heartbeats keep the blocks there while the prompt waits
here.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field

from podsim.core.generate import prompt_seed
from podsim.core.link import LinkSettings
from podsim.core.scheduler import Generation, Scheduler, State
from podsim.errors import EngineDeadError, GenerationFailedError, PeerError, RequestRefusedError
from podsim.side_channel import Channel, connected
from podsim.transfer_link import TransferLink
from podsim.wire.kv_transfer import KvTransferConfig, LoadFailurePolicy, RemotePrompt
from podsim.wire.nixl_metrics import NixlMetrics
from podsim.wire.side_channel import Heartbeat, Hello, Read, Release

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0  # how long vLLM waits for a side channel that does not answer
_CONNECT_AGAIN_SECONDS = 0.1  # we reconnect here, as ZMQ would do by itself


@dataclass(slots=True, kw_only=True)
class _AwaitedEngine:
    """A pod that must keep blocks for us until we have read them."""

    host: str
    port: int
    request_ids: set[str] = field(default_factory=set)


class KvLoader:
    """The loads of one pod."""

    def __init__(
        self,
        *,
        engine_id: str,
        model: str,
        config: KvTransferConfig,
        link_settings: LinkSettings,
        link: TransferLink,
        scheduler: Scheduler,
        metrics: NixlMetrics,
        spawn: Callable[[Coroutine[None, None, None]], object],
        on_loaded: Callable[[], None],
        on_failed: Callable[[Generation, RequestRefusedError], None],
    ) -> None:
        self._engine_id = engine_id
        self._model = model
        self._config = config
        self._link_settings = link_settings
        self._link = link
        self._scheduler = scheduler
        self._metrics = metrics
        self._spawn = spawn
        self._on_loaded = on_loaded
        self._on_failed = on_failed
        self._prompts: dict[Generation, RemotePrompt] = {}
        self._known_engines: set[str] = set()
        self._handshakes: dict[str, asyncio.Future[bool]] = {}
        self._awaited: dict[str, _AwaitedEngine] = {}
        self._awaits = asyncio.Event()

    def expect(self, generation: Generation, prompt: RemotePrompt) -> None:
        """Note that a decode request was queued, so that heartbeats renew the lease of its blocks."""
        self._prompts[generation] = prompt
        if prompt.engine_id is None or prompt.request_id is None or prompt.host is None or prompt.port is None:
            return
        engine = self._awaited.setdefault(prompt.engine_id, _AwaitedEngine(host=prompt.host, port=prompt.port))
        engine.request_ids.add(prompt.request_id)
        self._awaits.set()

    def start(self, generation: Generation) -> None:
        """Start to fill the blocks that the generation was given."""
        prompt = self._prompts.pop(generation)
        needed = len(generation.blocks) - generation.cached_blocks
        if not prompt.block_ids or (prompt.complete and len(prompt.block_ids) < needed):
            self._stop_heartbeats(prompt)
            self._die(f"{needed} blocks are to be read of {len(prompt.block_ids)}")
            self._scheduler.fail_load(generation, recompute=False)
            self._on_failed(generation, EngineDeadError())
        elif not prompt.complete:
            # vLLM makes its scheduler wait and then loads nothing, so the request waits until its client gives up
            log.warning("Got invalid KVTransferParams: %s. This request will not utilize KVTransfer", prompt)
        else:
            self._spawn(self._load(generation, prompt))

    def drop(self, generation: Generation) -> None:
        """Forget an aborted decode request; if its load has not started, free its blocks on the other pod."""
        if (prompt := self._prompts.pop(generation, None)) is not None:
            self.give_back(prompt)

    def give_back(self, prompt: RemotePrompt) -> None:
        """Ask the other pod to free blocks that we will not read."""
        self._stop_heartbeats(prompt)
        if prompt.complete:
            self._spawn(self._notify(prompt))
        else:
            self._die("keys are missing")

    async def send_heartbeats(self) -> None:
        """Renew the leases of all waiting prompts at regular intervals, until cancelled."""
        while True:
            await self._awaits.wait()
            for engine_id, engine in self._awaited.items():
                self._spawn(self._renew(engine_id, engine))
            await asyncio.sleep(self._config.heartbeat_seconds)

    async def _load(self, generation: Generation, prompt: RemotePrompt) -> None:
        failure = "the handshake failed"
        if await self._shake_hands(prompt):
            try:
                await self._read(generation, prompt)
            except PeerError as error:
                self._metrics.failed_transfers += 1
                failure = str(error)
            else:
                failure = ""
        self._stop_heartbeats(prompt)
        if not failure:
            self._scheduler.finish_load(generation)
        else:
            log.error("NIXL transfer failure: the KV of request %s did not come: %s", prompt.request_id, failure)
            recompute = self._config.kv_load_failure_policy is LoadFailurePolicy.RECOMPUTE
            self._scheduler.fail_load(generation, recompute=recompute)
            if not recompute:
                self._on_failed(generation, GenerationFailedError())
        self._on_loaded()

    async def _read(self, generation: Generation, prompt: RemotePrompt) -> None:
        """Wait until the blocks have been read and released; raise PeerError if that fails."""
        assert prompt.engine_id is not None
        first = generation.cached_blocks
        blocks = len(generation.blocks) - first
        read = Read(
            engine_id=prompt.engine_id,
            request_id=prompt.request_id or "",
            first_block=first,
            block_ids=prompt.block_ids[-blocks:],  # the last ones, as vLLM does
            prompt_tokens=generation.prompt_tokens,
            prompt_checksum=prompt_seed(generation.token_ids[: generation.prompt_tokens], seed=0),
        )
        size = blocks * self._scheduler.settings.block_size * self._link_settings.bytes_per_token
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        async with self._channel(prompt) as channel:
            await asyncio.sleep(self._link_settings.fixed_seconds)
            carried = asyncio.create_task(self._link.carry(size), name="podsim-kv-carried")
            try:
                valid = (await channel.ask(read, seconds=None)).valid
                await carried
            finally:
                carried.cancel()
            self._metrics.transferred(seconds=loop.time() - started_at, size=size, blocks=blocks)
            released = await self._release(channel, prompt)
            if not (valid and released) and generation.state is State.LOADING:  # an aborted one uses nothing it read
                self._metrics.stale_reads += 1
                log.error("the KV read for request %s was not, or not any more, that of its prompt", prompt.request_id)

    async def _release(self, channel: Channel, prompt: RemotePrompt) -> bool:
        """Release the blocks on the other pod; return whether it still kept them."""
        assert prompt.engine_id is not None
        release = Release(engine_id=prompt.engine_id, request_id=prompt.request_id or "")
        try:
            return (await channel.ask(release)).valid
        except PeerError as error:
            self._metrics.failed_notifications += 1
            self._metrics.failed_transfers += 1
            log.error("P worker blocks will be freed after timeout: %s", error)
            return True  # the blocks were read before this

    async def _notify(self, prompt: RemotePrompt) -> None:
        if not await self._shake_hands(prompt):
            return
        try:
            async with self._channel(prompt) as channel:
                await self._release(channel, prompt)
        except PeerError as error:
            self._metrics.failed_notifications += 1
            self._metrics.failed_transfers += 1
            log.error("P worker blocks will be freed after timeout: %s", error)

    async def _shake_hands(self, prompt: RemotePrompt) -> bool:
        """Tell whether the pod answers and is the expected engine; each engine is asked only once."""
        key = prompt.engine_id or ""
        if key in self._known_engines:
            return True
        handshake = self._handshakes.get(key)
        if handshake is None:
            handshake = self._handshakes[key] = asyncio.get_running_loop().create_future()
            self._spawn(self._greet(prompt, key=key, done=handshake))
        return await handshake

    async def _greet(self, prompt: RemotePrompt, *, key: str, done: asyncio.Future[bool]) -> None:
        hello = Hello(engine_id=key, model=self._model, block_size=self._scheduler.settings.block_size)
        try:
            if key == self._engine_id:
                raise PeerError(f"Cannot register local engine {key} as remote.")
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await self._ask_until_answered(prompt, hello)
            self._known_engines.add(key)
        except (PeerError, TimeoutError) as error:
            self._metrics.failed_transfers += 1
            log.error(
                "NIXL transfer failure: handshake_setup_failed with engine %s: %s", key, str(error) or "no answer"
            )
        finally:
            del self._handshakes[key]
            if not done.done():
                done.set_result(key in self._known_engines)

    async def _ask_until_answered(self, prompt: RemotePrompt, hello: Hello) -> None:
        while True:
            channel = None
            try:
                async with self._channel(prompt) as channel:
                    await channel.ask(hello)
                    return
            except PeerError:
                if channel is not None or prompt.host is None or prompt.port is None:
                    raise
                await asyncio.sleep(_CONNECT_AGAIN_SECONDS)

    def _channel(self, prompt: RemotePrompt) -> AbstractAsyncContextManager[Channel]:
        if prompt.host is None or prompt.port is None:
            raise PeerError(f"Invalid zmq path: tcp://{prompt.host}:{prompt.port}")
        return connected(prompt.host, prompt.port)

    async def _renew(self, engine_id: str, engine: _AwaitedEngine) -> None:
        with suppress(PeerError):
            async with connected(engine.host, engine.port) as channel:
                if engine.request_ids:  # else all were read while it connected
                    await channel.ask(Heartbeat(engine_id=engine_id, request_ids=sorted(engine.request_ids)))

    def _stop_heartbeats(self, prompt: RemotePrompt) -> None:
        if (engine := self._awaited.get(prompt.engine_id or "")) is None:
            return
        engine.request_ids.discard(prompt.request_id or "")
        if not engine.request_ids:
            del self._awaited[prompt.engine_id or ""]
        if not self._awaited:
            self._awaits.clear()

    def _die(self, reason: str) -> None:
        self._metrics.engine_deaths += 1
        log.error("vLLM's engine would die of these kv_transfer_params: %s", reason)
