"""The pickers' own keys in Redis: names, records, commands and how their replies read.

`docs/explanation/replicas.md` lists them.

Everything that is read may have been written by anyone: what is not ours to read is left out and never raises. Names of
sessions and adapters are keyed hashes, so that no client's text is in Redis.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from extproc.replicas.shared_load import EndpointBookings
from extproc.replicas.shared_placements import Placement
from kvmesh.redis.keys import PICKERS
from kvmesh.redis.link import pack

REPLICAS = PICKERS + b"replicas"  # set of names
REPLICAS_TTL_SECONDS = 60  # nothing of us is left a minute after the last picker has gone
MAX_REPLICAS = 64  # whose bookings are read; a set that someone has filled must not make lookups slow
MAX_RECORD_BYTES = 1 << 20
DIGEST_BYTES = 12
MAX_NAME = 80
KNOWN_NAMES = 1024  # of sessions and adapters whose keys are remembered: some 0.4 MB
_NAME = re.compile(rb"[A-Za-z0-9._:-]{1,%d}" % MAX_NAME)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(dict[str, EndpointBookings])

Record = Mapping[str, EndpointBookings]  # endpoint -> what one replica has booked there


def replica_name(hint: str, unique: str) -> str:
    """Return a name for the list of replicas: what people know the process by, and what makes it the only one."""
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


def pack_set_load(replica: bytes, record: Record, *, lease_seconds: float) -> bytes:
    """Return the command that stores a replica's bookings for the lease; one reply."""
    return pack("SET", load_key(replica), _encoder.encode(record), "PX", int(lease_seconds * 1000))


def pack_beat(replica: bytes, *, question: bytes, gone: Sequence[bytes]) -> tuple[bytes, int]:
    """Return the commands that keep the list of replicas, and the number of their replies.

    The last two replies are the list, for `read_names`, and the answer to the `question` (empty: `ASK_NOBODY`).
    """
    commands = [
        pack("SADD", REPLICAS, replica),
        pack("EXPIRE", REPLICAS, REPLICAS_TTL_SECONDS),
        pack("SMEMBERS", REPLICAS),
        question or ASK_NOBODY,
    ]
    if gone:
        commands.insert(0, pack("SREM", REPLICAS, *gone))
    return b"".join(commands), len(commands)


def pack_leave(replica: bytes) -> tuple[bytes, int]:
    """Return the commands with which a replica goes, and the number of their replies."""
    return pack("DEL", load_key(replica)) + pack("SREM", REPLICAS, replica), 2


def pack_read_loads(replicas: Sequence[bytes]) -> bytes:
    """Return the command that reads the bookings of several replicas; one reply, an array."""
    return pack("MGET", *map(load_key, replicas))


ASK_NOBODY = pack_read_loads([b"-"])  # in place of a question when there are no others: an array, too


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
    """Return a session's endpoint; the caller sees whether there is such a one."""
    return _text(reply)


def read_adapter(reply: Any) -> frozenset[str]:
    """Return an adapter's endpoints; the caller sees whether there are such ones."""
    if not isinstance(reply, list):
        return frozenset()
    return frozenset(text for text in map(_text, reply) if text is not None)


def _text(value: Any) -> str | None:
    try:
        return str(value, "utf-8") if isinstance(value, bytes) else None
    except UnicodeDecodeError:
        return None
