"""The pickers' own keys in Redis: names, records, commands and their replies, and the pending placements.

Values in Redis may come from anyone: an unreadable one is left out and never raises. Names of sessions and adapters
are keyed hashes, so that Redis holds no client text. A placement is a hint for later requests: losing one costs at
most a cache hit, so both maps of placements evict the oldest when full.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from extproc.shared.shared_load import EndpointBookings, add_bookings
from kvmesh.redis.keys import PICKERS
from kvmesh.redis.link import pack

FORGET_SECONDS = 10.0  # until a replica without a lease is removed from the list; if it is alive it adds itself again
REPLICAS = PICKERS + b"replicas"  # set of names
SECRET, SECRET_BYTES = PICKERS + b"key", 32  # of all pickers; the first one's
REPLICAS_TTL_SECONDS = 60  # the list expires after the last picker has ended
MAX_REPLICAS = 64  # whose bookings are read; a foreign writer that fills the set must not make lookups slow
MAX_RECORD_BYTES = 1 << 20
DIGEST_BYTES = 12
MAX_NAME = 80
MAX_PENDING = 1000  # placements waiting for their write
MAX_NOTED = 20_000  # recently written placements: some 5 MB
KNOWN_NAMES = 1024  # cached keys of sessions and adapters: some 0.4 MB
_NAME = re.compile(rb"[A-Za-z0-9._:-]{1,%d}" % MAX_NAME)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(dict[str, EndpointBookings])

Record = Mapping[str, EndpointBookings]  # endpoint -> one replica's bookings


def replica_name(hint: str, unique: str) -> str:
    """Return a name for the list of replicas: the process's readable name and a unique suffix."""
    plain = re.sub(r"[^A-Za-z0-9._:-]", "_", hint)
    return f"{plain[: MAX_NAME - 1 - len(unique)]}-{unique}"


def load_key(replica: bytes) -> bytes:
    """Return the key of one replica's bookings."""
    return PICKERS + b"load:" + replica


class PlacementNames:
    """The keys of sessions and adapters; `hash_seed` separates the deployments on one Redis."""

    def __init__(self, *, hash_seed: str) -> None:
        self._key = hashlib.blake2b(hash_seed.encode(), digest_size=32).digest()
        # each request needs its keys twice, before and after its pick: with cold caches a hash takes 36 us, a hit 21
        self._digest = lru_cache(maxsize=KNOWN_NAMES)(self._new_digest)

    def session(self, session: str) -> bytes:
        """Return the key that holds the session's endpoint."""
        return PICKERS + b"session:" + self._digest(session)

    def adapter(self, adapter: str) -> bytes:
        """Return the key that holds the adapter's endpoints."""
        return PICKERS + b"adapter:" + self._digest(adapter)

    def _new_digest(self, text: str) -> bytes:
        # a header need not be UTF-8
        data = text.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, key=self._key, digest_size=DIGEST_BYTES).hexdigest().encode()


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint under a key, alone or as one of several."""

    key: bytes
    endpoint: str
    placed_at: float  # unix seconds
    ttl_seconds: float
    is_one_of_several: bool = False  # an adapter may be on several endpoints, a session is on one

    @property
    def name(self) -> bytes:
        """Return the identity of the placement: a later one with the same name replaces it."""
        return self.key + b" " + self.endpoint.encode() if self.is_one_of_several else self.key


class PlacementBook:
    """The placements waiting for their write; one that was written recently is not written again."""

    def __init__(self) -> None:
        self._pending: dict[bytes, Placement] = {}
        self._noted: dict[bytes, tuple[str, float]] = {}  # name -> endpoint, unix second until which it is fresh

    def place(self, placement: Placement, *, moved: bool = False) -> bool:
        """Take a placement; return whether it must be written. `moved`: Redis has had another one since our write."""
        name = placement.name
        endpoint, fresh_until = self._noted.pop(name, ("", 0.0))
        is_news = moved or endpoint != placement.endpoint or placement.placed_at >= fresh_until
        if is_news:
            fresh_until = placement.placed_at + placement.ttl_seconds / 4  # long before it expires
            self._pending.pop(name, None)  # the latest goes last
            self._pending[name] = placement
            _trim(self._pending, MAX_PENDING)
        self._noted[name] = (placement.endpoint, fresh_until)
        _trim(self._noted, MAX_NOTED)
        return is_news

    def take(self) -> list[Placement]:
        """Return the pending placements and forget them."""
        taken, self._pending = list(self._pending.values()), {}
        return taken

    def put_back(self, placements: Iterable[Placement]) -> None:
        """Take back placements whose write has failed, unless there is a newer one."""
        self._pending = {placement.name: placement for placement in placements} | self._pending
        _trim(self._pending, MAX_PENDING)


def _trim(entries: dict[bytes, Any], limit: int) -> None:
    while len(entries) > limit:
        del entries[next(iter(entries))]


def pack_set_load(replica: bytes, record: Record, *, lease_seconds: float) -> bytes:
    """Return the command that stores a replica's bookings for the lease; one reply."""
    return pack("SET", load_key(replica), _encoder.encode(record), "PX", int(lease_seconds * 1000))


def pack_beat(replica: bytes, *, question: bytes, gone: Sequence[bytes]) -> tuple[bytes, int]:
    """Return the commands that keep the list of replicas, and the number of their replies.

    The last two replies are the list, for `read_names`, and the answer to the `question` (empty: `NO_QUESTION`).
    """
    commands = [
        pack("SADD", REPLICAS, replica),
        pack("EXPIRE", REPLICAS, REPLICAS_TTL_SECONDS),
        pack("SMEMBERS", REPLICAS),
        question or NO_QUESTION,
    ]
    if gone:
        commands.insert(0, pack("SREM", REPLICAS, *gone))
    return b"".join(commands), len(commands)


def pack_secret(own: bytes) -> bytes:
    """Return the commands that share a secret unless there is one, and read it: two replies."""
    return pack("SET", SECRET, own, "NX") + pack("GET", SECRET)


def pack_leave(replica: bytes) -> tuple[bytes, int]:
    """Return the commands that remove a replica, and the number of their replies."""
    return pack("DEL", load_key(replica)) + pack("SREM", REPLICAS, replica), 2


def pack_read_loads(replicas: Sequence[bytes]) -> bytes:
    """Return the command that reads the bookings of several replicas; one reply, an array."""
    return pack("MGET", *map(load_key, replicas))


NO_QUESTION = pack_read_loads([b"-"])  # without other replicas, as its reply is an array, too


def pack_read_session(key: bytes) -> bytes:
    """Return the command that reads a session's endpoint; one reply, a string or nil."""
    return pack("GET", key)


def pack_read_adapter(key: bytes, *, since: float) -> bytes:
    """Return the command that reads an adapter's placements after `since` (unix seconds); one reply."""
    return pack("ZRANGEBYSCORE", key, f"({since:.3f}", "+inf")


def pack_placement(placement: Placement) -> tuple[bytes, int]:
    """Return the commands that store a placement and expire old ones under its key; and the number of replies."""
    key, ttl_ms = placement.key, int(placement.ttl_seconds * 1000)
    if not placement.is_one_of_several:
        return pack("SET", key, placement.endpoint, "PX", ttl_ms), 1
    commands = (
        pack("ZADD", key, f"{placement.placed_at:.3f}", placement.endpoint),
        pack("ZREMRANGEBYSCORE", key, "-inf", f"{placement.placed_at - placement.ttl_seconds:.3f}"),
        pack("PEXPIRE", key, ttl_ms),
    )
    return b"".join(commands), len(commands)


def read_names(reply: list[Any], *, own: bytes) -> list[bytes]:
    """Return the other replicas in the list, sorted; invalid names are left out."""
    return sorted(name for name in reply if isinstance(name, bytes) and name != own and _NAME.fullmatch(name))


def read_load(value: Any) -> Record | None:
    """Return a replica's bookings, or None if they cannot be read."""
    if not isinstance(value, bytes) or len(value) > MAX_RECORD_BYTES:
        return None
    try:
        return _decoder.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def read_session(reply: Any) -> str | None:
    """Return a session's endpoint; the caller checks whether it exists."""
    try:
        return str(reply, "utf-8") if isinstance(reply, bytes) else None
    except UnicodeDecodeError:
        return None


def read_adapter(reply: Any) -> frozenset[str]:
    """Return an adapter's endpoints; the caller checks whether they exist."""
    if not isinstance(reply, list):
        return frozenset()
    return frozenset(text for text in map(read_session, reply) if text is not None)


class HeardReplicas:
    """The other replicas: their names, and their bookings as last read."""

    def __init__(self, *, own: bytes, lease_seconds: float) -> None:
        self.question = b""  # the command that asks for all others' bookings; empty while there are none
        self.others: Mapping[str, EndpointBookings] = {}
        self.replicas = 0  # other replicas with bookings
        self._own = own
        self._lease_seconds = lease_seconds
        self._names: list[bytes] = []
        self._silent_since: dict[bytes, float] = {}  # listed replica without a lease -> monotonic seconds
        self._heard_at: float | None = None
        self._values: list[Any] = []
        self._records: dict[bytes, Record] = {}  # raw -> parsed, of the last answer

    def is_fresh(self, *, now: float) -> bool:
        """Return whether the last answer is still usable: not older than the lease."""
        return self._heard_at is not None and now - self._heard_at <= self._lease_seconds

    def hear(self, values: list[Any], *, now: float) -> None:
        """Take the answer to the question, which is often unchanged."""
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
        # not from `records`: two replicas may have equal records
        said = [records[value] for value in values if value in records]
        self.others = add_bookings(said)
        self.replicas = len(said)
        self._values, self._records = values, records

    def learn(self, names: Any, loads: Any, *, now: float) -> list[bytes]:
        """Take the list of replicas and the answer to the question; return the replicas that were silent too long."""
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
        known = set(there)  # built once: a foreign writer may have filled the list
        self._silent_since = {name: at for name, at in self._silent_since.items() if name in known}
        if len(there) > MAX_REPLICAS:  # prefer replicas that have answered, or were not asked yet
            there = sorted(sorted(there, key=lambda name: name in self._silent_since)[:MAX_REPLICAS])
        if there != self._names:
            self._names = there
            self.question = pack_read_loads(there) if there else b""
            if not there:
                self.hear([], now=now)
        return gone
