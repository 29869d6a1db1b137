"""The bookings of all replicas, shared through Redis: each replica writes its own and reads the others'.

`command` travels with the index lookup, so that reading costs no extra round trip. `changed`, `ended` and `placed` are
called for each booking; `run` writes. No request ever waits for a write.
"""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from extproc.errors import ConfigError
from extproc.shared.shared_load import EndpointBookings, SharedView
from extproc.shared.shared_records import (
    NO_QUESTION,
    SECRET_BYTES,
    HeardReplicas,
    Placement,
    PlacementBook,
    PlacementNames,
    pack_beat,
    pack_leave,
    pack_placement,
    pack_read_adapter,
    pack_read_session,
    pack_secret,
    pack_set_load,
    read_adapter,
    read_session,
    replica_name,
)
from kvmesh.errors import IndexUnavailableError, RedisUrlError
from kvmesh.redis.link import RedisLink

log = logging.getLogger(__name__)

CLOSE_SECONDS = 0.5
NOTHING_SHARED = SharedView()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStateSettings:
    """Intervals and deadlines of the shared state."""

    lease_seconds: float = 2.0  # a replica's bookings expire this long after its last write
    end_delay_seconds: float = 0.005  # until the end of a booking is written, unless a new booking comes first
    timeout_seconds: float = 0.02  # for `read`, which holds up a request
    adapter_ttl_seconds: float = 60.0  # bridges the time until the pods' own metrics report the adapter

    @property
    def beat_seconds(self) -> float:
        """Return the longest time between two writes: three may fail within a lease."""
        return self.lease_seconds / 4


async def write_on_beats(
    write: Callable[[bool], Awaitable[bool]], changed: asyncio.Event, *, beat_seconds: float, delay_seconds: float = 0.0
) -> None:
    """Write once a beat, and `delay_seconds` after each change, until cancelled.

    A change during a write is left to the next write. `write` gets whether a beat is due, and returns whether it
    worked; after a failure only the next beat writes.
    """
    loop = asyncio.get_running_loop()
    while True:
        beat_at = loop.time() + beat_seconds
        is_well = await write(True)
        while (left := beat_at - loop.time()) > 0:
            if not is_well:
                await asyncio.sleep(left)
                break
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                break
            if delay_seconds:
                await asyncio.sleep(delay_seconds)
            is_well = await write(False)


class SharedState:
    """One replica's part of the shared state. Raise ConfigError for an invalid address."""

    def __init__(
        self,
        *,
        url: str,
        bookings: Callable[[], Mapping[str, EndpointBookings]],
        settings: SharedStateSettings = SharedStateSettings(),
        heard: Callable[[], None] | None = None,
    ) -> None:
        """`bookings` returns this replica's in-flight bookings by endpoint; it is called once a write.

        `heard` is called once a beat: the others' bookings may have changed, and there may be room again.
        """
        try:
            self._link = RedisLink(url)  # always to a master: the index reader's link may lead to a Redis replica
        except RedisUrlError as error:
            raise ConfigError(f"--redis: {error}") from error
        # the random part tells processes apart even with equal host names and process numbers
        self.replica = replica_name(f"{socket.gethostname()}:{os.getpid()}", secrets.token_hex(4))
        self.problem: str | None = None  # why our bookings do not reach the others
        self._name = self.replica.encode()
        self._bookings = bookings
        self.settings = settings
        self._on_heard = heard
        self._wake = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None  # the delayed write of ended bookings
        self._placements = PlacementBook()
        self._heard = HeardReplicas(own=self._name, lease_seconds=settings.lease_seconds)
        self._gone: list[bytes] = []  # replicas to remove from the list
        self.secret = secrets.token_bytes(SECRET_BYTES)  # of all pickers, after the first beat; never a client's

    def command(self, session: bytes | None = None, adapter: bytes | None = None) -> tuple[bytes, int]:
        """Return the commands that read a request's `SharedView`, and the number of their replies, for `take`.

        `session` and `adapter` are keys of `PlacementNames`.
        """
        # the bookings come first whenever any reply is an array, so that `take` can tell the replies apart
        commands = [self._heard.question or (b"" if adapter is None else NO_QUESTION)]
        replies = 1 if commands[0] else 0
        if session is not None:
            commands.append(pack_read_session(session))
            replies += 1
        if adapter is not None:
            commands.append(pack_read_adapter(adapter, since=time.time() - self.settings.adapter_ttl_seconds))
            replies += 1
        return b"".join(commands), replies

    def take(self, replies: Sequence[Any]) -> SharedView:
        """Read the replies to `command`."""
        if not replies and self.problem is None and not self._heard.replicas:  # no other replica
            return NOTHING_SHARED
        session_endpoint, session_read, adapter_endpoints = None, False, frozenset[str]()
        for at, reply in enumerate(replies):
            if isinstance(reply, Exception):
                if at == 0:
                    return self.alone(str(reply))
            elif not isinstance(reply, list):
                session_endpoint, session_read = read_session(reply), True
            elif at == 0:
                self._heard.hear(reply, now=time.monotonic())
            else:
                adapter_endpoints = read_adapter(reply)
        return SharedView(
            others=self._heard.others,
            session_endpoint=session_endpoint,
            session_read=session_read,
            adapter_endpoints=adapter_endpoints,
            replicas=self._heard.replicas,
            degraded=None if self.problem is None else f"other replicas do not hear of ours: {self.problem}",
        )

    def alone(self, why: str) -> SharedView:
        """Return the view without an answer from Redis: the last bookings of the others, within the lease."""
        if not self._heard.is_fresh(now=time.monotonic()):
            return SharedView(degraded=f"own bookings only: {why}")
        if not self._heard.replicas:
            return SharedView()  # at the last answer there was no other replica
        degraded = f"bookings of other replicas are up to {self.settings.lease_seconds:g} s old: {why}"
        return SharedView(others=self._heard.others, replicas=self._heard.replicas, degraded=degraded)

    async def read(self, session: bytes | None = None, adapter: bytes | None = None) -> SharedView:
        """Ask Redis in a separate round trip, for a request without a lookup; never raises."""
        commands, replies = self.command(session, adapter)
        if not replies:
            return self.take(())
        try:
            async with asyncio.timeout(self.settings.timeout_seconds):
                return self.take(await self._link.request(commands, replies=replies))
        except IndexUnavailableError as error:
            return self.alone(str(error))
        except TimeoutError:
            return self.alone(f"no answer within {self.settings.timeout_seconds * 1000:g} ms")

    def changed(self) -> None:
        """Write our bookings now: until then others may choose the same endpoint.

        Without other replicas it is left to the next beat: a write costs a picker some 0.1 ms of CPU.
        """
        if self._heard.question:
            self._wake.set()

    def ended(self) -> None:
        """Write our bookings soon: ends are less urgent, and several often come together."""
        if self._later is None and self._heard.question and not self._wake.is_set():
            self._later = asyncio.get_running_loop().call_later(self.settings.end_delay_seconds, self._wake.set)

    def place(self, placement: Placement, *, moved: bool = False) -> None:
        """Write a placement soon, unless it was written recently. `moved`: the request has read another one since."""
        if self._placements.place(placement, moved=moved):
            self._wake.set()

    async def run(self) -> None:
        """Write after each change and once a beat, until cancelled."""
        await write_on_beats(self._write, self._wake, beat_seconds=self.settings.beat_seconds)

    async def close(self) -> None:
        """Withdraw our bookings and close the connection; call it when `run` has ended."""
        if self._later is not None:
            self._later.cancel()
        commands, replies = pack_leave(self._name)
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._link.request(commands, replies=replies)
        except (IndexUnavailableError, TimeoutError):
            log.debug("could not take our bookings back: the lease will end them")
        await self._link.close()

    @property
    def others(self) -> Mapping[str, EndpointBookings]:
        """The bookings of all other replicas, as of the last answer within the lease."""
        return self._heard.others if self._heard.is_fresh(now=time.monotonic()) else {}

    @property
    def replicas(self) -> int:
        """The number of other replicas in the last answer."""
        return self._heard.replicas

    def facts(self) -> dict[str, Any]:
        """Return the shared state and its problem, for pages."""
        return {
            "replica": self.replica,
            "others": self._heard.replicas,
            "others_bookings": {name: item.requests for name, item in self._heard.others.items()},
            "problem": self.problem,
        }

    async def _write(self, beat: bool) -> bool:
        """Write bookings and pending placements; return whether it worked."""
        self._wake.clear()
        if self._later is not None:
            self._later.cancel()
            self._later = None
        placements = self._placements.take()
        commands = [pack_set_load(self._name, self._bookings(), lease_seconds=self.settings.lease_seconds)]
        checked = 1  # replies; the replies to placements follow and are ignored
        if beat:
            more, count = pack_beat(self._name, question=self._heard.question, gone=self._gone)
            commands += pack_secret(self.secret), more
            checked += 2 + count
        expected = checked
        for placement in placements:
            more, count = pack_placement(placement)
            commands.append(more)
            expected += count
        try:
            async with asyncio.timeout(self.settings.beat_seconds):
                replies = await self._link.request(b"".join(commands), replies=expected)
        except (IndexUnavailableError, TimeoutError) as error:
            self._placements.put_back(placements)
            return self._judge(str(error) or f"no answer within {self.settings.beat_seconds:g} s")
        refusal = next((str(reply) for reply in replies[:checked] if isinstance(reply, Exception)), None)
        if beat:
            if isinstance(secret := replies[2], bytes) and len(secret) == SECRET_BYTES:
                self.secret = secret
            names, loads = replies[checked - 2 : checked]
            self._gone = self._heard.learn(names, loads, now=time.monotonic())
            if self._on_heard is not None and self._heard.replicas:
                self._on_heard()
        return self._judge(refusal)

    def _judge(self, problem: str | None) -> bool:
        if problem is not None and self.problem is None:
            log.error("other replicas do not hear of our bookings: %s", problem)
        elif problem is None and self.problem is not None:
            log.info("other replicas hear of our bookings again")
        self.problem = problem
        return problem is None


class PoolShare:
    """One pool's view of the `SharedState` of all pools of a picker, with its own sessions and adapters.

    Bookings are by endpoint, whatever the pool; `changed` and `ended` are the ones of the `SharedState`.
    """

    def __init__(self, state: SharedState, *, hash_seed: str, session_ttl_seconds: float) -> None:
        self._state = state
        self._names = PlacementNames(hash_seed=hash_seed)
        self.session_ttl_seconds = session_ttl_seconds
        self.take = state.take
        self.alone = state.alone
        self.changed = state.changed
        self.ended = state.ended
        self.facts = state.facts

    @property
    def secret(self) -> bytes:
        """The secret of all pickers."""
        return self._state.secret

    def command(self, session: str | None = None, adapter: str | None = None) -> tuple[bytes, int]:
        """Return the commands that read a request's `SharedView`, and the number of their replies, for `take`."""
        return self._state.command(*self._keys(session, adapter))

    async def read(self, session: str | None = None, adapter: str | None = None) -> SharedView:
        """Ask Redis in a separate round trip, for a request without a lookup; never raises."""
        return await self._state.read(*self._keys(session, adapter))

    def placed(
        self, *, endpoint: str, session: str | None = None, adapter: str | None = None, session_moved: bool = False
    ) -> None:
        """Publish the endpoint of a session or an adapter to all replicas, unless it was published recently.

        `session_moved`: the request has read another endpoint than this replica wrote last, so another replica moved
        the session.
        """
        now = time.time()
        session_key, adapter_key = self._keys(session, adapter)
        if session_key is not None:
            placement = Placement(
                key=session_key, endpoint=endpoint, placed_at=now, ttl_seconds=self.session_ttl_seconds
            )
            self._state.place(placement, moved=session_moved)
        if adapter_key is not None:
            placement = Placement(
                key=adapter_key,
                endpoint=endpoint,
                placed_at=now,
                ttl_seconds=self._state.settings.adapter_ttl_seconds,
                is_one_of_several=True,
            )
            self._state.place(placement)

    def _keys(self, session: str | None, adapter: str | None) -> tuple[bytes | None, bytes | None]:
        return (
            None if session is None else self._names.session(session),
            None if adapter is None else self._names.adapter(adapter),
        )
