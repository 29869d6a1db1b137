"""The file with the pods' key: what is taken, what is refused and how that is said, and how it is followed."""

import logging
from pathlib import Path

import pytest
import typer

from kvmesh.errors import SettingError
from kvmesh.pods import pod_key
from kvmesh.pods.pod_access import MAX_KEY_BYTES, PodAccess, read_pod_key, why_refused
from kvmesh.pods.pod_key import LOOK_SECONDS, PodKey, open_key
from kvmesh.secret_file import stamp_of
from operate import cli

KEY = "sk-planted-0a1b2c"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def written(folder: Path, content: bytes) -> Path:
    """Write the file as the kubelet does: another file takes its place."""
    path, new = folder / "key", folder / "new"
    new.write_bytes(content)
    new.replace(path)
    return path


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_the_end_of_a_last_line_is_no_part_of_the_key(tmp_path: Path, end: str) -> None:
    assert read_pod_key(written(tmp_path, f"{KEY}{end}".encode())) == KEY


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty: it needs the key that the pods have as --api-key"),
        (b"\n", "is empty"),
        (f"{KEY}\nother".encode(), "has more than one line"),
        (f"{KEY}\n\n".encode(), "has more than one line"),
        (f"{KEY}\rX-Evil: 1".encode(), "has more than one line"),
        (f"{KEY}\r\nX-Evil: 1\r\n".encode(), "has more than one line"),
        (f"Bearer {KEY}".encode(), "has a space or another character"),
        (f" {KEY}".encode(), "has a space or another character"),
        (f"{KEY} \n".encode(), "has a space or another character"),
        (f"{KEY}\0".encode(), "has a space or another character"),
        (f"{KEY}é".encode(), "has a space or another character"),
        (b"k" * (MAX_KEY_BYTES + 1), f"more than {MAX_KEY_BYTES} bytes"),
        (b"k" * 100_000, "is longer than 65536 bytes"),
    ],
)
def test_what_is_no_key_is_refused_without_being_repeated(tmp_path: Path, content: bytes, said: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(SettingError, match=said) as raised:
        PodAccess(key_file=path).require_usable()
    assert str(path) in str(raised.value)
    assert KEY not in str(raised.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot be read: No such file"):
        read_pod_key(tmp_path / "nowhere")
    with pytest.raises(SettingError, match="is no file with a pod key"):
        read_pod_key(tmp_path)


def test_without_a_file_there_is_no_key() -> None:
    PodAccess().require_usable()
    assert open_key(PodAccess()) is None


def test_a_key_is_followed_and_looked_for_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Path] = []

    def look(path: Path) -> tuple[int, ...]:
        looks.append(path)
        return stamp_of(path)

    monkeypatch.setattr(pod_key, "stamp_of", look)
    clock = Clock()
    key = PodKey(written(tmp_path, KEY.encode()), clock=clock)
    written(tmp_path, b"another\n")

    assert [key.header() for _ in range(3)] == [f"Authorization: Bearer {KEY}\r\n"] * 3
    clock.now += LOOK_SECONDS
    assert [key.header() for _ in range(3)] == ["Authorization: Bearer another\r\n"] * 3
    assert len(looks) == 2


def test_a_file_that_cannot_be_used_leaves_the_last_good_key_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    key = PodKey(written(tmp_path, KEY.encode()), clock=clock)
    with caplog.at_level(logging.INFO):
        path = written(tmp_path, b"")
        for _ in range(3):
            clock.now += LOOK_SECONDS
            assert key.header() == f"Authorization: Bearer {KEY}\r\n"
        assert "is empty" in key.problem
        path.unlink()
        clock.now += LOOK_SECONDS
        assert key.header() == f"Authorization: Bearer {KEY}\r\n"
        assert "cannot be read" in key.problem
        written(tmp_path, b"another")
        clock.now += LOOK_SECONDS
        assert key.header() == "Authorization: Bearer another\r\n"
        assert key.problem == ""
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in said] == [
        "pods are shown the last good key",
        "pods are shown the last good key",
        "the file with the pods' key was read anew",
    ]


def test_the_key_is_in_no_log_line_and_no_repr(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with caplog.at_level(logging.DEBUG):
        key = PodKey(written(tmp_path, KEY.encode()), clock=clock)
        for content in (f"{KEY} {KEY}".encode(), f"{KEY}2".encode()):
            written(tmp_path, content)
            clock.now += LOOK_SECONDS
            key.header()
    assert KEY not in caplog.text
    assert KEY not in repr(key) + repr(PodAccess(key_file=tmp_path / "key"))


@pytest.mark.parametrize(
    ("status", "shows_key", "why"),
    [
        (200, False, None),
        (404, True, None),
        (401, False, "the pod wants a key: give --pod-key-file"),
        (401, True, "the pod does not take the key of --pod-key-file"),
        (403, False, "if it wants a key, give --pod-key-file"),
        (403, True, "compare the file of --pod-key-file"),
    ],
)
def test_a_refusal_says_which_flag_to_give(status: int, shows_key: bool, why: str | None) -> None:
    said = why_refused(status, shows_key=shows_key)
    assert said == why if why is None else why in (said or "")


@pytest.mark.parametrize(
    "command",
    [
        ("extproc", "--endpoints", "127.0.0.1:1"),
        ("indexer", "--endpoints", "127.0.0.1:1", "--model", "tiny"),
        ("doctor", "--endpoints", "127.0.0.1:1"),
        ("up",),
    ],
)
def test_a_file_that_cannot_be_used_prevents_the_start(command: tuple[str, ...], tmp_path: Path) -> None:
    root = cli.build()
    with pytest.raises(typer.BadParameter, match="has a space or another character") as raised:
        root([*command, "--pod-key-file", str(written(tmp_path, f"Bearer {KEY}".encode()))], standalone_mode=False)
    assert raised.value.exit_code == 2
    assert KEY not in raised.value.format_message()
