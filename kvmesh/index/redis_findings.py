"""The findings of all indexers in Redis, where the command line reads them: implements `ports.FindingShelf`.

One hash, a field a finding. Hash fields do not expire by themselves in every Redis that we support, so each says when
its indexer last stood by it, by Redis' clock, and whoever comes by takes away what is too old.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from kvmesh.blocks.findings import Finding
from kvmesh.redis.address import RedisAccess
from kvmesh.redis.keys import PREFIX
from kvmesh.redis.link import RedisCalls, pack

log = logging.getLogger(__name__)

FINDINGS = PREFIX + b"findings"
VOID_SECONDS = 30.0  # after which nobody stands by a finding any more; several times `watch_pods.SHARE_SECONDS`
MAX_FINDINGS = 1000  # of all indexers together; a fleet in which more is wrong has one cause
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

    def __init__(self, *, url: RedisAccess | str, indexer: str = "", timeout_seconds: float = 1.0) -> None:
        """Take the `indexer` that shares its findings; one that only reads needs no name."""
        self._redis = RedisCalls(url=url, timeout_seconds=timeout_seconds)
        self._indexer = indexer
        self._is_full = False

    async def read(self) -> tuple[Finding, ...]:
        """Return what any indexer stands by. Raise IndexUnavailableError."""
        now = await self._now()
        return _valid(await self._records(), now=now)

    async def share(self, standing: Collection[Finding], healed: Collection[Finding]) -> tuple[Finding, ...]:
        """Confirm what stands, take away what has healed; return what any indexer stands by.

        What is not confirmed for a while is void. Raise IndexUnavailableError.
        """
        now = await self._now()
        records = await self._records()
        void = {field for field, record in records.items() if record is None or now - record.seen > VOID_SECONDS}
        for finding in healed:
            record = records.get(_field(finding))
            if record is not None and record.indexer == self._indexer:
                void.add(_field(finding))
        ours = {_field(finding): self._record(finding, now) for finding in standing}
        kept = {field: record for field, record in records.items() if field not in void}
        fitting = [field for field in ours if field in kept]
        fresh = [field for field in ours if field not in kept]
        fitting += fresh[: max(MAX_FINDINGS - len(kept), 0)]
        self._tell_full(len(ours) - len(fitting))
        gone = sorted(void - set(fitting))
        if gone:
            await self._redis.call(pack("HDEL", FINDINGS, *gone))
        if fitting:
            pairs = [part for field in fitting for part in (field, msgspec.json.encode(ours[field]))]
            await self._redis.call(pack("HSET", FINDINGS, *pairs))
        return _valid({**kept, **{field: ours[field] for field in fitting}}, now=now)

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.close()

    async def _now(self) -> float:
        seconds, micros = await self._redis.call(pack("TIME"))
        return int(seconds) + int(micros) / 1e6

    async def _records(self) -> dict[bytes, _Record | None]:
        """Return what is there by field; None for what nobody can read."""
        reply: list[Any] = await self._redis.call(pack("HGETALL", FINDINGS))
        return {field: _read(value) for field, value in zip(reply[::2], reply[1::2], strict=True)}

    def _record(self, finding: Finding, now: float) -> _Record:
        return _Record(
            endpoint=finding.endpoint,
            dp_rank=finding.dp_rank,
            reason=finding.reason,
            message=finding.message[:MAX_MESSAGE],
            since=finding.since,
            seen=now,
            indexer=self._indexer,
        )

    def _tell_full(self, left_out: int) -> None:
        if left_out and not self._is_full:
            log.error("%d findings are not shared: Redis holds %d already", left_out, MAX_FINDINGS)
        self._is_full = bool(left_out)


def _field(finding: Finding) -> bytes:
    return f"{finding.subject} {finding.reason}".encode()


def _read(value: bytes) -> _Record | None:
    try:
        return _decoder.decode(value)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _valid(records: Mapping[bytes, _Record | None], *, now: float) -> tuple[Finding, ...]:
    believed = [record for record in records.values() if record is not None and now - record.seen <= VOID_SECONDS]
    findings = [
        Finding(
            endpoint=record.endpoint,
            dp_rank=record.dp_rank,
            reason=record.reason,
            message=record.message,
            since=record.since,
        )
        for record in believed
    ]
    return tuple(sorted(findings, key=lambda finding: finding.key))
