"""Verifies audit chains: finds every changed, missing, added, moved, truncated or foreign line.

Pure: lines in, a verdict out. Gaps that the writer reported (`gap`) and an end without `close` (a killed process) are
notes; findings have no explanation but manipulation.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hmac import compare_digest
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import structs

from extproc.ledger.audit_chain import CLOSE, CONTINUED, FIRST_PREV, GAP, HEAD, AuditKey, ChainEnd, line_hash

_LINE = re.compile(rb'(\{.*),"hash":"([0-9a-f]{64})"\}', re.DOTALL)
STALE_HEARTBEATS = 3  # heartbeat intervals of silence after which a chain counts as no longer written
CLOSED, OPEN, ENDED, UNENDED = "closed", "open", "ended", "unended"  # states of a chain


class Wrong(StrEnum):
    """The kind of manipulation."""

    CHANGED = "changed"
    UNREADABLE = "unreadable"
    MISSING = "missing"
    REORDERED = "reordered"
    REPEATED = "repeated"
    SPLICED = "spliced"
    CUT_BEGINNING = "cut-beginning"
    CUT_END = "cut-end"
    AFTER_CLOSE = "after-close"
    UNKEYED = "unkeyed"
    NOT_FOUND = "expected-not-found"


class AuditFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A defect that only manipulation explains."""

    wrong: Wrong
    where: str  # file:line
    words: str


class ChainSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A chain, as far as its lines are given."""

    chain: str
    process: str
    first_seq: int
    last_seq: int
    last_hash: str
    last_at: float  # unix seconds
    decisions: int
    dropped: int  # records, by the writer's own count
    state: str  # closed, open (still written), ended (no `close`, but a later head confirms this end), unended


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the verification."""

    lines: int
    chains: Sequence[ChainSummary]
    findings: Sequence[AuditFinding]
    notes: Sequence[str]

    @property
    def is_whole(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    @property
    def is_ended(self) -> bool:
        """Whether each chain is closed or still being written."""
        return all(chain.state in (CLOSED, OPEN) for chain in self.chains)


class MissingKeyError(Exception):
    """A chain is keyed and its key was not given, so it cannot be verified."""


class _Record(msgspec.Struct, frozen=True):
    """The fields read from a line; a manipulated file may hold any values."""

    chain: str
    seq: Annotated[int, msgspec.Meta(ge=0)]
    prev: str
    kind: str = ""
    at: float = 0.0  # unix seconds
    dropped: int = 0
    key_id: str | None = None
    process: str = ""
    heartbeat_seconds: float = 60.0
    after: ChainEnd | None = None


_DECODER = msgspec.json.Decoder(_Record)


class _Link(_Record, frozen=True):
    """A line of a chain; a wrong hash is already reported as a finding."""

    where: str = ""
    hash: str = ""

    @property
    def end(self) -> ChainEnd:
        return ChainEnd(chain=self.chain, seq=self.seq, hash=self.hash)


@dataclass(slots=True)
class _Run:
    """Consecutive lines of a chain within a file."""

    first: _Link
    last: _Link
    decisions: int = 0
    dropped: int = 0

    def add(self, link: _Link) -> None:
        self.last = link
        self.decisions += link.kind == "decision"
        self.dropped += link.dropped if link.kind == GAP else 0


@dataclass(slots=True)
class _Reading:
    keys: Mapping[str, AuditKey]
    interleaved: bool
    findings: list[AuditFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    runs: list[_Run] = field(default_factory=list)
    chain_keys: dict[str, str | None] = field(default_factory=dict)  # chain -> key id, or None if unkeyed
    processes: dict[str, str] = field(default_factory=dict)
    heartbeats: dict[str, float] = field(default_factory=dict)
    known_ends: set[tuple[str, int, str]] = field(default_factory=set)  # chain ends recorded in later heads
    lines: int = 0

    def find(self, wrong: Wrong, where: str, words: str) -> None:
        self.findings.append(AuditFinding(wrong=wrong, where=where, words=words))


def verify_chains(
    files: Iterable[tuple[str, Iterable[bytes]]],
    *,
    keys: Mapping[str, AuditKey],
    now: float,
    whole: bool = False,
    interleaved: bool = False,
    expected: Sequence[ChainEnd] = (),
) -> Verdict:
    """Verify the files of one target, in any order; `now` is unix seconds.

    `whole`: files removed by rotation count as missing. `interleaved`: a file may hold several chains, which may begin
    anywhere and repeat lines, as in a stream that pickers share and Redis trims. `expected`: lines noted elsewhere that
    must be present. Raise MissingKeyError.
    """
    reading = _Reading(keys=keys, interleaved=interleaved)
    looked_for = {(each.chain, each.seq): each.hash for each in expected}
    for name, lines in files:
        _read_file(reading, name, lines, looked_for)
    for chain, seq in looked_for:
        reading.find(Wrong.NOT_FOUND, chain, f"line {seq} with the expected hash is not there")
    chains = _join(reading, whole=whole, now=now)
    return Verdict(lines=reading.lines, chains=chains, findings=reading.findings, notes=reading.notes)


def _read_file(reading: _Reading, name: str, lines: Iterable[bytes], looked_for: dict[tuple[str, int], str]) -> None:
    run: _Run | None = None
    torn: str | None = None  # position of an incomplete line, as a killed process leaves it
    is_begin = True
    in_chain: dict[str, _Run] = {}  # the chain's last run in this file
    seen: dict[str, set[tuple[int, str]]] = {}
    for number, raw in enumerate(lines, start=1):
        where = f"{name}:{number}"
        reading.lines += 1
        if torn is not None:
            reading.find(Wrong.UNREADABLE, torn, "the line is no record of a chain")
            torn = None
        link = _link(reading, raw, where)
        if link is None:
            torn = where
            is_begin = False
            continue
        if looked_for.get((link.chain, link.seq)) == link.hash:
            del looked_for[link.chain, link.seq]
        if interleaved := reading.interleaved:
            run = in_chain.get(link.chain)
            if (link.seq, link.hash) in seen.setdefault(link.chain, set()):
                continue  # a repeated write after a lost reply
            seen[link.chain].add((link.seq, link.hash))
        run = _follow(reading, run, link, is_begin=is_begin or interleaved)
        in_chain[link.chain] = run
        is_begin = False
    if torn is not None:
        reading.find(Wrong.CUT_END, torn, "the last line is not whole: the file was cut, or its writer killed")


def _link(reading: _Reading, raw: bytes, where: str) -> _Link | None:
    """Parse a line, or return None if it is no record. A changed line is a finding but keeps its place in the chain."""
    found = _LINE.fullmatch(raw[:-1]) if raw.endswith(b"\n") else None
    if found is None:
        return None
    linked, own_hash = found[1], found[2].decode()
    try:
        record = _DECODER.decode(linked + b"}")
    except (msgspec.DecodeError, ValueError, RecursionError):  # ValueError: not UTF-8
        return None
    chain, seq = record.chain, record.seq
    if record.kind in (HEAD, CONTINUED):
        _enter(reading, record, chain, where)
    if chain not in reading.chain_keys and not _guess_key(reading, chain, linked, own_hash, where):
        reading.find(Wrong.CHANGED, where, f"line {seq} of chain {chain} is not what its hash says under any given key")
    elif not compare_digest(line_hash(linked, _key_of(reading, chain, where)), own_hash):
        reading.find(Wrong.CHANGED, where, f"line {seq} of chain {chain} is not what its hash says")
    return _Link(**structs.asdict(record), where=where, hash=own_hash)


def _key_of(reading: _Reading, chain: str, where: str) -> AuditKey | None:
    key_id = reading.chain_keys[chain]
    if key_id is None:
        return None
    if key_id not in reading.keys:
        raise MissingKeyError(f"{where}: the chain is keyed with the key {key_id!r}, which is not given")
    return reading.keys[key_id]


def _guess_key(reading: _Reading, chain: str, linked: bytes, own_hash: str, where: str) -> bool:
    """Find the key of a chain without its head by trying all keys."""
    for key in (None, *reading.keys.values()):
        if compare_digest(line_hash(linked, key), own_hash):
            _set_key(reading, chain, key.id if key is not None else None, where)
            return True
    return False


def _set_key(reading: _Reading, chain: str, key_id: str | None, where: str) -> None:
    if key_id is None and reading.keys:
        reading.find(Wrong.UNKEYED, where, f"chain {chain} has no key, and keys are given: anybody can have written it")
    reading.chain_keys[chain] = key_id


def _enter(reading: _Reading, record: _Record, chain: str, where: str) -> None:
    if chain not in reading.chain_keys:
        _set_key(reading, chain, record.key_id, where)
    elif reading.chain_keys[chain] != record.key_id:
        reading.find(Wrong.CHANGED, where, f"chain {chain} names another key than before")
        return
    reading.processes[chain] = record.process
    reading.heartbeats[chain] = record.heartbeat_seconds
    if record.kind == HEAD and record.after is not None:
        reading.known_ends.add((record.after.chain, record.after.seq, record.after.hash))


def _follow(reading: _Reading, run: _Run | None, link: _Link, *, is_begin: bool) -> _Run:
    if run is not None and link.chain == run.last.chain and link.kind != HEAD:
        _judge_step(reading, run.last, link)
        run.add(link)
        return run
    if link.kind == HEAD:
        if link.seq != 0 or link.prev != FIRST_PREV:
            reading.find(Wrong.SPLICED, link.where, f"a head with the number {link.seq} begins no chain")
        _judge_head(reading, run, link)
    elif not is_begin:
        reading.find(Wrong.SPLICED, link.where, f"lines of chain {link.chain} stand among those of another one")
    elif link.kind != CONTINUED and not reading.interleaved:
        begin = f"the file begins with line {link.seq} of chain {link.chain}"
        reading.find(Wrong.CUT_BEGINNING, link.where, f"{begin}: neither its head nor the mark of a rotated file")
    run = _Run(link, link)
    run.add(link)
    reading.runs.append(run)
    return run


def _judge_step(reading: _Reading, before: _Link, link: _Link) -> None:
    if link.seq == before.seq + 1:
        if link.prev != before.hash:
            words = f"line {link.seq} does not follow the line before it: other history"
            reading.find(Wrong.SPLICED, link.where, words)
        elif before.kind == CLOSE:
            reading.find(Wrong.AFTER_CLOSE, link.where, f"line {link.seq} comes after the chain was closed")
    elif link.seq == before.seq:
        reading.find(Wrong.REPEATED, link.where, f"line {link.seq} is there twice")
    elif link.seq > before.seq:
        missing = link.seq - before.seq - 1
        reading.find(Wrong.MISSING, link.where, f"{missing} lines are missing: {before.seq + 1} to {link.seq - 1}")
    else:
        reading.find(Wrong.REORDERED, link.where, f"line {link.seq} stands after line {before.seq}")


def _judge_head(reading: _Reading, before: _Run | None, link: _Link) -> None:
    seen, end = link.after, before.last.end if before is not None else None
    if seen != end and not reading.interleaved:
        words = f"the next process saw {_at(seen)} at the end, and now it is {_at(end)}"
        reading.find(Wrong.CUT_END, link.where, words)


def _at(end: ChainEnd | None) -> str:
    return f"line {end.seq} of chain {end.chain}" if end is not None else "no line"


def _join(reading: _Reading, *, whole: bool, now: float) -> Sequence[ChainSummary]:
    by_chain: dict[str, list[_Run]] = {}
    for run in reading.runs:
        by_chain.setdefault(run.first.chain, []).append(run)
    summaries = []
    for chain, runs in by_chain.items():
        runs.sort(key=lambda run: run.first.seq)
        first, last = runs[0], runs[-1].last
        if first.first.seq != 0:
            words = f"chain {chain} begins with line {first.first.seq}: the files before are not given"
            if whole:
                reading.find(Wrong.MISSING, first.first.where, words)
            else:
                reading.notes.append(words)
        for before, run in pairwise(runs):
            _judge_step(reading, before.last, run.first)
        dropped = sum(run.dropped for run in runs)
        if dropped:
            reading.notes.append(f"chain {chain}: the writer itself dropped {dropped} records and says so (gap)")
        state = _state(reading, last, now=now)
        if state in (ENDED, UNENDED):
            found_so = ", and the next process found it so" if state == ENDED else ""
            reading.notes.append(
                f"chain {chain} stops at line {last.seq} without `close`{found_so}: its process was killed, or the "
                "end is cut off"
            )
        summaries.append(
            ChainSummary(
                chain=chain,
                process=reading.processes.get(chain, ""),
                first_seq=first.first.seq,
                last_seq=last.seq,
                last_hash=last.hash,
                last_at=last.at,
                decisions=sum(run.decisions for run in runs),
                dropped=dropped,
                state=state,
            )
        )
    return summaries


def _state(reading: _Reading, last: _Link, *, now: float) -> str:
    if last.kind == CLOSE:
        return CLOSED
    if (last.chain, last.seq, last.hash) in reading.known_ends:
        return ENDED
    silent = now - last.at
    return OPEN if silent <= STALE_HEARTBEATS * reading.heartbeats.get(last.chain, 60.0) else UNENDED
