"""The bookings of all replicas, shared through Redis: this one writes its own and reads the others'.

`command` goes with the index lookup, so that reading costs no round trip of its own. `changed`, `ended` and `placed`
are called for each booking; `run` writes. No request ever waits for a write.
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
from extproc.replicas.shared_load import EndpointBookings, SharedView, add_bookings
from extproc.replicas.shared_records import (
    MAX_REPLICAS,
    NO_QUESTION,
    Placement,
    PlacementBook,
    PlacementNames,
    Record,
    pack_beat,
    pack_leave,
    pack_placement,
    pack_read_adapter,
    pack_read_loads,
    pack_read_session,
    pack_set_load,
    read_adapter,
    read_load,
    read_names,
    read_session,
    replica_name,
)
from kvmesh.errors import IndexUnavailableError, RedisUrlError
from kvmesh.redis.address import RedisAccess
from kvmesh.redis.link import RedisLink

FORGET_SECONDS = 10.0  # until a replica without a lease is taken off the list; it enters itself again if it lives


class HeardReplicas:
    """The other replicas: their names, and their bookings as last read."""

    def __init__(self, *, own: bytes, lease_seconds: float) -> None:
        self.question = b""  # the command that asks for all others' bookings; empty while there are none
        self.others: Mapping[str, EndpointBookings] = {}
        self.replicas = 0  # of which there are bookings
        self._own = own
        self._lease_seconds = lease_seconds
        self._names: list[bytes] = []
        self._silent_since: dict[bytes, float] = {}  # replicas of the list without a lease -> monotonic seconds
        self._heard_at: float | None = None
        self._values: list[Any] = []
        self._records: dict[bytes, Record] = {}  # as they came -> read; of the last answer

    def is_fresh(self, *, now: float) -> bool:
        """Return whether the last answer may still be used while there is no newer one."""
        return self._heard_at is not None and now - self._heard_at <= self._lease_seconds

    def hear(self, values: list[Any], *, now: float) -> None:
        """Take the answer to the question, which is often the same as the one before."""
        self._heard_at = now
        if values == self._values:
            return
        records: dict[bytes, Record] = {}
        for value in values:
            record = self._records.get(value)
            if record is None:
                record = read_load(value)
            if record is not None:
                records[value] = record
        # two replicas may have the same record
        said = [records[value] for value in values if value in records]
        self.others = add_bookings(said)
        self.replicas = len(said)
        self._values, self._records = values, records

    def learn(self, names: Any, loads: Any, *, now: float) -> list[bytes]:
        """Take the list of replicas and the answer to the question; return those that were silent for too long."""
        if isinstance(loads, list):
            self.hear(loads, now=now)
            for name, value in zip(self._names, loads, strict=False):
                if value is None:
                    self._silent_since.setdefault(name, now)
                else:
                    self._silent_since.pop(name, None)
        if not isinstance(names, list):
            return []
        listed = read_names(names, own=self._own)
        gone = [name for name in listed if now - self._silent_since.get(name, now) > FORGET_SECONDS]
        there = sorted(set(listed).difference(gone))
        known = set(there)  # made once: a foreign writer may have filled the list
        self._silent_since = {name: at for name, at in self._silent_since.items() if name in known}
        if len(there) > MAX_REPLICAS:  # first those that have answered, or were not asked yet
            there = sorted(sorted(there, key=lambda name: name in self._silent_since)[:MAX_REPLICAS])
        if there != self._names:
            self._names = there
            self.question = pack_read_loads(there) if there else b""
            if not there:
                self.hear([], now=now)
        return gone


log = logging.getLogger(__name__)

CLOSE_SECONDS = 0.5
NOTHING_SHARED = SharedView()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStateSettings:
    """Times of what the replicas share."""

    lease_seconds: float = 2.0  # a replica that has not written for so long has no bookings any more
    end_delay_seconds: float = 0.005  # until the end of a booking is written, unless a new one is before
    timeout_seconds: float = 0.02  # for `read`, which a request waits for
    adapter_ttl_seconds: float = 60.0  # the pods' own metrics report adapters a little later

    @property
    def beat_seconds(self) -> float:
        """Return the longest time between two writes: three may fail within a lease."""
        return self.lease_seconds / 4


async def write_on_beats(
    write: Callable[[bool], Awaitable[bool]], changed: asyncio.Event, *, beat_seconds: float, delay_seconds: float = 0.0
) -> None:
    """Write once a beat, and `delay_seconds` after each change, for good. A change during a write is the next one's.

    `write` takes whether a beat is due, and returns whether it worked; after a failure only the next beat writes.
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
    """One replica's part of what all replicas know. Raise ConfigError for an address that cannot be read."""

    def __init__(
        self,
        *,
        url: RedisAccess | str,
        bookings: Callable[[], Mapping[str, EndpointBookings]],
        settings: SharedStateSettings = SharedStateSettings(),
        replica: str | None = None,
        unix_clock: Callable[[], float] = time.time,
        heard: Callable[[], None] | None = None,
    ) -> None:
        """Take `bookings`, which returns what is open here by endpoint; it is called once a write.

        `heard` is called once a beat: the others' bookings may have changed, and there may be room again.
        """
        try:
            self._link = RedisLink(url)  # to a master, always: the reader's may lead to a replica
        except RedisUrlError as error:
            raise ConfigError(f"--redis: {error}") from error
        # the random part keeps processes apart, whatever their host names and process numbers
        self.replica = replica_name(replica or f"{socket.gethostname()}:{os.getpid()}", secrets.token_hex(4))
        self.problem: str | None = None  # why the others do not get our bookings
        self._name = self.replica.encode()
        self._bookings = bookings
        self.settings = settings
        self.unix_clock = unix_clock
        self._on_heard = heard
        self._wake = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None  # of what has ended
        self._placements = PlacementBook()
        self._heard = HeardReplicas(own=self._name, lease_seconds=settings.lease_seconds)
        self._gone: list[bytes] = []  # replicas to be taken off the list

    def command(self, session: bytes | None = None, adapter: bytes | None = None) -> tuple[bytes, int]:
        """Return the commands that ask what a request needs to know, and the number of their replies, for `take`.

        `session` and `adapter` are keys of `PlacementNames`.
        """
        # the bookings' reply always comes first if there is an array at all, so that `take` can tell them apart
        commands = [self._heard.question or (b"" if adapter is None else NO_QUESTION)]
        replies = 1 if commands[0] else 0
        if session is not None:
            commands.append(pack_read_session(session))
            replies += 1
        if adapter is not None:
            commands.append(pack_read_adapter(adapter, since=self.unix_clock() - self.settings.adapter_ttl_seconds))
            replies += 1
        return b"".join(commands), replies

    def take(self, replies: Sequence[Any]) -> SharedView:
        """Read the replies to `command`."""
        if not replies and self.problem is None and not self._heard.replicas:  # there is no other replica
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
        """Return what is known when the others could not be asked: their last answer, within the lease."""
        if not self._heard.is_fresh(now=time.monotonic()):
            return SharedView(degraded=f"own bookings only: {why}")
        if not self._heard.replicas:
            return SharedView()  # a moment ago there was no other replica
        degraded = f"bookings of other replicas are up to {self.settings.lease_seconds:g} s old: {why}"
        return SharedView(others=self._heard.others, replicas=self._heard.replicas, degraded=degraded)

    async def read(self, session: bytes | None = None, adapter: bytes | None = None) -> SharedView:
        """Ask in a round trip of its own, for a request without a lookup; never raises."""
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
        """Write our bookings now: until they are written, others may choose the same endpoint.

        Without other replicas the next beat does it: a write costs a picker some 0.1 ms of CPU.
        """
        if self._heard.question:
            self._wake.set()

    def ended(self) -> None:
        """Write our bookings soon: ends are less urgent, and several often come together."""
        if self._later is None and self._heard.question and not self._wake.is_set():
            self._later = asyncio.get_running_loop().call_later(self.settings.end_delay_seconds, self._wake.set)

    def place(self, placement: Placement, *, moved: bool = False) -> None:
        """Write a placement soon, unless it is known already. `moved`: the request has read another one since."""
        if self._placements.place(placement, moved=moved):
            self._wake.set()

    async def run(self) -> None:
        """Write after each change and once a beat, for good."""
        await write_on_beats(self._write, self._wake, beat_seconds=self.settings.beat_seconds)

    async def close(self) -> None:
        """Take our bookings back and close the connection; call it when `run` has ended."""
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
        """What all other replicas have booked, as last heard within the lease."""
        return self._heard.others if self._heard.is_fresh(now=time.monotonic()) else {}

    @property
    def replicas(self) -> int:
        """How many other replicas were heard last."""
        return self._heard.replicas

    def facts(self) -> dict[str, Any]:
        """Return for pages what is shared and how it stands."""
        return {
            "replica": self.replica,
            "others": self._heard.replicas,
            "others_bookings": {name: item.requests for name, item in self._heard.others.items()},
            "problem": self.problem,
        }

    async def _write(self, beat: bool) -> bool:
        """Write what is new; return whether it worked."""
        self._wake.clear()
        if self._later is not None:
            self._later.cancel()
            self._later = None
        placements = self._placements.take()
        commands = [pack_set_load(self._name, self._bookings(), lease_seconds=self.settings.lease_seconds)]
        checked = 1  # replies; those of placements follow and do not matter
        if beat:
            more, count = pack_beat(self._name, question=self._heard.question, gone=self._gone)
            commands.append(more)
            checked += count
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
            names, loads = replies[checked - 2 : checked]
            self._gone = self._heard.learn(names, loads, now=time.monotonic())
            if self._on_heard is not None and self._heard.replicas:
                self._on_heard()
        return self._judge(refusal)

    def _judge(self, problem: str | None) -> bool:
        """Log when writing begins or ceases to work, not each of the attempts between."""
        if problem is not None and self.problem is None:
            log.error("other replicas do not hear of our bookings: %s", problem)
        elif problem is None and self.problem is not None:
            log.info("other replicas hear of our bookings again")
        self.problem = problem
        return problem is None


class PoolShare:
    """One pool's part of a `SharedState` that all pools of a picker use: its sessions and adapters are its own.

    Bookings go by endpoint, whatever the pool; `changed` and `ended` are those of the whole.
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

    def command(self, session: str | None = None, adapter: str | None = None) -> tuple[bytes, int]:
        """Return the commands that ask what a request needs to know, and the number of their replies, for `take`."""
        return self._state.command(*self._keys(session, adapter))

    async def read(self, session: str | None = None, adapter: str | None = None) -> SharedView:
        """Ask in a round trip of its own, for a request without a lookup; never raises."""
        return await self._state.read(*self._keys(session, adapter))

    def placed(
        self, *, endpoint: str, session: str | None = None, adapter: str | None = None, session_moved: bool = False
    ) -> None:
        """Send all replicas where a session or an adapter is; what they have already is not repeated.

        `session_moved`: the request has read another endpoint than was last written here: another replica did since.
        """
        now = self._state.unix_clock()
        session_key, adapter_key = self._keys(session, adapter)
        if session_key is not None:
            placement = Placement(
                key=session_key,
                endpoint=endpoint,
                placed_at=now,
                ttl_seconds=self.session_ttl_seconds,
                is_one_of_several=False,
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
