"""What every command answers: `-h`, `--help`, `--version`, and its words on Tab."""

import pytest

from kvmesh import __version__
from operate import cli
from operate.cli import build

Captured = pytest.CaptureFixture[str]


def told(words: list[str], capsys: Captured) -> str:
    """Return what the command prints."""
    build(words)(words, prog_name="kvmesh", standalone_mode=False)
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["explain"], ["index"], ["index", "verify"], ["extproc"], ["audit", "read"]])
def test_help_has_two_names(words: list[str], capsys: Captured) -> None:
    short = told([*words, "-h"], capsys)
    assert short == told([*words, "--help"], capsys)
    assert "-h, --help" in short


def test_the_version_has_two_names(capsys: Captured) -> None:
    version = told(["--version"], capsys)
    assert version == told(["version"], capsys)
    assert version.startswith(f"kvmesh {__version__} ")


def test_each_command_and_group_says_what_it_is_for() -> None:
    assert [name for name, command in build().commands.items() if not command.get_short_help_str()] == []


def test_words_are_completed(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    for name, value in (
        ("_KVMESH_COMPLETE", "complete_bash"),
        ("COMP_WORDS", "kvmesh index "),
        ("COMP_CWORD", "2"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        build()([], prog_name="kvmesh")
    assert set(capsys.readouterr().out.split()) >= {"lookup", "sources", "verify"}


def test_ctrl_c_while_a_command_is_put_together_has_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
