"""Which endpoints have still to be asked for their models: a new one, and one that is another process now.

One that does not answer counts as asked, so that it holds nobody up.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress


class FirstAnswers:
    """Those of one pool; `is_complete` while there is none to be asked."""

    def __init__(self, addresses: Iterable[str], *, completed: Callable[[], None]) -> None:
        """`completed` is called, by itself in a turn of the loop, before those who wait go on."""
        self._awaited = set(addresses)
        self._completed = completed
        self._are_in = asyncio.Event()
        if not self._awaited:
            self._are_in.set()

    @property
    def is_complete(self) -> bool:
        """Whether every endpoint has been asked."""
        return self._are_in.is_set()

    def expect(self, address: str) -> None:
        """Take note that the endpoint is to be asked."""
        self._awaited.add(address)
        self._are_in.clear()

    def got(self, address: str) -> None:
        """Take note that the endpoint has answered, does not, or is gone."""
        if address not in self._awaited:
            return
        self._awaited.discard(address)
        if not self._awaited:
            # not at once: an endpoint may go while its pool is being changed
            asyncio.get_running_loop().call_soon(self._complete)

    async def wait(self, *, seconds: float) -> None:
        """Wait until every endpoint has been asked, or for so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._are_in.wait()

    def _complete(self) -> None:
        if not self._awaited and not self._are_in.is_set():
            self._completed()
            self._are_in.set()
