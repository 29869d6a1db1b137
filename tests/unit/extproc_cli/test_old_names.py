"""An option that was renamed is still read under its old name, which nothing shows."""

import re
from pathlib import Path
from typing import Any

import pytest

from extproc.cli import ENVIRONMENT_PREFIX, OLD_NAMES, build

RENAMED = [(words, new, old) for words, names in OLD_NAMES.items() for new, old in names.items()]


def command(words: str) -> Any:
    """Return one command of the tree."""
    found = build()
    for word in words.split():
        found = found.commands[word]
    return found


def read(words: str, *flags: str) -> dict[str, Any]:
    """Return what a command reads from its flags, the environment, and a file that one of the flags names."""
    root = build()
    found = root
    for word in words.split():
        found = found.commands[word]
    required = {"audit verify": ["x"], "models fetch": ["org/model"], "explain": ["body"]}.get(words, [])
    above = root.make_context("kvmesh", words.split())
    given: dict[str, Any] = found.make_context(words, [*flags, *required], parent=above).params
    return given


def as_read(value: Any) -> list[str]:
    """Return it as texts, whether it may be repeated or not."""
    return [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]


@pytest.mark.parametrize(("words", "new", "old"), RENAMED)
def test_an_old_name_is_read_everywhere(
    words: str, new: str, old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = tmp_path / "given", tmp_path / "settings.yaml"
    folder.mkdir()
    value = str(folder)
    assert as_read(read(words, f"--{old.replace('_', '-')}", value)[new]) == [value]
    assert as_read(read(words, f"--{new.replace('_', '-')}", value)[new]) == [value]
    needed = [option.opts[0] for option in command(words).params if option.required and option.name == new]
    file.write_text(f"{old}: {value}\n", encoding="utf-8")
    monkeypatch.setenv(f"{ENVIRONMENT_PREFIX}CONFIG", "")
    assert as_read(read(words, "--config", str(file))[new]) == [value], needed
    monkeypatch.delenv(f"{ENVIRONMENT_PREFIX}CONFIG")
    monkeypatch.setenv(f"{ENVIRONMENT_PREFIX}{old.upper()}", value)
    assert as_read(read(words)[new]) == [value]
    other = tmp_path / "other"
    other.mkdir()
    assert as_read(read(words, f"--{new.replace('_', '-')}", str(other))[new]) == [str(other)]


def test_of_two_names_in_a_file_the_old_one_counts_as_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file from before the new name may have it for another command."""
    file = tmp_path / "settings.yaml"
    file.write_text("picker: http://doctor:1\nurl: http://top:2\n", encoding="utf-8")
    monkeypatch.setenv(f"{ENVIRONMENT_PREFIX}CONFIG", "")
    assert read("top", "--config", str(file))["picker"] == ["http://top:2"]
    assert read("doctor", "--config", str(file))["picker"] == "http://doctor:1"


@pytest.mark.parametrize(("words", "new", "old"), RENAMED)
def test_nothing_shows_an_old_name(words: str, new: str, old: str, capsys: pytest.CaptureFixture[str]) -> None:
    build()([*words.split(), "-h"], prog_name="kvmesh", standalone_mode=False)
    shown = capsys.readouterr().out
    assert re.search(rf"--{new.replace('_', '-')}\b", shown)
    assert not re.search(rf"--{old.replace('_', '-')}\b", shown)
    assert old not in {option.name for option in command(words).params}
