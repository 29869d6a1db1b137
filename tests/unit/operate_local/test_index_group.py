"""`kvmesh index` is one group of commands from two packages, with the settings that every command has."""

from pathlib import Path
from typing import Any

import pytest

from operate import cli


def run(*arguments: str) -> int:
    """Run `kvmesh …` and return its exit code."""
    root: Any = cli.build()
    return root(list(arguments), prog_name="kvmesh", standalone_mode=False) or 0


def test_the_group_has_the_commands_of_both_packages() -> None:
    root: Any = cli.build()

    assert sorted(root.commands["index"].commands) == ["clear", "lookup", "size", "sources", "verify"]
    assert {"extproc", "indexer", "up", "index", "sim", "version"} <= set(root.commands)


def test_every_command_of_the_group_has_the_options_for_redis_json_config_and_logs() -> None:
    root: Any = cli.build()

    for command in root.commands["index"].commands.values():
        names = {parameter.name for parameter in command.params}
        assert {"redis", "output", "config", "log_level"} <= names, command.name


def test_a_command_of_the_group_takes_its_settings_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVMESH_REDIS", "telnet://nowhere")

    assert run("index", "size") == 2
    assert "kvmesh index size: Redis address 'telnet://nowhere'" in capsys.readouterr().err


def test_a_command_of_the_group_takes_its_settings_from_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kvmesh.yaml"
    path.write_text("redis: telnet://file\ngrpc_port: 1\n", encoding="utf-8")  # one namespace for all commands

    assert run("index", "verify", "--config", str(path)) == 2
    assert "telnet://file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "content", "code", "complaint"),
    [
        (["--redis", "telnet://nowhere"], "[1]", 2, "Redis address 'telnet://nowhere'"),
        (["--redis", "redis://127.0.0.1:1"], "[1]", 1, "cannot connect to Redis"),
        ([], "{", 2, "the file is no JSON"),
        ([], None, 2, "cannot read"),
    ],
)
def test_lookup_says_what_is_wrong_as_the_other_commands_do(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    content: str | None,
    code: int,
    complaint: str,
) -> None:
    path = tmp_path / "prompt.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")

    assert run("index", "lookup", str(path), "--model", "tiny", *options) == code
    said = capsys.readouterr().err
    assert said.startswith(f"kvmesh index lookup: {complaint}")
    assert said.count("\n") == 1
