"""A settings class declares its options; every command that takes it has the same ones, and gets checked values."""

import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from extproc.settings.config import PickerSettings, PolicyFlags
from kv_indexer.config import IndexerSettings
from kvmesh.admin.admin_access import AdminAccess
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.errors import SettingError
from kvmesh.options import fails_in_one_line, takes_settings
from kvmesh.redis.address import RedisAccess
from kvmesh.settings import Group, Setting, declarations, group, milliseconds, options_of, setting, text_setting
from operate.cli import build

ACCESS = {option.flag for option in options_of(AdminAccess).values()}
LOGIN = {option.flag for option in options_of(AdminLogin).values()}


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    first: str = setting("one", "The first.", "inner_first")
    second: str | None = setting(None, "The second.", "inner_second")

    def __post_init__(self) -> None:
        if self.second == "refused":
            raise SettingError("--inner-second cannot be used")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    names: tuple[str, ...] = text_setting(("a",), "Names.", read=lambda text: tuple(text.split(",")))
    wait_seconds: float = milliseconds(0.5, "Milliseconds to wait.", "wait_ms", least=1)
    colour: Colour = setting(Colour.RED, "Its colour.")
    is_quiet: bool = setting(False, "Say nothing.", "quiet", switch="--quiet")
    folder: Path | None = setting(None, "A folder.", must_exist=True, is_folder=True)
    numbers: list[int] = setting(
        [], "JSON.", factory=list, given=str, shown="[]", read=msgspec.json.Decoder(list[int]).decode
    )
    inner: Inner = group(Inner())
    other: Inner = group(
        Inner(),
        first=Setting(help="Another.", flag="other_first", given=str | None, shown=None, absent="none"),
        second=Setting(help="Another.", flag="other_second"),
    )
    made_later: int = 7


def called(*flags: str) -> tuple[Outer | None, Result]:
    seen: list[Outer] = []
    app = typer.Typer(rich_markup_mode=None, add_completion=False)

    @app.command()
    @takes_settings
    def command(settings: Outer, port: Annotated[int, typer.Option()] = 1) -> None:
        assert port == 1
        seen.append(settings)

    done = CliRunner().invoke(app, flags)
    return (seen[0] if seen else None), done


def test_what_is_not_given_is_the_field_s_default() -> None:
    assert called()[0] == Outer(other=Inner(first="none"))


def test_what_is_given_is_read_and_put_into_the_field_that_declares_it(tmp_path: Path) -> None:
    flags = ("--names=b,c", "--wait-ms=2", "--colour=blue", "--quiet", f"--folder={tmp_path}", "--numbers=[1,2]")
    assert called(*flags, "--inner-second=x", "--other-first=y")[0] == Outer(
        names=("b", "c"),
        wait_seconds=0.002,
        colour=Colour.BLUE,
        is_quiet=True,
        folder=tmp_path,
        numbers=[1, 2],
        inner=Inner(second="x"),
        other=Inner(first="y"),
    )


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--wait-ms=0", "should be greater than or equal to 1"),
        ("--colour=green", "'green' is not one of"),
        ("--folder=/no/such/folder", "does not exist"),
        ("--inner-second=refused", "--inner-second cannot be used"),
        ("--made-later=1", "No such option"),
    ],
)
def test_a_value_that_is_refused_is_wrong_usage(flag: str, message: str) -> None:
    _, done = called(flag)
    assert (done.exit_code, message in done.output) == (2, True), done.output


def test_help_shows_a_default_in_the_unit_of_the_option() -> None:
    assert "default: 500;" in " ".join(called("--help")[1].output.split())


@pytest.mark.parametrize(("error", "code"), [(SettingError("no"), 2), (ValueError("no"), 1)])
def test_an_expected_error_is_one_line_that_names_the_command(error: Exception, code: int) -> None:
    app = typer.Typer()

    @app.command()
    @fails_in_one_line("it", {SettingError: 2, Exception: 1})
    @takes_settings
    def command(settings: Inner) -> None:
        assert settings == Inner()
        raise error

    done = CliRunner().invoke(app, [])
    assert (done.exit_code, done.stderr) == (code, "kvmesh it: no\n")


@pytest.mark.parametrize("holds", [PickerSettings, PolicyFlags, IndexerSettings])
def test_every_flag_of_a_role_is_in_its_help_and_fills_one_field(holds: type) -> None:
    def flags(group: Group) -> Iterator[str]:
        for _, mark in declarations(group):
            yield from flags(mark) if isinstance(mark, Group) else (mark.flag,)

    found = list(flags(Group(holds=holds)))
    assert len(set(found)) == len(found)
    (command,) = ["indexer"] if holds is IndexerSettings else ["extproc"]
    assert set(found) <= set(dict(commands(build()))[command])


def commands(group: Any, name: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Return every command of a group and of the groups in it, with its options by name."""
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name}{word} ")
        else:
            yield name + word, {option.name: option for option in command.params}


def test_every_command_that_serves_or_asks_admin_pages_takes_all_that_belongs_to_it() -> None:
    found = dict(commands(build()))
    serving = {name for name, options in found.items() if set(options) >= ACCESS}
    asking = {name for name, options in found.items() if "token_file" in options}
    assert serving == {"extproc", "indexer"}
    assert {"explain", "doctor", "policy explain"} <= asking
    assert {name for name, options in found.items() if ACCESS & set(options)} == serving | {"up"}
    assert all(set(found[name]) >= LOGIN for name in asking)


def test_every_command_that_takes_an_address_takes_what_belongs_to_it_and_says_the_same_of_it() -> None:
    connecting = [(name, options) for name, options in commands(build()) if name != "install"]  # which writes it down
    with_redis = {name: options for name, options in connecting if "redis" in options}

    looking = {f"index {word}" for word in ("sources", "lookup", "verify", "size", "clear")}
    assert set(with_redis) == {"audit read", "doctor", "extproc", "indexer", "up", *looking}


def test_a_file_that_cannot_be_used_is_wrong_usage(tmp_path: Path) -> None:
    def nothing(login: AdminLogin) -> None:
        raise AssertionError(login)

    app = typer.Typer()
    app.command()(takes_settings(nothing))
    done = CliRunner().invoke(app, [f"--cert={tmp_path / 'none'}"], env={"COLUMNS": "300"})
    assert (done.exit_code, "no certificate with its key" in done.output) == (2, True)


@pytest.mark.parametrize(
    ("url", "given_as", "warned"),
    [
        ("redis://:hunter2@h:1/0", "--redis=redis://:hunter2@h:1/0", True),
        ("redis://h:1/0", "--redis=redis://h:1/0", False),
        ("redis://:hunter2@h:1/0", "--port=1", False),  # from the environment
    ],
)
def test_a_password_that_is_a_flag_is_warned_of_and_not_repeated(
    url: str, given_as: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[RedisAccess] = []
    monkeypatch.setattr(sys, "argv", ["kvmesh", "indexer", given_as])

    def keep(access: RedisAccess) -> None:
        seen.append(access)

    with caplog.at_level(logging.WARNING):
        takes_settings(keep)(redis=url)
    assert seen == [RedisAccess(url=url)]
    assert ("password_file" in caplog.text) is warned
    assert "hunter2" not in caplog.text
