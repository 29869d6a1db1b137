"""The pickers' own keys in Redis: names, records, commands and their replies, and the placements to be written.

Anyone may have written what is read: an unreadable value is left out and never raises. Names of sessions and adapters
are keyed hashes, so that no client's text is in Redis. A placement is a hint for later requests: losing one costs a
cache hit at most, so both books of placements are bounded by dropping the oldest.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from extproc.replicas.shared_load import EndpointBookings
from kvmesh.redis.keys import PICKERS
from kvmesh.redis.link import pack

REPLICAS = PICKERS + b"replicas"  # set of names
REPLICAS_TTL_SECONDS = 60  # after the last picker's end the list is gone
MAX_REPLICAS = 64  # whose bookings are read; a foreign writer that fills the set must not make lookups slow
MAX_RECORD_BYTES = 1 << 20
DIGEST_BYTES = 12
MAX_NAME = 80
MAX_PENDING = 1000  # placements that wait for their write
MAX_NOTED = 20_000  # placements that are known to be written: some 5 MB
KNOWN_NAMES = 1024  # of sessions and adapters whose keys are remembered: some 0.4 MB
_NAME = re.compile(rb"[A-Za-z0-9._:-]{1,%d}" % MAX_NAME)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(dict[str, EndpointBookings])

Record = Mapping[str, EndpointBookings]  # endpoint -> what one replica has booked there


def replica_name(hint: str, unique: str) -> str:
    """Return a name for the list of replicas: the process's readable name, and what makes it unique."""
    plain = re.sub(r"[^A-Za-z0-9._:-]", "_", hint)
    return f"{plain[: MAX_NAME - 1 - len(unique)]}-{unique}"


def load_key(replica: bytes) -> bytes:
    """Return the key of one replica's bookings."""
    return PICKERS + b"load:" + replica


class PlacementNames:
    """The keys of sessions and adapters; those of different deployments on one Redis (`hash_seed`) differ."""

    def __init__(self, *, hash_seed: str) -> None:
        self._key = hashlib.blake2b(hash_seed.encode(), digest_size=32).digest()
        # each request asks twice, before and after its pick: with cold caches hashing takes 36 us, remembering 21
        self._digest = lru_cache(maxsize=KNOWN_NAMES)(self._new_digest)

    def session(self, session: str) -> bytes:
        """Return the key that holds the session's endpoint."""
        return PICKERS + b"session:" + self._digest(session)

    def adapter(self, adapter: str) -> bytes:
        """Return the key that holds the adapter's endpoints."""
        return PICKERS + b"adapter:" + self._digest(adapter)

    def _new_digest(self, text: str) -> bytes:
        # a header may hold what is no UTF-8
        data = text.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, key=self._key, digest_size=DIGEST_BYTES).hexdigest().encode()


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint under a key: the only one there, or one of several."""

    key: bytes
    endpoint: str
    placed_at: float  # unix seconds
    ttl_seconds: float
    is_one_of_several: bool  # an adapter is in several places, a session in one

    @property
    def name(self) -> bytes:
        """Return what a later placement replaces."""
        return self.key + b" " + self.endpoint.encode() if self.is_one_of_several else self.key


class PlacementBook:
    """The placements that are to be written; one that was written recently is not written again."""

    def __init__(self) -> None:
        self._pending: dict[bytes, Placement] = {}
        self._noted: dict[bytes, tuple[str, float]] = {}  # name -> endpoint, unix second until which it is fresh

    def place(self, placement: Placement, *, moved: bool = False) -> bool:
        """Take a placement; return whether it must be written. `moved`: another one was read since ours was."""
        name = placement.name
        endpoint, fresh_until = self._noted.pop(name, ("", 0.0))
        is_news = moved or endpoint != placement.endpoint or placement.placed_at >= fresh_until
        if is_news:
            fresh_until = placement.placed_at + placement.ttl_seconds / 4  # long before it ends
            self._pending.pop(name, None)  # the latest goes last
            self._pending[name] = placement
            _trim(self._pending, MAX_PENDING)
        self._noted[name] = (placement.endpoint, fresh_until)
        _trim(self._noted, MAX_NOTED)
        return is_news

    def take(self) -> list[Placement]:
        """Return what is to be written now."""
        taken, self._pending = list(self._pending.values()), {}
        return taken

    def put_back(self, placements: Iterable[Placement]) -> None:
        """Take back what could not be written, unless there is a newer one."""
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


def pack_leave(replica: bytes) -> tuple[bytes, int]:
    """Return the commands that remove a replica, and the number of their replies."""
    return pack("DEL", load_key(replica)) + pack("SREM", REPLICAS, replica), 2


def pack_read_loads(replicas: Sequence[bytes]) -> bytes:
    """Return the command that reads the bookings of several replicas; one reply, an array."""
    return pack("MGET", *map(load_key, replicas))


NO_QUESTION = pack_read_loads([b"-"])  # in place of a question when there are no others: an array, too


def pack_read_session(key: bytes) -> bytes:
    """Return the command that reads where a session is; one reply, a string or nothing."""
    return pack("GET", key)


def pack_read_adapter(key: bytes, *, since: float) -> bytes:
    """Return the command that reads where an adapter was placed after `since` (unix seconds); one reply."""
    return pack("ZRANGEBYSCORE", key, f"({since:.3f}", "+inf")


def pack_placement(placement: Placement) -> tuple[bytes, int]:
    """Return the commands that remember a placement, and forget what is old under its key; number of their replies."""
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
    """Return the other replicas in the list, in order; what cannot be a name is left out."""
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
