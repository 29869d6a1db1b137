"""What `kvmesh doctor` prints."""

import io

from rich.console import Console

from extproc.pages.findings import Finding, Severity
from operate.doctor.commands import render, summary

FINE = Finding(check="clocks", severity=Severity.OK, subject="", seen="the clocks agree")
SLOW = Finding(check="redis-latency", severity=Severity.WARNING, subject="redis://r", seen="is slow", fix="move it")
WRONG = Finding(check="tokens", severity=Severity.ERROR, subject="10.0.0.1:8000", seen="[red]\x1b[2J", fix="copy it")


def printed(*findings: Finding) -> list[str]:
    out = io.StringIO()
    render(findings, console=Console(file=out, width=80, highlight=False))
    return out.getvalue().splitlines()


def test_the_worst_comes_first_each_with_its_fix_and_the_last_line_counts() -> None:
    assert [line.rstrip() for line in printed(FINE, SLOW, WRONG)] == [
        "error     [tokens] 10.0.0.1:8000: [red][2J",
        "          → copy it",
        "warning   [redis-latency] redis://r: is slow",
        "          → move it",
        "ok        [clocks] the clocks agree",
        "1 errors, 1 warnings, 1 checks fine",
    ]


def test_a_long_line_is_wrapped_at_words_below_its_beginning_and_never_cut() -> None:
    long = Finding(check="tokens", severity=Severity.ERROR, subject="s", seen="seen " * 30, fix="do this " * 30)

    lines = printed(long)[:-1]
    assert max(map(len, lines)) <= 80
    assert [line[:10].strip() for line in lines] == ["error", *[""] * (len(lines) - 1)]
    assert "".join(lines).count("seen") == 30
    assert " ".join(" ".join(lines).split()).count("do this") == 30


def test_what_there_is_none_of_is_not_counted() -> None:
    assert summary([FINE, FINE]) == "2 checks fine"
