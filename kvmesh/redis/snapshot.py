"""Reads the whole registry while Redis serves others; `keys.parse_registry` takes the result.

A small registry is read by one script. For a large one the script only lists the records, and plain commands read them
in portions; if the version is unchanged afterwards, they form a consistent snapshot.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvmesh.errors import IndexUnavailableError
from kvmesh.redis.keys import PREFIX, PULSES, REGISTRY, SNAPSHOT_PARTS
from kvmesh.redis.link import pack
from kvmesh.redis.protocol import checked, unless_other_type
from kvmesh.redis.scripts import SNAPSHOT

READ_AT_ONCE = 250  # slots and streams: by script 2 to 5 ms of Redis, by plain commands less than one
ATTEMPTS = 3  # at a consistent snapshot; without one, contradictory records are left out
FIELDS = (
    *(b"endpoint", b"rank", b"epoch", b"last_seq", b"last_ts", b"state"),
    *(b"reason", b"owner", b"fence", b"applied_at", b"events", b"lease_until"),
)

Ask = Callable[[bytes, int], Awaitable[list[Any]]]  # packed commands and their number -> replies, errors as values

_HEAD = pack("EVAL", SNAPSHOT.source, 1, PREFIX, READ_AT_ONCE)
ASK_VERSION = pack("HMGET", REGISTRY, "nonce", "version")
_NOW = pack("TIME") + pack("HGETALL", PULSES)
_OWNER = FIELDS.index(b"owner")
_STREAM = b"*%d\r\n$5\r\nHMGET\r\n" % (len(FIELDS) + 2)
_FIELDS = b"".join(b"$%d\r\n%s\r\n" % (len(each), each) for each in FIELDS)


async def read_snapshot(ask: Ask) -> tuple[list[Any], bool]:
    """Return the result of `snapshot.lua`, and whether it is of one instant: the arguments of `parse_registry`.

    Raise IndexUnavailableError.
    """
    snapshot: list[Any] = []
    for _ in range(ATTEMPTS):
        (reply,) = await ask(_HEAD, 1)
        snapshot = checked(reply)
        if not isinstance(snapshot, list) or len(snapshot) not in (SNAPSHOT_PARTS, SNAPSHOT_PARTS + 1):
            raise IndexUnavailableError(
                "Redis answers something else than was asked; perhaps it is a proxy or no Redis"
            )
        if len(snapshot) == SNAPSHOT_PARTS:
            return snapshot, True
        slots, streams = await _slots(ask, snapshot[3]), await _streams(ask, snapshot[4])
        (version,) = await ask(ASK_VERSION, 1)
        snapshot = [*snapshot[:3], slots, streams]
        if checked(version) == snapshot[:2]:
            return snapshot, True
    return snapshot, False


async def _slots(ask: Ask, records: Sequence[bytes]) -> list[Any]:
    flat: list[Any] = []
    for at in range(0, len(records), 2 * READ_AT_ONCE):
        portion = records[at : at + 2 * READ_AT_ONCE]
        numbers = portion[::2]
        sizes = await ask(b"".join(pack("HLEN", PREFIX + b"h" + number) for number in numbers), len(numbers))
        for number, record, size in zip(numbers, portion[1::2], sizes, strict=True):
            blocks = unless_other_type(size)
            flat += (number, record, -1 if blocks is None else blocks)
    return flat


async def _streams(ask: Ask, names: Sequence[bytes]) -> list[Any]:
    flat: list[Any] = []
    missing = [None] * len(FIELDS)
    for at in range(0, len(names), READ_AT_ONCE):
        portion = names[at : at + READ_AT_ONCE]
        time, beats, *records = await ask(_NOW + b"".join(map(_read_stream, portion)), len(portion) + 2)
        seconds, micros = checked(time)
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        pulses = unless_other_type(beats) or []
        silent = {name for name, until in zip(pulses[::2], pulses[1::2], strict=True) if _number(until) <= now_ms}
        for name, record in zip(portion, records, strict=True):
            fields = unless_other_type(record) or missing
            flat.append(name)
            flat += fields[:-1]
            flat.append(1 if _number(fields[-1]) > now_ms and fields[_OWNER] not in silent else 0)
    return flat


def _read_stream(name: bytes) -> bytes:
    return b"%b$%d\r\n%bstream:%b\r\n%b" % (_STREAM, len(PREFIX) + 7 + len(name), PREFIX, name, _FIELDS)


def _number(text: bytes | None) -> float:
    try:
        return float(text or b"0")
    except ValueError:
        return 0.0
