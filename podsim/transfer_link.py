"""Runs the link of `podsim.core.link` on the event loop's clock, so that transfers can be awaited."""

import asyncio

from podsim.core.link import Link


class TransferLink:
    """One pod's network link. A transfer uses the links of both pods, and the busier one sets its time."""

    def __init__(self, bytes_per_second: float) -> None:
        self._link = Link(bytes_per_second)
        self._timer: asyncio.TimerHandle | None = None

    async def carry(self, size: float) -> None:
        """Return when `size` bytes have been transferred."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self._end_transfers(loop)
        self._link.begin(done, size, now=loop.time())
        self._set_timer(loop)
        try:
            await done
        finally:
            if not done.done() or done.cancelled():
                self._end_transfers(loop)
                self._link.drop(done, now=loop.time())
                self._set_timer(loop)

    def _end_transfers(self, loop: asyncio.AbstractEventLoop) -> None:
        for done in self._link.ended(now=loop.time()):
            if isinstance(done, asyncio.Future) and not done.done():
                done.set_result(None)

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        end = self._link.next_end()
        self._timer = None if end is None else loop.call_at(end, self._on_timer, loop)

    def _on_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._end_transfers(loop)
        self._set_timer(loop)
