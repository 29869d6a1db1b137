"""What the view of `kvmesh up` draws when, and that nothing it meets ends it."""

import logging
from datetime import UTC
from io import StringIO

import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text

from extproc.local.live_view import SafeView, draw_lines, draw_pages, new_decisions
from extproc.pages.picker_state import DecisionState, EndpointState, IndexState, PickerState

FIRST = DecisionState(at=1_700_000_000.0, path="/v1/[/x]", endpoint="[fe80::1]:8000")
SECOND = DecisionState(at=1_700_000_001.0, path="/v1/completions", endpoint=None, status=503)


def state(*decisions: DecisionState) -> PickerState:
    return PickerState(
        now=1_700_000_002.0,
        endpoints=(EndpointState(address="[fe80::1]:8000", state="ready"),),
        index=IndexState(state="ok"),
        decisions=decisions,
    )


def terminal() -> Console:
    return Console(file=StringIO(), width=80, height=24, force_terminal=True, color_system=None)


def written(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_path_of_brackets_is_drawn_on_a_terminal() -> None:
    console = terminal()
    with Live(console=console, auto_refresh=False) as live:
        draw_pages(live, zone=UTC, above=[Text("kvmesh is up")])(state(FIRST))

    assert "[fe80::1]:8000  /v1/[/x]" in written(console)


def test_what_cannot_be_drawn_is_logged_once_and_becomes_a_plain_line_and_the_view_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drawn: list[str] = []

    def draw(shown: PickerState | str) -> None:
        if isinstance(shown, PickerState) and shown.decisions == (FIRST,):
            raise ValueError("no\nway")
        drawn.append(shown if isinstance(shown, str) else "state")

    view = SafeView(draw)
    with caplog.at_level(logging.WARNING):
        for shown in (state(FIRST), state(FIRST), state(SECOND)):
            view.show(shown)

    problem = "the mesh runs, but its state cannot be shown: ValueError: no way"
    assert drawn == [problem, problem, "state"]
    assert [record.getMessage() for record in caplog.records] == ["the live view cannot be drawn"]


def test_a_terminal_that_takes_nothing_any_more_does_not_end_the_view() -> None:
    def draw(_: PickerState | str) -> None:
        raise OSError("Input/output error")

    view = SafeView(draw)

    view.show(state(FIRST))
    view.show(state(SECOND))  # not raising is the behaviour


def test_without_a_terminal_each_decision_and_each_problem_is_one_line_once() -> None:
    console = Console(file=StringIO(), width=80)
    draw = draw_lines(console, zone=UTC)
    for shown in (state(FIRST), "gone [/x]", "gone [/x]", state(SECOND, FIRST)):
        draw(shown)

    assert written(console).splitlines() == [
        "22:13:20 /v1/[/x] -> [fe80::1]:8000 0/0",
        "gone [/x]",
        "22:13:21 /v1/completions -> 503 0/0",
    ]


def test_only_decisions_that_were_not_printed_yet_are_new_oldest_first() -> None:
    assert new_decisions((SECOND, FIRST), after=0) == [FIRST, SECOND]
    assert new_decisions((SECOND, FIRST), after=FIRST.at) == [SECOND]
