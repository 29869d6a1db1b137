"""`kvmesh plan`: what its flags say, and what a person reads."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from extproc.errors import ConfigError
from extproc.local.plan_commands import app
from extproc.local.plan_view import declared_roles, seconds_of, show
from extproc.scaling.plan import Plan
from extproc.scaling.trace_plan import declared_role

TRACE = Path(__file__).parents[3] / "bench" / "data" / "mooncake_conversation_cut.jsonl"


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("15m", 900.0), ("1.5h", 5400.0), ("2d", 172_800.0)])
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text, flag="--in") == seconds


@pytest.mark.parametrize("text", ["", "h", "-1h", "8d", "soon", "nan", "1e9"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--in .*: a duration up to 7d is needed"):
        seconds_of(text, flag="--in")


def test_pods_by_role() -> None:
    one, two = declared_roles(
        ["role=prefill,prefill=9000,price=4", "role=decode,prefill=9000,decode=2500,streams=64,price=3,min=1,max=9"]
    )
    assert (one.role, one.variants[0].prefill_tokens_per_second, one.variants[0].max_replicas) == ("prefill", 9e3, None)
    assert (two.variants[0].decode_tokens_per_second, two.variants[0].min_replicas, two.variants[0].max_replicas) == (
        2500.0,
        1,
        9,
    )


@pytest.mark.parametrize(
    ("pods", "words"),
    [
        (["prefill"], "'prefill' is none of name=, role=, prefill="),
        (["prefill=9000,colour=red"], "'colour=red' is none of"),
        (["prefill=fast"], "prefill must be a number above 0"),
        (["decode=9"], "prefill= is missing"),
        (["prefill=9,role=encode"], "the role is 'encode'"),
        (["prefill=9,name=a", "prefill=8,name=a"], "'a' is there twice"),
        (["prefill=9", "prefill=8,name=a"], "each needs a name="),
    ],
)
def test_pods_that_cannot_be_read_are_named(pods: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        declared_roles(pods)
    assert words in str(raised.value)


def test_names_are_shown_as_text_and_a_pool_without_roles_is_named() -> None:
    written = StringIO()
    console = Console(file=written, width=100)
    role = declared_role("both", [{"name": "[red]x[/red]", "prefill": 10.0}, {"name": "y", "prefill": 20.0}])
    show([Plan(pool="a/b", of="now", roles=(role,)), Plan(pool="c/d", of="now")], console)
    text = written.getvalue()
    assert "both/[red]x[/red]" in text
    assert "no policy of this pool names a role in spec.autoscale: nothing is planned" in text


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.output + str(result.exception or "")


def test_a_trace_needs_no_picker_where_its_pods_are_declared() -> None:
    code, text = run("--trace", str(TRACE), "--pod", "prefill=8000,decode=2000,price=4", "--times", "50")
    assert code == 0
    assert "262 requests in 3,486 s" in text
    assert "the trace's busiest 300 s" in text
    assert "pod hours" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pod", "prefill=1"], "--pod: only with --trace"),
        (["--trace", "x", "--in", "1h"], "--in: not with --trace"),
        (["--trace", "/nowhere/t.jsonl", "--pod", "prefill=1"], "--trace: cannot read /nowhere/t.jsonl: No such file"),
        (["--picker", "http://127.0.0.1:9"], "the picker's admin page at http://127.0.0.1:9 does not answer"),
    ],
)
def test_mistakes_are_told_in_words(arguments: list[str], words: str) -> None:
    code, text = run(*arguments)
    assert code != 0
    assert words in text
