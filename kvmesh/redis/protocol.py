"""The Redis protocol on one connection: requests are written as they come, replies are matched with them in order.

Also the meaning of error replies: their remedies, and whether this connection is still the right one. Their words are
in https://redis.io/docs/latest/develop/reference/protocol-spec/ and the servers' sources; in scripts, Redis 6 hides the
word behind `ERR Error running script …: -WORD …`. Knows nothing of addresses, and opens nothing.
"""

import asyncio
import re
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import hiredis
from hiredis import PushNotification, ReplyError

from kvmesh.errors import IndexRefusesError, IndexUnavailableError

SHOWN_LIMIT = 300  # characters of a reply that a message repeats
_IN_SCRIPT = re.compile(r"-([A-Z]{3,}) ")
ADVICE = {
    "LOADING": "it reads its data from disk; it will answer when that is done",
    "OOM": "its memory is full: raise maxmemory (docs/reference/redis.md says how much the index takes)",
    "READONLY": "it is a replica: looking for the master",
    "MASTERDOWN": "it is a replica that has lost its master: looking for the master",
    "NOAUTH": "it wants a password: the parameter password_file of --redis",
    "WRONGPASS": "user or password is wrong: see username and password_file in --redis",
    "NOPERM": "the user may not do this: docs/guides/redis-connection.md lists what it needs",
    "MISCONF": "it cannot save to disk and so refuses writes: mend that, or switch saving off (CONFIG SET save ''), "
    "which the index does not need",
    "NOREPLICAS": "too few replicas are connected to it (min-replicas-to-write)",
    "BUSY": "a script keeps it busy",
    "CLUSTERDOWN": "the cluster cannot serve now: see CLUSTER INFO",
    "TRYAGAIN": "the cluster is moving the index's slot; it can be used again when the move has ended",
    "ASK": "the cluster is moving the index's slot; it can be used again when the move has ended",
    "MOVED": "this is a Redis Cluster: give its nodes as redis+cluster://HOST:PORT,…",
    "DENIED": "its protected mode refuses other machines: set a password or bind an address there",
}
_BY_TEXT = (
    ("max number of clients", "raise maxclients there"),
    ("cluster support disabled", "it is no cluster: use redis:// or redis+sentinel://"),
    ("without any password configured", "it has no password: leave ours out"),
    ("DB index is out of range", "it has fewer databases"),
    ("unknown command", "it is an older Redis, a Sentinel, or a proxy that does not pass everything on"),
)
Argument = bytes | str | int | float
MAX_PENDING = 10_000  # requests under way; more means that Redis does not answer


class Reaction(Enum):
    """The link's reaction to an error on a connection."""

    STAY = "stay"
    LEAVE = "leave"  # look for the right server again
    FOLLOW = "follow"  # the reply names the right server


def refusal_word(text: str) -> str:
    """Return the error's word, such as READONLY; `ERR` if it has no other."""
    word = text.partition(" ")[0]
    if word == "ERR" and (inner := _IN_SCRIPT.search(text)):
        return inner[1]
    return word


def explained(text: str) -> str:
    """Return the reply with its remedy. Arguments that Redis repeats may be secrets and are cut off."""
    shown = text.partition(", with args")[0][:SHOWN_LIMIT]
    by_text = next((advice for part, advice in _BY_TEXT if part in text), "")
    advice = ADVICE.get(refusal_word(text), by_text)
    return f"{shown} ({advice})" if advice else shown


def reaction(text: str, *, in_cluster: bool) -> Reaction:
    """Return the consequence of an error for its connection.

    ASK is not followed: our scripts name one key and touch many, so on the target of a migrating slot they would find
    half an index and start another one. Redis answers all of them with ASK until the migration has ended.
    """
    match refusal_word(text):
        case "MOVED" if in_cluster:
            return Reaction.FOLLOW
        case "CLUSTERDOWN" if in_cluster:
            return Reaction.LEAVE
        case "READONLY" | "MASTERDOWN" | "NOAUTH":
            return Reaction.LEAVE
        case _:
            return Reaction.STAY


def pack(*arguments: Argument) -> bytes:
    """Return one command in the Redis protocol."""
    packed: bytes = hiredis.pack_command(arguments)  # type: ignore[arg-type]  # its stub takes 1-tuples only
    return packed


def checked(reply: Any) -> Any:
    """Return the reply, or raise IndexUnavailableError if it is an error.

    It is an IndexRefusesError if the error is about the server, not about the request (LOADING, READONLY, OOM, …).
    """
    if isinstance(reply, ReplyError):
        text = str(reply)
        is_about_server = refusal_word(text) in ADVICE or any(part in text for part, _ in _BY_TEXT)
        raise (IndexRefusesError if is_about_server else IndexUnavailableError)(f"Redis refuses: {explained(text)}")
    return reply


def array_of(reply: Any, length: int) -> list[Any]:
    """Return an array of `length` values. Raise IndexUnavailableError, as `checked` does."""
    array = checked(reply)
    if not isinstance(array, list) or len(array) != length:
        raise IndexUnavailableError("Redis answers something else than was asked; perhaps it is a proxy or no Redis")
    return array


def run_id(info: Any) -> bytes:
    """Return the server's run id from its reply to `INFO server`; empty if it has none."""
    text = info if isinstance(info, bytes) else b""
    return text.partition(b"run_id:")[2].partition(b"\r\n")[0]


def unless_other_type(reply: Any) -> Any:
    """Return the reply, or None for a key of another type, which counts as absent. Else raise as `checked` does."""
    return None if isinstance(reply, ReplyError) and str(reply).startswith("WRONGTYPE") else checked(reply)


class _Pending:
    __slots__ = ("future", "got", "replies", "sent_at")

    def __init__(self, future: asyncio.Future[list[Any]], replies: int, sent_at: float) -> None:
        self.future = future
        self.replies = replies
        self.sent_at = sent_at  # loop time
        self.got: list[Any] = []


class RedisProtocol(asyncio.Protocol):
    """Matches answers with requests, in order."""

    def __init__(self, *, in_cluster: bool = False) -> None:
        self.closed = False
        self.on_push: Callable[[Sequence[Any]], None] = lambda _: None  # called with pushed messages, which RESP3 has
        self.on_lost: Callable[[], None] = lambda: None
        self.leave: str | None = None  # an error after which this is no longer the right server
        self._in_cluster = in_cluster
        self.last_error = ""  # a server that refuses a connection says why, unasked
        self._retired = False
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader()
        self._pending: deque[_Pending] = deque()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102  asyncio's
        self._transport = transport  # type: ignore[assignment]

    def request(self, commands: bytes, replies: int) -> asyncio.Future[list[Any]]:
        """Send at once; the future fails with IndexUnavailableError if the connection ends before the answer."""
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        if self.closed or self._transport is None or len(self._pending) >= MAX_PENDING:
            why = (self.last_error or "the connection is closed") if self.closed else "too many requests wait"
            future.set_exception(IndexUnavailableError(f"Redis: {why}"))
            return future
        self._pending.append(_Pending(future, replies, self._loop.time()))
        self._transport.write(commands)
        return future

    def watch(self, stall_seconds: float) -> None:
        """From now on, close the connection if an answer takes longer than `stall_seconds`: it may be half-open."""
        if self.closed:
            return
        if self._pending and self._loop.time() - self._pending[0].sent_at > stall_seconds:
            self.last_error = f"no answer for {stall_seconds:g} s"
            self.abort()
        else:
            self._loop.call_later(stall_seconds / 4, self.watch, stall_seconds)

    def data_received(self, data: bytes) -> None:  # noqa: D102
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                if type(reply) is ReplyError:
                    self._refused(str(reply))
                elif type(reply) is PushNotification:
                    self.on_push(reply)
                    continue
                request = self._pending[0]
                request.got.append(reply)
                if len(request.got) == request.replies:
                    self._pending.popleft()
                    if not request.future.done():
                        request.future.set_result(request.got)
        except (hiredis.ProtocolError, IndexError):
            self.abort()  # not a Redis server, or no longer in step
        if self._retired and not self._pending:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        self.closed = True
        self.on_lost()
        why = self.last_error or str(exc or "") or "end of stream"
        while self._pending:
            future = self._pending.popleft().future
            if not future.done():
                future.set_exception(IndexUnavailableError(f"Redis closed the connection: {why}"))

    def abort(self) -> None:
        """Close at once."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def retire(self, *, within_seconds: float) -> None:
        """Close once the requests under way have been answered; an answer may name the right server."""
        self._retired = True
        if self._pending:
            self._loop.call_later(within_seconds, self.abort)
        else:
            self.abort()

    def _refused(self, text: str) -> None:
        self.last_error = explained(text)
        if self.leave is None and reaction(text, in_cluster=self._in_cluster) is not Reaction.STAY:
            self.leave = text
