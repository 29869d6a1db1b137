"""The findings of all indexers in Redis, where the command line and the admin pages read them.

One hash with a field per finding. Not every supported Redis can expire hash fields. So each field says when its indexer
last confirmed it, by Redis' clock, and any indexer that shares its own findings removes expired ones.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from kvmesh.blocks.findings import Finding
from kvmesh.redis.keys import PREFIX
from kvmesh.redis.link import RedisCalls

log = logging.getLogger(__name__)

FINDINGS = PREFIX + b"findings"
VOID_SECONDS = 30.0  # after this time an unconfirmed finding is void; several times `watch_pods.SHARE_SECONDS`
MAX_FINDINGS = 1000  # of all indexers together; a fleet with more faults has a single cause
MAX_MESSAGE = 1000  # characters


class _Record(msgspec.Struct, frozen=True):
    endpoint: str
    dp_rank: int | None
    reason: str
    message: str
    since: float
    seen: float  # Redis' unix seconds
    indexer: str


_decoder = msgspec.json.Decoder(_Record)


class RedisFindings:
    """The shared findings. Raise RedisUrlError."""

    def __init__(self, *, url: str, indexer: str = "", timeout_seconds: float = 1.0) -> None:
        """`indexer`: name of the indexer that shares its findings; a mere reader needs none."""
        self._redis = RedisCalls(url=url, timeout_seconds=timeout_seconds)
        self._indexer = indexer
        self._is_full = False

    async def read(self) -> tuple[Finding, ...]:
        """Return the findings confirmed by any indexer. Raise IndexUnavailableError."""
        now = await self._redis.now()
        return _valid(await self._records(), now=now)

    async def share(self, current: Collection[Finding], healed: Collection[Finding]) -> tuple[Finding, ...]:
        """Confirm the current findings, remove the healed ones; return the findings confirmed by any indexer.

        A finding that is not confirmed for a while is void. Raise IndexUnavailableError.
        """
        now = await self._redis.now()
        records = await self._records()
        void = {field for field, record in records.items() if record is None or now - record.seen > VOID_SECONDS}
        for finding in healed:
            record = records.get(_field(finding))
            if record is not None and record.indexer == self._indexer:
                void.add(_field(finding))
        ours = {_field(each): _Record(**_values(each), seen=now, indexer=self._indexer) for each in current}
        kept = {field: record for field, record in records.items() if field not in void}
        fitting = [field for field in ours if field in kept]
        fresh = [field for field in ours if field not in kept]
        fitting += fresh[: max(MAX_FINDINGS - len(kept), 0)]
        self._log_full(len(ours) - len(fitting))
        gone = sorted(void - set(fitting))
        if gone:
            await self._redis.call("HDEL", FINDINGS, *gone)
        if fitting:
            pairs = [part for field in fitting for part in (field, msgspec.json.encode(ours[field]))]
            await self._redis.call("HSET", FINDINGS, *pairs)
        return _valid({**kept, **{field: ours[field] for field in fitting}}, now=now)

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.close()

    async def _records(self) -> dict[bytes, _Record | None]:
        """Return the records by field; None for an unreadable one."""
        reply: list[Any] = await self._redis.call("HGETALL", FINDINGS)
        return {field: _read(value) for field, value in zip(reply[::2], reply[1::2], strict=True)}

    def _log_full(self, left_out: int) -> None:
        if left_out and not self._is_full:
            log.error("%d findings are not shared: Redis holds %d already", left_out, MAX_FINDINGS)
        self._is_full = bool(left_out)


def _values(finding: Finding | _Record) -> dict[str, Any]:
    values = {name: getattr(finding, name) for name in ("endpoint", "dp_rank", "reason", "message", "since")}
    return values | {"message": finding.message[:MAX_MESSAGE]}


def _field(finding: Finding) -> bytes:
    return f"{finding.subject} {finding.reason}".encode()


def _read(value: bytes) -> _Record | None:
    try:
        return _decoder.decode(value)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _valid(records: Mapping[bytes, _Record | None], *, now: float) -> tuple[Finding, ...]:
    believed = [record for record in records.values() if record is not None and now - record.seen <= VOID_SECONDS]
    return tuple(sorted((Finding(**_values(each)) for each in believed), key=lambda finding: finding.key))
