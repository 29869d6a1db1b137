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

from kvmesh.blocks.block_keys import KEY_BYTES
from kvmesh.errors import IndexUnavailableError
from kvmesh.index.prefix_match import Run
from kvmesh.index.tracked_blocks import NOTHING_KNOWN, STRETCH_BLOCKS, TrackedBlocks
from kvmesh.redis.address import RedisAccess
from kvmesh.redis.keys import pack_mget, parse_version
from kvmesh.redis.link import RedisLink, checked, pack
from kvmesh.redis.protocol import RedisProtocol, array_of, run_id
from kvmesh.redis.snapshot import ASK_VERSION

log = logging.getLogger(__name__)

AT_ONCE = 8  # stretches an MGET: as many blocks as a lookup of 8,000 tokens
ASK_SECONDS = 0.5
# Redis had told of every change by the time that it answered. Longer ago than this, the connection may be dead
BELIEVED_SECONDS = 2.0
RETRY_SECONDS = 5.0

_GREETING = pack("INFO", "server") + pack("HELLO", 3) + pack("CLIENT", "TRACKING", "ON")


class TrackingLink:
    """Fills `TrackedBlocks` and keeps them true. Raise RedisUrlError."""

    def __init__(self, url: RedisAccess | str) -> None:
        self._blocks = TrackedBlocks()
        self._link = RedisLink(url, reads_only=True, stall_seconds=BELIEVED_SECONDS, greet=self._greet)
        self._protocol: RedisProtocol | None = None
        self._server = self._server_of_lookups = b""  # their run ids
        self._version = b""  # of the registry; all changes up to it have been told
        self._believed_until = 0.0  # loop time
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._trouble = ""

    def leading(self, keys: bytes, *, version: bytes, now: float) -> tuple[Sequence[Run], int]:
        """Return what is known of the first blocks of these packed keys at `now` (loop time), and of how many.

        `version`: of the registry that is to tell what the values mean. What was read before a slot got another
        meaning must not be read by the new one.
        """
        if now >= self._believed_until:
            return NOTHING_KNOWN
        if version != self._version:
            self._wake.set()
            return NOTHING_KNOWN
        return self._blocks.leading(keys)

    @property
    def tracked_blocks(self) -> int:
        """Return how many blocks are known here or about to be."""
        return len(self._blocks)

    def note(self, keys: bytes, *, held: int) -> None:
        """Take note of a lookup: somebody holds the first `held` blocks of these packed keys."""
        if self._trouble or self._is_closed or not self._blocks.note(keys, held=held):
            return
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="redis-tracking")
        self._wake.set()

    def begin_anew(self, server: bytes) -> None:
        """Forget everything: lookups have a new connection, perhaps to another server (its run id)."""
        self._server_of_lookups = server
        self.lost()
        if self._protocol is not None:
            self._protocol.abort()  # the next one goes where lookups go

    async def close(self) -> None:
        """Close the connection."""
        self._is_closed = True
        try:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task])
        finally:
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
        info, hello, tracking = await protocol.request(_GREETING, 3)
        told = checked(hello)
        if not isinstance(told, dict) or told.get(b"proto") != 3:  # by RESP2 nothing would ever be told
            raise IndexUnavailableError("it does not speak RESP3")
        checked(tracking)
        if self._protocol is not None and self._protocol is not protocol:
            self._protocol.listener = None  # its end is no news any more
            self.lost()
        self._protocol, protocol.listener = protocol, self
        self._server = run_id(info)

    async def _run(self) -> None:
        while True:
            try:
                await self._ask()
                self._note_trouble("")
                with suppress(TimeoutError):
                    async with asyncio.timeout(ASK_SECONDS if len(self._blocks) else None):
                        await self._wake.wait()
                self._wake.clear()
                continue
            except IndexUnavailableError as error:
                self._note_trouble(str(error))
            except Exception:
                log.exception("what Redis said of known prefixes could not be read")
                self._note_trouble("a defect")
            self.lost()  # what was asked for, too
            if self._protocol is not None:
                self._protocol.abort()
            await asyncio.sleep(RETRY_SECONDS)

    async def _ask(self) -> None:
        """Ask for all that is wanted, and how far Redis has told."""
        loop = asyncio.get_running_loop()
        while True:
            stretches = self._blocks.take_wanted(AT_ONCE)
            keys = b"".join([stretch.keys for stretch in stretches])
            began = loop.time()
            replies = await self._link.request(
                ASK_VERSION + pack_mget(keys) if keys else ASK_VERSION, replies=1 + bool(keys)
            )
            if not self._server or self._server != self._server_of_lookups:
                raise IndexUnavailableError("this is not the server that answers lookups, or it does not say (+info)")
            version = parse_version(array_of(replies[0], 2))
            values = array_of(replies[1], len(stretches) * STRETCH_BLOCKS) if keys else []
            for number, stretch in enumerate(stretches):
                self._blocks.fill(stretch, values[number * STRETCH_BLOCKS : (number + 1) * STRETCH_BLOCKS])
            self._version, self._believed_until = version, began + BELIEVED_SECONDS
            if not stretches:
                return

    def _note_trouble(self, trouble: str) -> None:
        """Log when it begins and ends, not each attempt."""
        if trouble and not self._trouble:
            log.warning("known prefixes are asked for with every request, too: %s", trouble)
        elif self._trouble and not trouble:
            log.info("known prefixes are kept here again")
        self._trouble = trouble
