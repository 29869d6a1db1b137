"""Audit chains for tests: lines as a picker writes them, over one file or several."""

from collections.abc import Mapping, Sequence

from extproc.ledger.access_log import AccessRecord, RecordBuffer
from extproc.ledger.audit_chain import AuditChain, AuditKey, ChainEnd
from extproc.ledger.record_targets import RecordLines
from operate.audit.verify import Verdict, verify_chains

NOW = 1_000_000.0
KEY = AuditKey(id="k1", secret=b"sixteen bytes at least")
OTHER_KEY = AuditKey(id="k1", secret=b"another one of sixteen bytes")


class Writer:
    """A picker's record lines, without a target."""

    def __init__(self, chain: str = "c1", *, key: AuditKey | None = None, most: int = 10_000, at: float = NOW) -> None:
        self.now = at
        self.buffer = RecordBuffer("file", most=most, unix_seconds=lambda: self.now)
        self.lines = RecordLines(
            self.buffer,
            chain=AuditChain(chain, key=key),
            key=key,
            process="host/1",
            version="0",
            unix_seconds=lambda: self.now,
        )

    @property
    def end(self) -> ChainEnd:
        assert self.lines.chain is not None
        return self.lines.chain.end

    def head(self, after: ChainEnd | None = None) -> list[bytes]:
        return list(self.lines.head(after))

    def decisions(self, count: int) -> list[bytes]:
        for number in range(count):
            self.buffer.put(
                AccessRecord(kind="decision", at=self.now, fate="routed", decided_us=0, request_id=f"r{number}")
            )
        return list(self.lines.next(count + 1))

    def continued(self) -> list[bytes]:
        return list(self.lines.continued())

    def last(self) -> list[bytes]:
        return list(self.lines.last())


def whole_file(count: int = 5, *, chain: str = "c1", key: AuditKey | None = None) -> list[bytes]:
    """A chain of head (line 1), decisions, and close."""
    writer = Writer(chain, key=key)
    return [*writer.head(), *writer.decisions(count), *writer.last()]


def verdict(
    *files: Sequence[bytes],
    keys: Mapping[str, AuditKey] | None = None,
    now: float = NOW + 1.0,
    whole: bool = False,
    interleaved: bool = False,
) -> Verdict:
    """Verify files that are called 1, 2, …"""
    named = ((str(number), lines) for number, lines in enumerate(files, start=1))
    return verify_chains(named, keys=keys or {}, now=now, whole=whole, interleaved=interleaved)


def wrongs(found: Verdict) -> list[tuple[str, str]]:
    """What is wrong, and where."""
    return [(finding.wrong.value, finding.where) for finding in found.findings]
