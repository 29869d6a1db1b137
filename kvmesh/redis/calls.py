"""Calls to Redis with a deadline, and what a refused claim means; used by the writer and the lease book."""

import asyncio
from collections.abc import Sequence
from typing import Any

from kvmesh.blocks.source import Claim
from kvmesh.errors import IndexUnavailableError, LeaseLostError
from kvmesh.redis.address import RedisAccess
from kvmesh.redis.keys import PREFIX
from kvmesh.redis.link import Argument, RedisLink, Script, checked

FENCED = -1  # first part of a script's answer: the claim does not hold


class RedisCalls:
    """A link whose every call ends in bounded time. Raise RedisUrlError."""

    def __init__(self, *, url: RedisAccess | str, timeout_seconds: float) -> None:
        self._link = RedisLink(url)
        self._timeout = timeout_seconds

    async def run(self, script: Script, *arguments: Argument) -> Any:
        """Run a script. Raise IndexUnavailableError."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._link.run(script, keys=[PREFIX], arguments=arguments)
        except TimeoutError:
            raise IndexUnavailableError(f"Redis did not answer within {self._timeout:g} s") from None

    async def run_claimed(self, script: Script, claim: Claim, *arguments: Argument) -> Sequence[Any]:
        """Run a script that checks the claim. Raise LeaseLostError, IndexUnavailableError."""
        answer: Sequence[Any] = await self.run(script, claim.stream.name, claim.fence, *arguments)
        if answer[0] == FENCED:
            raise LeaseLostError(f"{claim.stream.name} is not ours any more (fence {claim.fence})")
        return answer

    async def call(self, command: bytes) -> Any:
        """Send one packed command. Raise IndexUnavailableError."""
        (reply,) = await self.request(command, 1)
        return checked(reply)

    async def request(self, commands: bytes, replies: int) -> list[Any]:
        """Send packed commands; errors among the replies are values. Raise IndexUnavailableError."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._link.request(commands, replies=replies)
        except TimeoutError:
            raise IndexUnavailableError(f"Redis did not answer within {self._timeout:g} s") from None

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()
