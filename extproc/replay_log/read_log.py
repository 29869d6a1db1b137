"""The access log, read back: the decisions of one pool in the order of their arrivals.

An audit is read likewise: its further kinds of lines and fields are passed over; whether it is whole is
`kvmesh audit verify`'s concern.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from operator import itemgetter

import msgspec

from extproc.errors import ConfigError
from extproc.records.access_log import MICROSECONDS, AccessRecord
from extproc.records.audit_chain import DECISION, GAP

ROUTED, REFUSED, ABANDONED, FAILED_OPEN = "routed", "refused", "abandoned", "failed-open"
LATEST = 1e11  # unix seconds: no clock shows it
MOST_MICROSECONDS = 10**13  # that a request may take: some months
MOST_TOKENS = 10**7  # of one request
LONG_SECONDS = 86400.0  # without a request: a clock that was set looks like that, too
_LINE = msgspec.json.Decoder(AccessRecord)


class _Kind(msgspec.Struct):
    kind: str = ""
    dropped: int = 0
    chain: str = ""  # and its line's number, of an audit
    seq: int = 0


_KIND = msgspec.json.Decoder(_Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What was recorded of one pool."""

    records: tuple[AccessRecord, ...]  # by arrival
    notes: tuple[str, ...] = ()  # what the log itself says is missing
    began: float = 0.0  # unix seconds of the first arrival


@dataclass(slots=True)
class _Read:
    records: list[AccessRecord] = field(default_factory=list)
    unread: int = 0
    dropped: int = 0
    lines: int = 0
    chained: set[tuple[str, int]] = field(default_factory=set)

    def is_again(self, kind: _Kind) -> bool:
        """Tell whether an audit's line has been read before: a Redis Stream may have it twice."""
        if not kind.chain:
            return False
        before = len(self.chained)
        self.chained.add((kind.chain, kind.seq))
        return len(self.chained) == before


def arrived_at(record: AccessRecord) -> float:
    """Return the unix seconds at which a request had arrived."""
    return record.at - record.decided_us / MICROSECONDS


def read_log(
    lines: Iterable[bytes],
    *,
    pool: str | None,
    where: str,
    after: float = float("-inf"),
    before: float = float("inf"),
) -> Log:
    """Read the lines of one or more files. Raise ConfigError where there is nothing to replay, or several pools.

    Requests count that arrived from `after` on and not yet at `before`, both unix seconds.
    """
    found = _read(lines)
    if not found.records:
        why = f"{found.lines} lines, none of which is a decision" if found.lines else "it is empty"
        raise ConfigError(f"{where}: no access log of a picker (--access-log-file, --audit): {why}")
    inside = [record for record in found.records if after <= arrived_at(record) < before]
    if not inside:
        first, last = (_written(pick(map(arrived_at, found.records))) for pick in (min, max))
        raise ConfigError(f"{where}: no request came in that time; those in it came from {first} to {last}")
    pools = Counter(record.pool for record in inside if record.class_ is not None)
    if pool is None and len(pools) > 1:
        names = ", ".join(f"{name or '(static)'} ({count})" for name, count in pools.most_common())
        raise ConfigError(f"{where}: there are several pools in it, of which --pool takes one: {names}")
    chosen = pool if pool is not None else next(iter(pools), "")
    own = [record for record in inside if record.pool == chosen]
    unasked = sum(record.class_ is None for record in own)
    records = sorted((record for record in own if record.class_ is not None), key=arrived_at)
    if not records:
        raise ConfigError(f"{where}: no request of the pool {chosen!r} in it; there are {', '.join(pools) or 'none'}")
    return Log(records=tuple(records), notes=tuple(_notes(found, records, unasked)), began=arrived_at(records[0]))


def _written(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).isoformat(timespec="seconds")


def _read(lines: Iterable[bytes]) -> _Read:
    found = _Read()
    for line in lines:
        if not line.strip():
            continue
        found.lines += 1
        try:
            kind = _KIND.decode(line)
            if found.is_again(kind):
                continue
            if kind.kind == DECISION and _is_possible(record := _LINE.decode(line)):
                found.records.append(record)
            elif kind.kind == DECISION:
                found.unread += 1
            elif kind.kind == GAP:
                found.dropped += kind.dropped
        except (msgspec.DecodeError, ValueError, RecursionError):
            found.unread += 1
    return found


def _is_possible(record: AccessRecord) -> bool:
    """Tell whether a picker may have written these numbers: a damaged line must not be years of work."""
    times = (record.decided_us, record.queued_us, record.headers_us, record.ended_us, record.first_token_us)
    tokens = (
        *(record.prompt_tokens, record.predicted_cached_tokens, record.realised_prompt_tokens),
        *(record.realised_cached_tokens, record.output_tokens),
    )
    return (
        0 <= record.at <= LATEST
        and all(0 <= each <= MOST_MICROSECONDS for each in times if each is not None)
        and all(0 <= each <= MOST_TOKENS for each in tokens if each is not None)
    )


def _notes(found: _Read, records: list[AccessRecord], unasked: int) -> Iterator[str]:
    if found.unread:
        yield f"{found.unread} lines could not be read"
    if found.dropped:
        yield f"{found.dropped} requests are missing: the picker dropped their lines"
    if unasked:
        yield f"{unasked} requests are left out: they were refused before they were read"
    last, pause = max(
        ((arrived_at(one), arrived_at(two) - arrived_at(one)) for one, two in pairwise(records)),
        key=itemgetter(1),
        default=(0.0, 0.0),
    )
    if pause > LONG_SECONDS:
        yield (
            f"for {pause / LONG_SECONDS:,.0f} days there is no request, from {_written(last)} on: if a clock was set "
            "then, replay what is before or after it with --to or --from"
        )
    shares = {record.share for record in records if record.share is not None}
    if shares:
        yield (
            f"only a share of the requests is in the log (auditShare {min(shares):g}): the load that is replayed is "
            "smaller than it was, and fewer are refused than would be"
        )
