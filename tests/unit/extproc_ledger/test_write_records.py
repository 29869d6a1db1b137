"""Records that cannot be written by the end are counted and reported."""

from collections.abc import Sequence

import pytest

from extproc.ledger import write_records
from extproc.ledger.access_log import GapRecord, RecordBuffer
from extproc.ledger.audit_chain import AuditChain, ChainEnd
from extproc.ledger.record_targets import RecordLines
from extproc.ledger.write_records import BATCH, StreamWriter, WriterThread
from kvmesh.errors import IndexUnavailableError

WAITING = BATCH + 44


class FullDisk:
    """A target that takes nothing."""

    is_full = False

    def last_end(self) -> ChainEnd | None:
        return None

    def write(self, lines: Sequence[bytes]) -> None:
        raise OSError("no space left on device")

    def rotate(self) -> None: ...

    def close(self) -> None: ...


class GoneRedis:
    """A stream that takes nothing."""

    async def write(self, lines: Sequence[bytes]) -> None:
        raise IndexUnavailableError("connection refused")

    async def close(self) -> None: ...


def waiting(*, chain: AuditChain | None = None) -> RecordLines:
    buffer = RecordBuffer("file")
    for at in range(WAITING):
        buffer._waiting.append(GapRecord(at=float(at), dropped=1, why=""))
    return RecordLines(buffer, chain=chain, key=None, process="p", version="1")


def test_what_a_thread_could_not_write_by_the_end_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(write_records, "END_SECONDS", 0.0)
    lines = waiting()
    thread = WriterThread(lines, FullDisk(), pause_seconds=0.001)  # type: ignore[arg-type]
    thread.end()
    thread.join()
    assert lines.buffer.dropped == WAITING
    assert [vars(each)["dropped"] for each in caplog.records if "ends early" in each.message] == [WAITING]


async def test_what_a_stream_could_not_take_by_the_end_is_dropped() -> None:
    lines = waiting(chain=AuditChain("c", key=None))
    writer = StreamWriter(lines, GoneRedis(), pause_seconds=0.001)  # type: ignore[arg-type]
    await writer.close()
    assert lines.buffer.dropped == WAITING + 1  # with the head of the chain
