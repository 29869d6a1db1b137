"""One connection to Redis that any number of callers share, and calls over it with a deadline.

Requests are written as they come and answered in order. A caller that gives up (deadline, cancellation) only drops its
answer: nothing has to be reconnected, as with a pooled client. Measured in `docs/decisions/0001-redis-lookup.md`.
`redis.route` finds the server.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import hiredis

from kvmesh.blocks.source import Claim
from kvmesh.errors import IndexUnavailableError, LeaseLostError, RedisUrlError
from kvmesh.redis.address import RedisNode, read_address
from kvmesh.redis.keys import PREFIX
from kvmesh.redis.protocol import Argument, Reaction, RedisProtocol, checked, explained, pack, reaction, refusal_word
from kvmesh.redis.route import RedisRoute, read_secrets

__all__ = ["Argument", "RedisCalls", "RedisLink", "Script", "checked", "mark_seen", "pack", "ping"]

log = logging.getLogger(__name__)

T = TypeVar("T")

HOPS = 4  # a request redirected this often runs in circles
FIRST_PAUSE_SECONDS = 0.01  # between attempts to connect; doubles up to the longest
LONGEST_PAUSE_SECONDS = 0.5
WORTH_WAITING_SECONDS = 0.05  # a caller waits for an attempt that begins this soon, and otherwise fails at once
SHORT_LIFE_SECONDS = 1.0  # a connection that ends this soon counts as a failed attempt
LEAVE_SECONDS = 0.1  # before the right server is searched: a newly elected master needs a moment, too
FENCED = -1  # first part of a script's answer: the claim is no longer valid
RECHECK_SECONDS = 10.0  # a master that was cut off does not know that it was replaced


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and its name in Redis' script cache."""

    source: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        # Redis names scripts by SHA-1; nothing secret depends on it
        object.__setattr__(self, "sha", hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest())


class RedisLink:
    """A lazily opened, self-healing, pipelined connection. Raise RedisUrlError, also for an unreadable file.

    It always leads to a master; with `reads_only` a redis:// address may also name a replica.
    """

    def __init__(
        self,
        url: str,
        *,
        reads_only: bool = False,
        connect_timeout_seconds: float = 2.0,
        stall_seconds: float = 5.0,
        recheck_seconds: float = RECHECK_SECONDS,
        greet: Callable[[RedisProtocol], Awaitable[None]] | None = None,
    ) -> None:
        """`greet` gets each new connection before any caller; if it raises, the attempt to connect has failed."""
        address = read_address(url)
        try:
            read_secrets(address)  # later it would be an outage, now it is a configuration mistake
        except IndexUnavailableError as error:
            raise RedisUrlError(str(error)) from None
        self._route = RedisRoute(address, reads_only=reads_only)
        self._in_cluster = self._route.in_cluster
        self._connect_timeout = connect_timeout_seconds
        self._stall = stall_seconds
        self._recheck_seconds = recheck_seconds
        self._greet = greet
        self._protocol: RedisProtocol | None = None
        self._connecting: asyncio.Task[RedisProtocol] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._check_timer: asyncio.TimerHandle | None = None
        self._hint: RedisNode | None = None  # the target of a MOVED
        self._led_to: RedisNode | None = None  # the server of the previous connection
        self._opened_at = 0.0  # loop time
        self._setbacks = 0  # consecutive attempts that failed, or whose connection ended at once
        self._connect_at = 0.0  # loop time of the next attempt
        self._trouble = ""

    async def request(self, commands: bytes, replies: int) -> list[Any]:
        """Write packed commands and return `replies` replies. Raise IndexUnavailableError; error replies are values."""
        protocol = self._protocol
        if protocol is None or protocol.closed:
            protocol = await self._connect()
        got = await protocol.request(commands, replies)
        return got if protocol.leave is None else await self._elsewhere(protocol, got, commands)

    def begin(self, commands: bytes, *, replies: int) -> Awaitable[list[Any]]:
        """Do the same as `request`, but write at once if there is a connection, so that the caller can work meanwhile.

        Await the result exactly once.
        """
        protocol = self._protocol
        if protocol is None or protocol.closed:
            return self.request(commands, replies=replies)
        return self._finish(protocol, protocol.request(commands, replies), commands)

    async def _finish(self, protocol: RedisProtocol, got: Awaitable[list[Any]], commands: bytes) -> list[Any]:
        replies = await got
        return replies if protocol.leave is None else await self._elsewhere(protocol, replies, commands)

    async def _elsewhere(self, protocol: RedisProtocol, got: list[Any], commands: bytes) -> list[Any]:
        """Leave a connection to the wrong server, and send a redirected request again."""
        for _ in range(HOPS):
            self._leave(protocol, protocol.leave or "")
            if not self._sent_on(got):
                return got
            protocol = self._protocol if self._protocol and not self._protocol.closed else await self._connect()
            got = await protocol.request(commands, len(got))
            if protocol.leave is None:
                return got
        self._set_back("the nodes of the Redis Cluster send us round in circles", at_least_seconds=LEAVE_SECONDS)
        raise IndexUnavailableError(self._trouble)

    async def call(self, *arguments: Argument) -> Any:
        """Run one command. Raise IndexUnavailableError, also for an error reply."""
        (reply,) = await self.request(pack(*arguments), replies=1)
        return checked(reply)

    async def run(self, script: Script, *, keys: Sequence[bytes], arguments: Sequence[Argument]) -> Any:
        """Run a script by its name; send its text once if Redis has forgotten it."""
        (reply,) = await self.request(pack("EVALSHA", script.sha, len(keys), *keys, *arguments), replies=1)
        if isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT"):
            return await self.call("EVAL", script.source, len(keys), *keys, *arguments)
        return checked(reply)

    async def close(self) -> None:
        """Close the connection; requests under way fail."""
        if self._check_timer is not None:
            self._check_timer.cancel()
        tasks = [task for task in (self._connecting, self._checking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._protocol is not None:
            self._protocol.abort()

    async def _connect(self) -> RedisProtocol:
        # one attempt for all callers, which outlives a caller with a short deadline
        if self._connecting is None or self._connecting.done():
            self._judge_the_last()
            pause = self._connect_at - asyncio.get_running_loop().time()
            if pause > WORTH_WAITING_SECONDS:
                raise IndexUnavailableError(self._trouble)
            self._connecting = asyncio.create_task(self._open(max(pause, 0.0)), name="redis-connect")
            self._connecting.add_done_callback(mark_seen)
        return await asyncio.shield(self._connecting)

    async def _open(self, pause_seconds: float) -> RedisProtocol:
        await asyncio.sleep(pause_seconds)
        hint, self._hint = self._hint, None
        try:
            async with asyncio.timeout(self._connect_timeout):
                protocol = await self._opened(hint)
        except TimeoutError:
            perhaps = "; perhaps it speaks no TLS" if self._route.address.secure else ""
            self._set_back(f"cannot connect to Redis: no answer within {self._connect_timeout:g} s{perhaps}")
            raise IndexUnavailableError(self._trouble) from None
        except IndexUnavailableError as error:
            self._set_back(f"cannot connect to Redis: {error}")
            raise IndexUnavailableError(self._trouble) from error
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            self._set_back("cannot connect to Redis: it answers like something else; perhaps it is a proxy or no Redis")
            raise IndexUnavailableError(self._trouble) from error
        self._opened_at = asyncio.get_running_loop().time()
        self._protocol = protocol
        protocol.watch(self._stall)
        self._check_later(protocol)
        if self._route.node != self._led_to:
            if self._led_to is not None:
                log.warning("the index is now on the Redis at %s; it was on %s", self._route.node, self._led_to)
            self._led_to = self._route.node
        return protocol

    async def _opened(self, hint: RedisNode | None) -> RedisProtocol:
        protocol = await self._route.open(hint)
        if self._greet is not None:
            try:
                await self._greet(protocol)
            except BaseException:
                protocol.abort()
                raise
        return protocol

    def _judge_the_last(self) -> None:
        protocol, self._protocol = self._protocol, None
        if protocol is None:
            return
        if asyncio.get_running_loop().time() - self._opened_at > SHORT_LIFE_SECONDS:
            self._setbacks = 0
        else:
            self._set_back(f"Redis closed the connection: {protocol.last_error or 'end of stream'}")

    def _set_back(self, trouble: str, *, at_least_seconds: float = 0.0) -> None:
        """Remember the trouble, and delay the next attempt: there may be a thousand callers per second."""
        self._trouble = trouble
        pause = max(min(FIRST_PAUSE_SECONDS * 2**self._setbacks, LONGEST_PAUSE_SECONDS), at_least_seconds)
        self._setbacks = min(self._setbacks + 1, 16)
        self._connect_at = asyncio.get_running_loop().time() + pause

    def _leave(self, protocol: RedisProtocol, error: str) -> None:
        """Make the next request search the right server."""
        if self._protocol is not protocol:
            return  # another caller got the same reply
        self._protocol = None
        protocol.retire(within_seconds=self._stall)
        if reaction(error, in_cluster=self._in_cluster) is Reaction.FOLLOW:
            self._hint = self._route.moved_to(error)
        else:
            self._set_back(f"Redis refuses: {explained(error)}", at_least_seconds=LEAVE_SECONDS)

    def _sent_on(self, replies: Sequence[Any]) -> bool:
        """Tell whether nothing was executed because the same request belongs to another node."""
        return self._in_cluster and all(
            isinstance(reply, hiredis.ReplyError) and refusal_word(str(reply)) == "MOVED" for reply in replies
        )

    def _check_later(self, protocol: RedisProtocol) -> None:
        def begin() -> None:
            self._checking = asyncio.create_task(self._check(protocol), name="redis-check")

        if self._route.can_move:
            if self._check_timer is not None:
                self._check_timer.cancel()
            self._check_timer = asyncio.get_running_loop().call_later(self._recheck_seconds, begin)

    async def _check(self, protocol: RedisProtocol) -> None:
        """Leave a server that most others no longer consider the master."""
        elsewhere = await self._route.is_elsewhere()
        if self._protocol is not protocol or protocol.closed:
            return
        if elsewhere:
            self._protocol = None
            protocol.retire(within_seconds=self._stall)
        else:
            self._check_later(protocol)


async def ping(url: str, *, timeout_seconds: float) -> None:
    """Return if the Redis at an address answers. Raise RedisUrlError or IndexUnavailableError, without passwords."""
    link = RedisLink(url, connect_timeout_seconds=timeout_seconds)
    try:
        async with asyncio.timeout(timeout_seconds):
            await link.call("PING")
    except TimeoutError:
        raise IndexUnavailableError(f"no answer in {timeout_seconds:g} s") from None
    finally:
        await link.close()


def mark_seen(task: "asyncio.Task[Any]") -> None:
    """Retrieve a task's failure: if all its callers have given up, it must not be logged as unhandled."""
    if not task.cancelled():
        task.exception()


def raise_if_fenced(claim: Claim, answer: Sequence[Any]) -> None:
    """Raise LeaseLostError if a script has answered that the claim is no longer valid."""
    if answer[0] == FENCED:
        raise LeaseLostError(f"{claim.stream.name} is not ours any more (fence {claim.fence})")


class RedisCalls:
    """A link whose every call ends in bounded time. Raise RedisUrlError."""

    def __init__(self, *, url: str, timeout_seconds: float, reads_only: bool = False) -> None:
        self._link = RedisLink(url, reads_only=reads_only)
        self._timeout = timeout_seconds

    async def run(self, script: Script, *arguments: Argument) -> Any:
        """Run a script. Raise IndexUnavailableError."""
        return await self._in_time(self._link.run(script, keys=[PREFIX], arguments=arguments))

    async def run_claimed(self, script: Script, claim: Claim, *arguments: Argument) -> Sequence[Any]:
        """Run a script that checks the claim. Raise LeaseLostError, IndexUnavailableError."""
        answer: Sequence[Any] = await self.run(script, claim.stream.name, claim.fence, *arguments)
        raise_if_fenced(claim, answer)
        return answer

    async def call(self, *arguments: Argument) -> Any:
        """Run one command. Raise IndexUnavailableError, also for an error reply."""
        return checked(await self.ask(*arguments))

    async def ask(self, *arguments: Argument) -> Any:
        """Run one command; an error reply is a value. Raise IndexUnavailableError."""
        (reply,) = await self.request(pack(*arguments), 1)
        return reply

    async def request(self, commands: bytes, replies: int) -> list[Any]:
        """Send packed commands; errors among the replies are values. Raise IndexUnavailableError."""
        return await self._in_time(self._link.request(commands, replies=replies)) if replies else []

    async def now(self) -> float:
        """Return Redis' clock, in unix seconds. Raise IndexUnavailableError."""
        seconds, microseconds = await self.call("TIME")
        return int(seconds) + int(microseconds) / 1e6

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()

    async def _in_time(self, answer: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self._timeout):
                return await answer
        except TimeoutError:
            raise IndexUnavailableError(f"Redis did not answer within {self._timeout:g} s") from None
