"""`kvmesh plan`: what its flags say, and what a person reads."""

from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from extproc.errors import ConfigError
from extproc.scaling.plan import Plan
from operate.local.plan_commands import app
from operate.local.plan_view import show
from operate.local.stack_settings import seconds_of
from tests.unit.extproc_scaling.scaled_pool import planned_role


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("15m", 900.0), ("1.5h", 5400.0), ("2d", 172_800.0)])
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text, flag="--in") == seconds


@pytest.mark.parametrize("text", ["", "h", "-1h", "8d", "soon", "nan", "1e9"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--in .*: a duration up to 7d is needed"):
        seconds_of(text, flag="--in")


def test_names_are_shown_as_text_and_a_pool_without_roles_is_named() -> None:
    written = StringIO()
    console = Console(file=written, width=100)
    role = planned_role("[red]x[/red]", "y")
    show([Plan(pool="a/b", of="now", roles=(role,)), Plan(pool="c/d", of="now")], console)
    text = written.getvalue()
    assert "both/[red]x[/red]" in text
    assert "no policy of this pool names a role in spec.autoscale: nothing is planned" in text


def test_a_picker_that_does_not_answer_is_named() -> None:
    result = CliRunner().invoke(app, ["--picker", "http://127.0.0.1:9"])
    assert result.exit_code != 0
    assert "the picker's admin page at http://127.0.0.1:9 does not answer" in str(result.exception)
