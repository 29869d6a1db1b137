"""Writes the changes of several streams with one script call: a call costs more than a usual change in it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kv_indexer.apply.batches import BLOCKS_A_CHANGE
from kvmesh.redis.protocol import Argument, array_of, checked

Waiting = tuple[Sequence[Argument], asyncio.Future[Any]]


class GatheredChanges:
    """Joins the changes of one turn of the event loop; a call costs BLOCKS_A_CHANGE at most, or is one change."""

    def __init__(self, run: Callable[..., Awaitable[Any]]) -> None:
        """`run` calls the script with these arguments; it raises IndexUnavailableError, or returns a reply a change."""
        self._run = run
        self._joined: list[Waiting] | None = None  # changes behind the first of this turn
        self._cost = 0  # of all of these, in blocks
        self._calls: set[asyncio.Task[None]] = set()

    async def write(self, arguments: Sequence[Argument], *, cost: int) -> Any:
        """Return the script's reply to a change. Raise IndexUnavailableError."""
        if self._joined is not None and self._cost + cost <= BLOCKS_A_CHANGE:
            self._cost += cost
            return checked(await self._join(self._joined, arguments))
        joined: list[Waiting] = []
        self._joined, self._cost = joined, cost
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._begin(joined)
            raise
        if joined:
            reply = self._join(joined, arguments)
            self._begin(joined)
            return checked(await reply)
        self._end(joined)
        (answer,) = array_of(await self._run(len(arguments), *arguments), 1)
        return checked(answer)

    async def close(self) -> None:
        """End with the calls under way."""
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _join(self, joined: list[Waiting], arguments: Sequence[Argument]) -> asyncio.Future[Any]:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        joined.append((arguments, reply))
        return reply

    def _end(self, joined: list[Waiting]) -> None:
        """Let the next change be the first of its turn."""
        if self._joined is joined:
            self._joined = None

    def _begin(self, joined: list[Waiting]) -> None:
        """Write these changes; a cancelled one is left out."""
        self._end(joined)
        changes = [each for each in joined if not each[1].done()]
        if changes:
            task = asyncio.create_task(self._carry_out(changes), name="apply-changes")
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _carry_out(self, changes: Sequence[Waiting]) -> None:
        arguments: list[Argument] = []
        for change, _ in changes:
            arguments.append(len(change))
            arguments += change
        replies = [reply for _, reply in changes]
        try:
            answers = array_of(await self._run(*arguments), len(changes))
        except Exception as error:
            for reply in replies:
                if not reply.done():
                    reply.set_exception(error)
            return
        for reply, answer in zip(replies, answers, strict=True):
            if not reply.done():
                reply.set_result(answer)
