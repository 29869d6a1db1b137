"""Client-side caching: a connection on which Redis says which of the blocks that were asked for there have changed.

The reader has one, unless it looks up a few prompts only. RESP3 and CLIENT TRACKING, as in
https://redis.io/docs/latest/develop/reference/client-side-caching/. A connection of its own: lookups neither wait for
what is filled here nor read pushed messages, and where Redis does no tracking they go on asking for everything.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kv_indexer.adapters.redis_address import RedisAccess
from kv_indexer.adapters.redis_link import RedisLink, checked, pack
from kv_indexer.adapters.redis_protocol import RedisProtocol
from kv_indexer.core.block_keys import KEY_BYTES
from kv_indexer.core.prefix_match import Run
from kv_indexer.core.tracked_blocks import NOTHING_KNOWN, STRETCH_BLOCKS, TrackedBlocks
from kv_indexer.errors import IndexUnavailableError
from kv_indexer.wire.redis_keys import pack_mget

log = logging.getLogger(__name__)

AT_ONCE = 8  # stretches an MGET: as many blocks as a lookup of 8,000 tokens
PING_SECONDS = 0.5
# Redis had told of every change by the time that it answered. Longer ago than this, the connection may be dead
BELIEVED_SECONDS = 2.0
RETRY_SECONDS = 5.0

_GREETING = pack("HELLO", 3) + pack("CLIENT", "TRACKING", "ON")
_PING = pack("PING")


class TrackingLink:
    """Fills `TrackedBlocks` and keeps them true. Raise RedisUrlError."""

    def __init__(self, url: RedisAccess | str) -> None:
        self._blocks = TrackedBlocks()
        self._link = RedisLink(url, reads_only=True, stall_seconds=BELIEVED_SECONDS, greet=self._greet)
        self._protocol: RedisProtocol | None = None
        self._believed_until = 0.0  # loop time
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._trouble = ""

    def leading(self, keys: bytes, *, now: float) -> tuple[Sequence[Run], int]:
        """Return what is known of the first blocks of these packed keys at `now` (loop time), and of how many."""
        return self._blocks.leading(keys) if now < self._believed_until else NOTHING_KNOWN

    def __len__(self) -> int:
        """Return how many blocks Redis tells of."""
        return len(self._blocks) * STRETCH_BLOCKS

    def note(self, keys: bytes, *, held: int) -> None:
        """Take note of a lookup: somebody holds the first `held` blocks of these packed keys."""
        if self._trouble or not self._blocks.note(keys, held=held):
            return
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="redis-tracking")
        self._wake.set()

    def begin_anew(self) -> None:
        """Forget everything and look for the server again: lookups may go to another one from now on."""
        self.lost()
        if self._protocol is not None:
            self._protocol.abort()

    async def close(self) -> None:
        """Close the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._link.close()

    # --- redis_protocol.Listener ----------------------------------------------------------------------------------

    def told(self, message: Sequence[Any]) -> None:
        """Take what Redis says: keys that have changed, or None for all of them."""
        if message[0] != b"invalidate":
            return
        if message[1] is None:
            self._blocks.clear()
        else:
            self._blocks.changed([key[-KEY_BYTES:] for key in message[1]])

    def lost(self) -> None:
        """Forget everything: nobody tells of changes any more."""
        self._believed_until = 0.0
        self._blocks.clear()

    # --------------------------------------------------------------------------------------------------------------

    async def _greet(self, protocol: RedisProtocol) -> None:
        for reply in await protocol.request(_GREETING, 2):
            checked(reply)
        self.lost()
        self._protocol, protocol.listener = protocol, self

    async def _run(self) -> None:
        while True:
            try:
                await self._ask()
            except IndexUnavailableError as error:
                self.lost()  # what was asked for, too
                self._note_trouble(str(error))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._note_trouble("")
            with suppress(TimeoutError):
                async with asyncio.timeout(PING_SECONDS if len(self._blocks) else None):
                    await self._wake.wait()
            self._wake.clear()

    async def _ask(self) -> None:
        """Ask for all that is wanted, or whether Redis is still there."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        # first: where it opens a connection, what was wanted before is forgotten
        checked((await self._link.request(_PING, replies=1))[0])
        while stretches := self._blocks.take_wanted(AT_ONCE):
            keys = b"".join([stretch.keys for stretch in stretches])
            values = checked((await self._link.request(pack_mget(keys), replies=1))[0])
            for number, stretch in enumerate(stretches):
                self._blocks.fill(stretch, values[number * STRETCH_BLOCKS : (number + 1) * STRETCH_BLOCKS])
        self._believed_until = began + BELIEVED_SECONDS

    def _note_trouble(self, trouble: str) -> None:
        """Log when it begins and ends, not each attempt."""
        if trouble and not self._trouble:
            log.warning("known prefixes are asked for with every request, too: %s", trouble)
        elif self._trouble and not trouble:
            log.info("known prefixes are kept here again")
        self._trouble = trouble
