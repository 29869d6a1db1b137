"""One connection to Redis that any number of callers share; used by the reader and the writer.

Requests are written as they come and answered in order. A caller that gives up (deadline, cancellation) just loses
interest in its answer: nothing has to be reconnected, which a pooled client must do. Measured in
`docs/decisions/0001-redis-lookup.md`.
"""

import asyncio
import hashlib
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

import hiredis
from redis.asyncio.connection import SSLConnection, parse_url

from kv_indexer.errors import IndexUnavailableError, RedisUrlError

Argument = bytes | str | int | float
MAX_PENDING = 10_000  # requests under way; more means that Redis does not answer


def pack(*arguments: Argument) -> bytes:
    """Return one command in the Redis protocol."""
    packed: bytes = hiredis.pack_command(arguments)  # type: ignore[arg-type]  # its stub takes 1-tuples only
    return packed


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and its name in Redis' script cache."""

    source: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        # Redis names scripts by SHA-1; nothing secret depends on it
        object.__setattr__(self, "sha", hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest())


def redis_target(url: str) -> dict[str, Any]:
    """Read a redis://, rediss:// or unix:// address into what redis-py calls connection arguments.

    Stricter than redis-py, which takes what it cannot read for localhost or database 0. Raise RedisUrlError.
    """
    try:
        fault = _fault(urlsplit(url))
        target = {} if fault else dict(parse_url(url))
    except ValueError:
        fault = "it cannot be read"  # the libraries' own words may repeat the password
    if fault:
        example = "redis://:PASSWORD@10.0.0.5:6379/0"
        raise RedisUrlError(f"Redis address {_without_secrets(url)!r}: {fault}; a valid one is e.g. {example}")
    return target


def _fault(parts: SplitResult) -> str:
    """Say what is wrong with an address, or ''."""
    is_unix, database = parts.scheme == "unix", parts.path.strip("/")
    checks = (
        (parts.scheme not in ("redis", "rediss", "unix"), "it must begin with redis://, rediss:// or unix://"),
        (is_unix and not parts.path, "it names no socket file"),
        (not is_unix and not parts.hostname, "it names no host"),
        (not is_unix and _port_is_bad(parts.netloc), "its port is not a number from 1 to 65535"),
        (not is_unix and bool(database) and not database.isdecimal(), "its database is not a number"),
    )
    return next((fault for failed, fault in checks if failed), "")


def _port_is_bad(netloc: str) -> bool:
    _, colon, port = netloc.rpartition("@")[2].rpartition("]")[2].rpartition(":")
    return bool(colon) and not (port.isdecimal() and len(port) < 6 and 0 < int(port) < 65536)


def _without_secrets(url: str) -> str:
    """Blank out all that may be a password, also in an address that cannot be read."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    if "@" in rest:
        rest = "***" if "?" in rest else f"***@{rest.rpartition('@')[2]}"
    else:
        rest, question, _ = rest.partition("?")
        if _port_is_bad(rest.partition("/")[0]):
            rest = f"{rest.rpartition(':')[0]}:***"  # perhaps USER:PASSWORD whose @HOST was forgotten
        rest += "?***" if question else ""
    return scheme + separator + rest


class RedisLink:
    """A lazily opened, self-healing, pipelined connection. Raise RedisUrlError."""

    def __init__(self, url: str, *, connect_timeout_seconds: float = 2.0, stall_seconds: float = 5.0) -> None:
        self._target = redis_target(url)
        self._connect_timeout = connect_timeout_seconds
        self._stall = stall_seconds
        self._protocol: _Protocol | None = None
        self._connecting: asyncio.Task[_Protocol] | None = None

    async def request(self, commands: bytes, *, replies: int) -> list[Any]:
        """Write packed commands and return that many replies. Raise IndexUnavailableError; error replies are values."""
        protocol = self._protocol
        if protocol is None or protocol.closed:
            protocol = await self._connect()
        protocol.drop_if_stalled(self._stall)
        return await protocol.request(commands, replies)

    async def call(self, *arguments: Argument) -> Any:
        """Run one command. Raise IndexUnavailableError, also for an error reply."""
        (reply,) = await self.request(pack(*arguments), replies=1)
        return checked(reply)

    async def run(self, script: Script, *, keys: Sequence[bytes], arguments: Sequence[Argument]) -> Any:
        """Run a script by its name; send its text once after Redis has forgotten it."""
        (reply,) = await self.request(pack("EVALSHA", script.sha, len(keys), *keys, *arguments), replies=1)
        if isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT"):
            return await self.call("EVAL", script.source, len(keys), *keys, *arguments)
        return checked(reply)

    async def close(self) -> None:
        """Close the connection; requests under way fail."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._protocol is not None:
            self._protocol.abort()

    async def _connect(self) -> "_Protocol":
        # one attempt for all callers, and it outlives a caller with a short deadline
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._open(), name="redis-connect")
            self._connecting.add_done_callback(_mark_seen)
        return await asyncio.shield(self._connecting)

    async def _open(self) -> "_Protocol":
        try:
            async with asyncio.timeout(self._connect_timeout):
                protocol = await self._open_socket()
                await self._introduce(protocol)
        except (OSError, TimeoutError, ValueError) as error:  # the last: a host that is no host name
            raise IndexUnavailableError(f"cannot connect to Redis: {error or type(error).__name__}") from error
        self._protocol = protocol
        return protocol

    async def _open_socket(self) -> "_Protocol":
        loop = asyncio.get_running_loop()
        path = self._target.get("path")
        if path:
            _, protocol = await loop.create_unix_connection(_Protocol, path)
            return protocol
        host, port = self._target.get("host", "localhost"), self._target.get("port", 6379)
        secure = self._target.get("connection_class") is SSLConnection
        context = ssl.create_default_context() if secure else None
        _, protocol = await loop.create_connection(_Protocol, host, port, ssl=context)
        return protocol

    async def _introduce(self, protocol: "_Protocol") -> None:
        commands: list[bytes] = []
        password = self._target.get("password")
        if password:
            user = self._target.get("username")
            commands.append(pack("AUTH", user, password) if user else pack("AUTH", password))
        if self._target.get("db"):
            commands.append(pack("SELECT", self._target["db"]))
        try:
            for reply in await protocol.request(b"".join(commands), len(commands)) if commands else []:
                checked(reply)
        except BaseException:
            protocol.abort()
            raise


def checked(reply: Any) -> Any:
    """Return the reply, or raise IndexUnavailableError if it is an error (LOADING, READONLY, OOM, NOAUTH, …)."""
    if isinstance(reply, hiredis.ReplyError):
        raise IndexUnavailableError(f"Redis refuses: {reply}")
    return reply


def _mark_seen(task: "asyncio.Task[_Protocol]") -> None:
    # a failed attempt whose callers have all given up is no news to anyone
    if not task.cancelled():
        task.exception()


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A request under way."""

    future: asyncio.Future[list[Any]]
    replies: int
    sent_at: float  # loop time
    got: list[Any] = field(default_factory=list)


class _Protocol(asyncio.Protocol):
    """Matches answers with requests, in order."""

    def __init__(self) -> None:
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader()
        self._pending: deque[_Pending] = deque()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def request(self, commands: bytes, replies: int) -> asyncio.Future[list[Any]]:
        """Send at once; the future fails with IndexUnavailableError if the connection ends before the answer."""
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        if self.closed or self._transport is None or len(self._pending) >= MAX_PENDING:
            why = "the connection is closed" if self.closed else "too many requests wait"
            future.set_exception(IndexUnavailableError(f"Redis: {why}"))
            return future
        self._pending.append(_Pending(future=future, replies=replies, sent_at=self._loop.time()))
        self._transport.write(commands)
        return future

    def drop_if_stalled(self, seconds: float) -> None:
        """Give a connection up that answers nobody (a half-open one looks like this)."""
        if self._pending and self._loop.time() - self._pending[0].sent_at > seconds:
            self.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                request = self._pending[0]
                request.got.append(reply)
                if len(request.got) == request.replies:
                    self._pending.popleft()
                    if not request.future.done():
                        request.future.set_result(request.got)
        except (hiredis.ProtocolError, IndexError):
            self.abort()  # not a Redis server, or no longer in step

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        while self._pending:
            future = self._pending.popleft().future
            if not future.done():
                future.set_exception(IndexUnavailableError(f"Redis closed the connection: {exc or 'end of stream'}"))

    def abort(self) -> None:
        """Close at once."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()
