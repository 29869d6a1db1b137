"""Audit files on a real disk: rotated, continued after a restart and a crash, full; and what `verify` says of them."""

import asyncio
import errno
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from extproc.ledger import record_targets
from extproc.ledger.access_log import AccessRecord, RecordBuffer
from extproc.ledger.audit_chain import AuditChain, AuditKey
from extproc.ledger.record_targets import RecordFile, RecordLines, RecordStream, StandardOutput
from extproc.ledger.write_records import RequestRecords, StreamWriter, WriterThread
from extproc.settings.observation_settings import AccessLogTargets, ObservationSettings
from operate.audit.commands import app
from tests.integration.kv_redis import RedisServer

DEADLINE_SECONDS = 10.0
KEYS = "k1:sixteen bytes and more"
KEY = AuditKey(id="k1", secret=b"sixteen bytes and more")


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Process:
    """One picker's writer of one file."""

    def __init__(self, path: Path, *, chain: str, max_bytes: int = 1 << 20, files: int = 100) -> None:
        self.buffer = RecordBuffer("file")
        self.file = RecordFile(path, max_bytes=max_bytes, files=files)
        lines = RecordLines(self.buffer, chain=AuditChain(chain, key=KEY), key=KEY, process="host/1", version="0")
        self.thread = WriterThread(lines, self.file, pause_seconds=0.001)

    def decide(self, count: int) -> None:
        for number in range(count):
            self.buffer.put(
                AccessRecord(kind="decision", at=time.time(), fate="routed", decided_us=1, request_id=f"r{number}")
            )

    def close(self) -> None:
        self.thread.end()
        self.thread.join()

    def crash(self) -> None:
        """Leave the file as it is; another process may have it."""
        until(lambda: not self.buffer._waiting)
        self.thread._target = _Gone()
        self.close()
        self.file.close()


class _Gone(StandardOutput):
    def write(self, lines: Sequence[bytes]) -> None:
        pass


def verify(*files: Path, keys: Path, options: Sequence[str] = ()) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["audit", "verify", *map(str, files), "--audit-key-file", str(keys), *options])
    return result.exit_code, result.output


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    return path


def test_a_chain_goes_on_over_rotated_files_of_which_the_oldest_go(tmp_path: Path, keys: Path) -> None:
    log = tmp_path / "audit.log"
    process = Process(log, chain="c1", max_bytes=2000, files=3)
    for written in range(40):
        process.decide(5)
        until(lambda: process.buffer.written >= 5 * (written + 1))  # noqa: B023
    process.close()
    files = sorted(path for path in tmp_path.iterdir() if path.name.startswith("audit"))
    assert [path.name for path in files] == ["audit.log", "audit.log.1", "audit.log.2"]
    assert all(path.stat().st_size < 20_000 for path in files)  # a batch more than asked for, at most
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}
    code, words = verify(*files, keys=keys)
    assert code == 0, words
    assert "the files before are not given" in words
    code, words = verify(files[0], files[2], keys=keys)
    assert (code, "lines are missing" in words) == (1, True)
    assert verify(*files, keys=keys, options=["--whole"])[0] == 1


def test_a_restart_and_a_crash_go_on_in_the_same_file(tmp_path: Path, keys: Path) -> None:
    log = tmp_path / "audit.log"
    first = Process(log, chain="c1")
    first.decide(3)
    first.close()
    second = Process(log, chain="c2")
    second.decide(3)
    second.crash()
    third = Process(log, chain="c3")
    third.close()
    code, words = verify(log, keys=keys)
    assert code == 3, words  # a crash and a manipulation look the same where there is no `close`
    assert words.count(", closed;") == 2
    assert words.count(", ended;") == 1

    lines = log.read_bytes().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if b'"chain":"c3"' in line)
    log.write_bytes(b"".join([*lines[: at - 1], *lines[at:]]))  # the last line before the crash

    code, words = verify(log, keys=keys)
    assert (code, "cut-end" in words) == (1, True), words


def test_a_disk_that_is_full_for_a_while_loses_nothing(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("extproc.ledger.write_records.RETRY_SECONDS", 0.005)
    log = tmp_path / "audit.log"
    process = Process(log, chain="c1")
    until(lambda: process.buffer.written == 1)
    write, failures = process.file.write, 3

    def full(lines: Sequence[bytes]) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError(errno.ENOSPC, "no space left on device")
        write(lines)

    monkeypatch.setattr(process.file, "write", full)
    process.decide(10)
    until(lambda: process.buffer.written == 11)
    process.close()
    assert failures < 0
    assert "the access log cannot be written" in caplog.text
    code, words = verify(log, keys=keys)
    assert (code, "10 decisions, 0 dropped" in words) == (0, True), words


def test_a_file_that_cannot_be_opened_for_a_while_costs_none_of_the_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "audit.log"
    file = RecordFile(log, max_bytes=10, files=3)
    for name in ("one", "two", "three"):
        file.write((name.encode() + b" is ten bytes\n",))
        if name != "three":
            file.rotate()
    before = {path.name: path.read_text().split()[0] for path in tmp_path.iterdir()}
    assert before == {"audit.log.2": "one", "audit.log.1": "two", "audit.log": "three"}
    opened = record_targets._opened

    def no_more_files(path: Path) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(record_targets, "_opened", no_more_files)
    for _ in range(5):
        with pytest.raises(OSError, match="too many open files"):
            file.rotate()
    left = {path.read_text().split()[0] for path in tmp_path.iterdir()}
    assert (left, log.read_text().split()[0]) == ({"one", "two", "three"}, "three")
    monkeypatch.setattr(record_targets, "_opened", opened)
    file.rotate()
    after = {path.name: path.read_text().split()[:1] for path in tmp_path.iterdir()}
    assert after == {"audit.log.2": ["two"], "audit.log.1": ["three"], "audit.log": []}
    file.close()


def test_a_new_key_in_the_file_begins_a_chain_of_its_own_and_a_broken_file_changes_nothing(
    tmp_path: Path, keys: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.ledger.record_targets.HEARTBEAT_SECONDS", 0.02)
    log = tmp_path / "audit.log"
    settings = ObservationSettings(access_log=AccessLogTargets(file=log), audit=True, audit_key_file=keys)
    records = RequestRecords(settings, redis_url="redis://127.0.0.1:1/0")
    names = records.log._names
    until(lambda: b'"alive"' in log.read_bytes())
    keys.write_text("too short")
    until(lambda: "the audit key stays as it was" in caplog.text)
    keys.write_text(f"{KEYS}\nk2:another one of sixteen bytes\n")
    until(lambda: b'"key_id":"k2"' in log.read_bytes())
    assert records.log._names is not names
    asyncio.run(records.close())
    code, words = verify(log, keys=keys, options=["--whole"])
    assert (code, words.count(", closed;")) == (0, 2), words
    assert caplog.text.count("the audit key stays as it was") == 1
    keys.write_text(KEYS)
    assert verify(log, keys=keys)[0] == 2  # the second chain's key is not given


def test_a_file_that_was_moved_away_is_left_there_and_the_chain_goes_on_in_a_new_one(
    tmp_path: Path, keys: Path
) -> None:
    log, moved = tmp_path / "audit.log", tmp_path / "moved.log"
    process = Process(log, chain="c1")
    process.decide(3)
    until(lambda: process.buffer.written == 4)
    log.rename(moved)
    process.decide(3)
    until(lambda: process.buffer.written == 8)
    process.close()
    code, words = verify(log, moved, keys=keys, options=["--whole"])
    assert (code, "6 decisions" in words) == (0, True), words


def test_the_lines_of_a_stream_are_read_as_they_are_verified(tmp_path: Path, keys: Path) -> None:
    redis = RedisServer(tmp_path)
    redis.start()
    try:
        buffer = RecordBuffer("stream")
        lines = RecordLines(buffer, chain=AuditChain("c1", key=KEY), key=KEY, process="host/1", version="0")

        async def write() -> None:
            writer = StreamWriter(lines, RecordStream(redis.url, name="audit", length=5000), pause_seconds=0.001)
            task = asyncio.create_task(writer.run())
            for number in range(1200):  # more than are read at once
                buffer.put(AccessRecord(kind="decision", at=time.time(), fate="routed", decided_us=number))
            async with asyncio.timeout(DEADLINE_SECONDS):
                while buffer.written < 1201:
                    await asyncio.sleep(0.002)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await writer.close()

        asyncio.run(write())
        read = CliRunner().invoke(app, ["audit", "read", "--redis", redis.url, "--stream", "audit"])
        assert read.exit_code == 0, read.output
        printed = tmp_path / "lines"
        printed.write_bytes(read.stdout_bytes)
        code, words = verify(printed, keys=keys, options=["--interleaved", "--whole"])
        assert (code, "1200 decisions" in words) == (0, True), words
        nothing = CliRunner().invoke(app, ["audit", "read", "--redis", redis.url, "--stream", "another"])
        assert (nothing.exit_code, nothing.stdout_bytes) == (0, b"")
    finally:
        redis.kill()
    gone = CliRunner().invoke(app, ["audit", "read", "--redis", redis.url, "--stream", "audit"])
    assert gone.exit_code != 0


def test_the_command_tells_by_its_exit_code(tmp_path: Path, keys: Path) -> None:
    log = tmp_path / "audit.log"
    process = Process(log, chain="c1")
    process.decide(3)
    process.close()
    content = log.read_bytes()
    code, words = verify(log, keys=keys)
    anchor = words.split("anchor ")[1].splitlines()[0]
    assert verify(log, keys=keys, options=["--expect", anchor])[0] == 0
    assert CliRunner().invoke(app, ["audit", "verify", str(log)]).exit_code == 2  # no key
    verdict = json.loads(verify(log, keys=keys, options=["-o", "json"])[1])
    assert (verdict["findings"], verdict["chains"][0]["decisions"]) == ([], 3)

    log.write_bytes(content.replace(b'"r1"', b'"r9"'))
    code, words = verify(log, keys=keys)
    assert (code, f"{log}:3: changed" in words.replace("\n", "")) == (1, True), words

    long_ago = [line for line in content.splitlines(keepends=True) if b'"close"' not in line]
    log.write_bytes(b"".join(long_ago))
    assert verify(log, keys=keys)[0] == 0  # it may still be written
    assert verify(log, keys=keys, options=["--expect", anchor])[0] == 1

    log.write_text("")
    assert verify(log, keys=keys)[0] == 2  # no chain at all
