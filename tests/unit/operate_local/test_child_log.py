"""What is kept of a child's output."""

from pathlib import Path

from operate.local.processes import KEPT_LINES, LINE_LIMIT_BYTES, ChildLog


def test_the_last_lines_are_kept_also_when_they_arrive_in_pieces(tmp_path: Path) -> None:
    log = ChildLog(tmp_path / "a.log", limit_bytes=1000)
    for piece in (b"one\ntw", b"o\n\nthr", b"ee"):
        log.write(piece)
    log.close()

    assert log.last_lines(2) == ["two", "three"]
    assert (tmp_path / "a.log").read_bytes() == b"one\ntwo\n\nthree"


def test_the_files_never_hold_more_than_twice_the_limit(tmp_path: Path) -> None:
    log = ChildLog(tmp_path / "a.log", limit_bytes=100)
    for number in range(1000):
        log.write(b"%09d\n" % number)
    log.close()

    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"a.log", "a.log.1"}
    assert max(sizes.values()) <= 100
    assert (tmp_path / "a.log").read_bytes().endswith(b"000000999\n")


def test_memory_is_bounded_for_many_lines_and_for_one_endless_line(tmp_path: Path) -> None:
    log = ChildLog(tmp_path / "a.log", limit_bytes=1000)
    log.write(b"x\n" * 10_000)
    for _ in range(100):
        log.write(b"y" * 1000)
    log.close()

    lines = log.last_lines(10_000)
    assert len(lines) == KEPT_LINES + 1
    assert len(lines[-1]) <= LINE_LIMIT_BYTES


def test_bytes_that_are_no_text_do_not_break_the_report(tmp_path: Path) -> None:
    log = ChildLog(tmp_path / "a.log", limit_bytes=1000)
    log.write(b"\xff\xfe bad\n")
    log.close()

    assert log.last_lines(1) == ["\ufffd\ufffd bad"]


def test_a_full_disk_loses_lines_in_the_file_and_the_child_is_read_all_the_same() -> None:
    log = ChildLog(Path("/dev/full"), limit_bytes=1000)
    log.write(b"one\n")
    log.write(b"two\n")
    assert log.last_lines(5) == ["one", "two"]
    log.close()
