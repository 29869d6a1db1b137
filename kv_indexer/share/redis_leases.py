"""Which indexer takes and gives back which stream, and the lease book in Redis: `share_streams.LeaseBook`.

The records of all indexers and Redis' clock decide; each change is one atomic step that checks again. A beat is cut
into pieces of a few milliseconds, because Redis serves no other client meanwhile and there may be thousands of streams.
Stream names are bytes as in Redis, for the same reason. `docs/reference/redis.md` states the rule.
"""

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import msgspec

from kvmesh.blocks.source import Claim, Stream
from kvmesh.redis.link import RedisCalls
from kvmesh.redis.scripts import BEAT, DROP_STREAM, PULSE, RELEASE, SETTLE, SURVEY

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2  # after this time without a heartbeat, readers consider all indexers dead
PULSE_OF_LEASE = 0.3  # duration of a pulse in leases: cheap to renew often, so that a death is noticed soon
LOOKED_AT_ONCE = 100  # streams: 2 to 3 ms of Redis; in one such portion per beat the slots are checked, too
SETTLED_AT_ONCE = 50  # registering a stream takes about 50 µs
ADOPT, TAKE, GIVE, BURY, UNFOLLOW = b"adopt", b"take", b"give", b"bury", b"unfollow"
UNOWNED_MS = 1000  # after this time any capable indexer takes a free stream, whatever its share
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerRecord:
    """One indexer's record of itself."""

    until_ms: float  # by Redis' clock; it is alive until then
    endpoints: frozenset[str]  # that it is responsible for
    streams: frozenset[bytes]  # that it could follow


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """The leases of the streams, after this indexer has renewed its own."""

    held: Mapping[bytes, int]  # by this indexer: name -> fence
    free: Mapping[bytes, float]  # name -> since when, in ms by Redis' clock
    owners: Mapping[str, int]  # other indexers -> number of held streams


class LeasePlan:
    """The rule, for one beat of the indexer `me`."""

    def __init__(self, *, me: str, records: Mapping[str, IndexerRecord], now_ms: float) -> None:
        """`records` of all remembered indexers, including `me`."""
        self._me = me
        self._now_ms = now_ms
        self._records = records
        self._live = {name: record for name, record in records.items() if record.until_ms > now_ms}
        self._shares = _shares(self._live)

    def unlisted(self, names: Iterable[bytes]) -> list[bytes]:
        """Return the streams whose endpoint no indexer lists."""
        names = tuple(names)
        if not names:
            return []
        listed = {endpoint.encode() for record in self._records.values() for endpoint in record.endpoints}
        return [name for name in names if name.rpartition(b"#")[0] not in listed]

    def surplus(self, view: LeaseView, *, elsewhere: Mapping[str, int] | None = None) -> list[bytes]:
        """Return our streams to give back: those above our share that another indexer would take.

        `elsewhere`: how many streams each other indexer holds that this one could not follow; they fill shares, too.
        """
        spare = len(view.held) - self._shares[self._me]
        holds = Counter(view.owners) + Counter(elsewhere or {})
        room = {name: self._shares[name] - holds[name] for name in self._live if name != self._me}
        given: list[bytes] = []
        for stream in sorted(view.held, reverse=True) if spare > 0 else ():
            taker = next((name for name, left in room.items() if left > 0 and stream in self._live[name].streams), None)
            if taker is not None:
                room[taker] -= 1
                given.append(stream)
            if len(given) == spare:
                break
        return given

    def wanted(self, view: LeaseView, *, held: int) -> list[bytes]:
        """Return the free streams to take while holding `held`: up to our share, and all that are long free."""
        mine = self._records[self._me].streams
        taken: list[bytes] = []
        for name in sorted(view.free):
            is_left_over = view.free[name] + UNOWNED_MS < self._now_ms
            if name in mine and (held + len(taken) < self._shares[self._me] or is_left_over):
                taken.append(name)
        return taken

    def unfollowed(self, view: LeaseView) -> list[bytes]:
        """Return the long-free streams that no indexer could follow."""
        long_ago = [name for name, since in view.free.items() if since + UNOWNED_MS < self._now_ms]
        return [name for name in long_ago if not any(name in record.streams for record in self._live.values())]


def _shares(live: Mapping[str, IndexerRecord]) -> dict[str, int]:
    """Return each indexer's share: its fraction of every stream that it could follow, summed and rounded up."""
    if len(live) == 1:
        return {name: len(record.streams) for name, record in live.items()}
    followers = Counter(stream for record in live.values() for stream in record.streams)
    return {
        name: ceil(sum(1 / followers[each] for each in record.streams) - _ROUNDING) for name, record in live.items()
    }


def portions(names: Sequence[bytes], size: int) -> list[Sequence[bytes]]:
    """Cut names into pieces of `size`."""
    return [names[at : at + size] for at in range(0, len(names), size)]


class RedisLeaseBook:
    """One indexer's leases. Raise RedisUrlError."""

    def __init__(
        self,
        *,
        url: str,
        indexer: str,
        endpoints: Collection[str],
        lease_seconds: float = 2.0,
        forget_seconds: float = 5.0,
        timeout_seconds: float = 1.0,
        slowdown: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """`endpoints`: all that this indexer is responsible for, found or not.

        A stream whose endpoint no indexer has listed for `forget_seconds` after its lease is dropped. The timeout is
        shorter than the lease, so that one lost answer does not cost the lease. `slowdown` returns a factor on
        `lease_seconds`: renewing thousands of leases keeps Redis busy.
        """
        self._redis = RedisCalls(url=url, timeout_seconds=timeout_seconds)
        self._indexer = indexer
        self._endpoints = frozenset(endpoints)
        self._lease_seconds = lease_seconds
        self._slowdown = slowdown
        self._forget_ms = round(forget_seconds * 1000)
        self._asked = _Asked()
        self._records = _Records()
        self._held: Mapping[bytes, int] = {}
        self._claims: Mapping[Stream, Claim] = {}  # of the held streams
        self._beats = secrets.randbelow(1 << 16)  # so that several indexers start checking slots in different places

    def list_endpoints(self, endpoints: Collection[str]) -> None:
        """Use these endpoints from the next tick on; streams whose endpoint no indexer lists are then dropped."""
        self._endpoints = frozenset(endpoints)

    async def tick(self, candidates: AbstractSet[Stream]) -> Mapping[Stream, Claim]:
        """See `share_streams.LeaseBook`."""
        if self._asked.endpoints is not self._endpoints or self._asked.candidates != candidates:
            self._asked = _asked(self._endpoints, candidates)
        asked = self._asked
        self._beats += 1
        now, names, others, silent = await self._beat()
        known = frozenset(names)
        records = self._records.read(others)
        for name in silent & records.keys():
            records[name] = replace(records[name], until_ms=now)
        own = IndexerRecord(until_ms=now + 1, endpoints=asked.listed, streams=frozenset(asked.streams))
        plan = LeasePlan(me=self._indexer, records=records | {self._indexer: own}, now_ms=now)
        foreign = sorted(known - asked.streams.keys())
        await self._settle([(BURY, name) for name in plan.unlisted(foreign)])
        await self._settle([(ADOPT, name) for name in asked.names if name not in known])
        view = await self._look(asked.names, checked=self._beats)
        not_ours = await self._look(foreign)
        held = await self._change(plan, view, not_ours)
        if held != self._held:
            self._held = held
            self._claims = {
                asked.streams[name]: Claim(stream=asked.streams[name], fence=fence) for name, fence in held.items()
            }
        return self._claims

    async def pulse(self) -> AbstractSet[str]:
        """See `share_streams.LeaseBook`."""
        return _texts(await self._redis.run(PULSE, self._indexer, self._pulse_ms))

    async def drop(self, claim: Claim) -> None:
        """See `share_streams.LeaseBook`."""
        await self._redis.run_claimed(DROP_STREAM, claim)

    async def release(self) -> None:
        """See `share_streams.LeaseBook`."""
        await self._redis.run(RELEASE, self._indexer)

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.close()

    @property
    def _lease_ms(self) -> int:
        return round(self._lease_seconds * self._slowdown() * 1000)

    @property
    def _pulse_ms(self) -> int:
        return round(self._lease_ms * PULSE_OF_LEASE)

    async def _beat(self) -> tuple[float, Sequence[bytes], Sequence[bytes], AbstractSet[str]]:
        """Return Redis' time in ms, all streams' names, the other indexers' records, and silent indexers' names."""
        now, names, others, silent, foreign = await self._redis.run(
            BEAT,
            self._indexer,
            self._lease_ms,
            self._forget_ms,
            secrets.token_hex(8),
            round(HEARTBEAT_SECONDS * self._slowdown()),
            self._asked.endpoints_json,
            self._asked.names_json,
            self._pulse_ms,
        )
        for key in _texts(foreign):
            log.error("%s was of another type; it is deleted, and replay rebuilds the index", key)
        return float(now), names, others, _texts(silent)

    async def _look(self, names: Sequence[bytes], *, checked: int | None = None) -> LeaseView:
        """Read the leases of these streams; `checked`, modulo the portions, selects one whose slots are checked."""
        held: dict[bytes, int] = {}
        free: dict[bytes, float] = {}
        owners: Counter[bytes] = Counter()
        cut = portions(names, LOOKED_AT_ONCE)
        for number, portion in enumerate(cut):
            is_checked = checked is not None and checked % len(cut) == number
            reply = await self._redis.run(SURVEY, self._indexer, self._lease_ms, int(is_checked), *portion)
            held.update((name, int(fence)) for name, fence in _pairs(reply[0]))
            free.update((name, float(ends)) for name, ends in _pairs(reply[1]))
            owners.update(reply[2])
        return LeaseView(
            held=held, free=free, owners={str(name, "utf-8", "replace"): count for name, count in owners.items()}
        )

    async def _change(self, plan: LeasePlan, view: LeaseView, not_ours: LeaseView) -> Mapping[bytes, int]:
        given = plan.surplus(view, elsewhere=not_ours.owners)
        wanted = plan.wanted(view, held=len(view.held) - len(given))
        actions = [(GIVE, name) for name in (*not_ours.held, *given)]
        actions += [(UNFOLLOW, name) for name in plan.unfollowed(not_ours)]
        actions += [(TAKE, name) for name in wanted]
        if not actions:
            return view.held
        taken = await self._settle(actions)
        return {name: fence for name, fence in view.held.items() if name not in set(given)} | taken

    async def _settle(self, actions: Sequence[tuple[bytes, bytes]]) -> dict[bytes, int]:
        taken: dict[bytes, int] = {}
        for at in range(0, len(actions), SETTLED_AT_ONCE):
            arguments = [part for action in actions[at : at + SETTLED_AT_ONCE] for part in action]
            reply = await self._redis.run(SETTLE, self._indexer, self._lease_ms, *arguments)
            taken.update((name, int(fence)) for name, fence in _pairs(reply))
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The arguments of a beat, kept while they stay the same: there may be thousands of streams."""

    endpoints: frozenset[str] | None = None
    candidates: AbstractSet[Stream] = frozenset()
    streams: Mapping[bytes, Stream] = field(default_factory=dict)  # the candidates by name
    names: Sequence[bytes] = ()  # of the candidates, sorted
    listed: frozenset[str] = frozenset()  # the endpoints, including the candidates'
    endpoints_json: bytes = b"[]"
    names_json: bytes = b"[]"


def _asked(endpoints: frozenset[str], candidates: AbstractSet[Stream]) -> _Asked:
    listed = endpoints.union(stream.endpoint for stream in candidates)
    streams = {stream.name.encode(): stream for stream in candidates}
    return _Asked(
        endpoints=endpoints,
        candidates=frozenset(candidates),
        streams=streams,
        names=sorted(streams),
        listed=listed,
        endpoints_json=msgspec.json.encode(sorted(listed)),
        names_json=msgspec.json.encode([each.name for each in candidates]),
    )


class _Said(msgspec.Struct):
    until_ms: float
    endpoints: list[str] | dict[str, Any]  # Lua writes an empty list as an object
    streams: list[str] | dict[str, Any]


class _Records:
    """The records of other indexers, decoded again only if more than their time has changed."""

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_Said)
        self._known: dict[bytes, tuple[bytes, IndexerRecord]] = {}

    def read(self, flat: Sequence[bytes]) -> dict[str, IndexerRecord]:
        known, self._known = self._known, {}
        found = {}
        for name, text in _pairs(flat):
            head, _, rest = text.partition(b",")
            until = head.removeprefix(b'{"until_ms":')
            if name in known and known[name][0] == rest and until.isdigit():
                before = known[name][1]
                record = IndexerRecord(until_ms=float(until), endpoints=before.endpoints, streams=before.streams)
            else:
                try:
                    said = self._decoder.decode(text)
                except (msgspec.MsgspecError, RecursionError):
                    continue  # written by another program or a newer version
                record = IndexerRecord(
                    until_ms=said.until_ms,
                    endpoints=frozenset(said.endpoints),
                    streams=frozenset(each.encode() for each in said.streams),
                )
            self._known[name] = rest, record
            found[str(name, "utf-8", "replace")] = record
        return found


def _texts(names: Sequence[bytes]) -> AbstractSet[str]:
    return {str(name, "utf-8", "replace") for name in names}


def _pairs(flat: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)
