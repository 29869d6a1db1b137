"""What `kvmesh index` prints, in a terminal of 80 columns and one of 120."""

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from kv_indexer.inspect.index_audit import Difference
from kv_indexer.inspect.inspect_command import show_audit, show_cleared, show_sizes, show_sources
from kv_indexer.inspect.inspect_index import Cleared, SizeReport, SlotSize, SourceLine, SourcesReport
from kv_indexer.inspect.verify_index import Audit
from kvmesh.blocks.findings import Finding

LINE = SourceLine(
    endpoint="10.0.0.1:8000",
    dp_rank=0,
    tier="GPU",
    slot=4,
    state="live",
    reason="",
    epoch=3,
    last_seq=41234,
    lag_seconds=0.0041,
    idle_seconds=2.5,
    blocks=90_000,
    block_size=16,
    events=500,
    events_per_second=312.5,
    owner="node-7:4242:9f3c",
)
REPORT = SourcesReport(sources=(LINE,), indexer_alive=True, findings=(), unreadable=())
AUDIT = Audit(
    sources=2,
    block_keys=1000,
    held_blocks=1500,
    waiting_for_sweep=0,
    partial_blocks=0,
    passes=1,
    looked_at_again=0,
    counts={},
    listed=(),
)


def shown(show: Any, value: Any, *, width: int = 80) -> list[str]:
    console = Console(file=StringIO(), width=width, highlight=False)
    show(value, console=console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def test_sources_fit_a_narrow_terminal_and_owners_get_a_line() -> None:
    assert shown(show_sources, REPORT) == [
        "source          tier state epoch sequence lag blocks events/s",
        "10.0.0.1:8000#0 GPU  live      3    41234 4ms 90,000    312.5",
        "followed by node-7:4242:9f3c: 10.0.0.1:8000#0",
    ]


def test_a_wide_terminal_has_room_for_owners_and_idle_times() -> None:
    assert shown(show_sources, REPORT, width=120) == [
        "source          tier state epoch sequence lag idle blocks events/s owner",
        "10.0.0.1:8000#0 GPU  live      3    41234 4ms 2.5s 90,000    312.5 node-7:4242:9f3c",
    ]


def test_large_numbers_fit_80_columns() -> None:
    line = replace(LINE, endpoint="10.244.13.207:8000", state="replaying", epoch=99999, last_seq=9_999_999)
    (heading, row, *_) = shown(
        show_sources, replace(REPORT, sources=(replace(line, lag_seconds=-0.5, blocks=4_000_000, tier="STORAGE"),))
    )

    assert max(len(heading), len(row)) <= 80
    assert row.split() == [
        *("10.244.13.207:8000#0", "STORAGE", "replaying", "99999", "9999999", "-500ms", "4,000,000", "312.5")
    ]


def test_what_is_wrong_is_said_below_once_a_source() -> None:
    degraded = replace(LINE, state="degraded", reason="history-truncated", owner="")
    finding = Finding(endpoint="10.0.0.1:8000", dp_rank=None, reason="no-events", message="see --kv-events", since=1.0)
    report = SourcesReport(
        sources=(degraded, replace(degraded, tier="CPU")),
        indexer_alive=False,
        findings=(finding,),
        unreadable=("slot 7: a block size of 0",),
    )

    assert shown(show_sources, report, width=200)[3:] == [
        "No indexer is alive: nothing keeps the index true, and what is shown was true once.",
        "10.0.0.1:8000#0 is degraded: history-truncated",
        "followed by nobody: 10.0.0.1:8000#0",
        "10.0.0.1:8000 no-events: see --kv-events",
        "not believed: slot 7: a block size of 0",
    ]


def test_a_stream_that_has_claimed_nothing_shows_dashes() -> None:
    line = replace(
        LINE, tier=None, slot=None, last_seq=-1, lag_seconds=None, idle_seconds=None, blocks=0, events_per_second=None
    )

    assert shown(show_sources, replace(REPORT, sources=(line,)))[1] == (
        "10.0.0.1:8000#0 -    live      3        -   -      0        -"
    )


def test_an_empty_index_is_said_to_be_empty() -> None:
    empty = SourcesReport(sources=(), indexer_alive=True, findings=(), unreadable=())

    assert shown(show_sources, empty) == ["The index is empty: no indexer has registered a source yet."]


def test_text_from_redis_is_shown_without_control_characters_and_never_as_markup() -> None:
    line = replace(LINE, tier="[red]x[/red]", reason="\x1b[31mred\nnext", state="degraded")

    lines = shown(show_sources, replace(REPORT, sources=(line,)))

    assert "[red]x[/red]" in lines[1]
    assert lines[2] == "10.0.0.1:8000#0 is degraded: [31mred next"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (-0.2, "-200ms"), (12.34, "12.3s"), (240.0, "4min"), (90_000.0, "25h")],
)
def test_times_are_short(seconds: float, text: str) -> None:
    row = shown(show_sources, replace(REPORT, sources=(replace(LINE, lag_seconds=seconds),)))[1]

    assert row.split()[5] == text


def test_sizes_are_shown_with_what_a_sweep_will_free() -> None:
    live = SlotSize(
        endpoint="10.0.0.1:8000",
        dp_rank=0,
        tier="GPU",
        slot=0,
        live=True,
        blocks=1000,
        holders=1.5,
        bytes=140_000,
        formula_bytes=151_000,
    )
    report = SizeReport(
        sources=(live, replace(live, slot=1, live=False, blocks=0, bytes=2048)),
        bytes=142_048,
        formula_bytes=302_000,
        redis_bytes=5 << 20,
    )

    assert shown(show_sizes, report, width=200) == [
        "source          tier slot blocks holders     bytes a block   formula",
        "10.0.0.1:8000#0 GPU     0  1,000    1.50 136.7 KiB   140 B 147.5 KiB",
        "10.0.0.1:8000#0 GPU     1      0    1.50   2.0 KiB       - 147.5 KiB",
        "of these wait for their sweep: 1, which will free 2.0 KiB",
        "in all 138.7 KiB, by the formula of docs/reference/redis.md 294.9 KiB; this Redis uses 5.0 MiB, for data of "
        "anyone",
    ]


def test_a_recount_without_differences_says_so() -> None:
    assert shown(show_audit, AUDIT) == [
        "recounted 1,500 blocks of 2 sources against 1,000 block keys",
        "no differences",
    ]


def test_differences_are_listed_by_kind_with_what_they_mean() -> None:
    audit = replace(
        AUDIT,
        passes=3,
        waiting_for_sweep=1,
        partial_blocks=4,
        looked_at_again=70,
        counts={"entry": 1, "missing": 60},
        listed=(
            Difference(kind="entry", where="a, slot 1, 00", detail="a reference count of b'0'"),
            Difference(kind="missing", where="a, slot 1", detail="block 11"),
        ),
    )

    assert shown(show_audit, audit) == [
        "recounted 1,500 blocks of 2 sources against 1,000 block keys, in 3 passes",
        "retired slots that wait for their sweep, which is no difference: 1",
        "blocks held by some KV cache groups only, which is no difference: 4",
        "blocks looked at again, because the index is in use or differs: 70",
        "entry: 1 (an unreadable entry of a source)",
        "  a, slot 1, 00: a reference count of b'0'",
        "missing: 60 (a source has a block whose key does not name it: a lost hit)",
        "  a, slot 1: block 11",
        "59 more are counted and not listed",
    ]


def test_a_clear_says_who_will_replay() -> None:
    cleared = [Cleared(stream="a:1#0", epoch=9, owner="one"), Cleared(stream="a:1#1", epoch=10, owner="")]

    assert shown(show_cleared, cleared, width=200) == [
        "a:1#0: its blocks are hidden, epoch 9 has begun; one replays it",
        "a:1#1: its blocks are hidden, epoch 10 has begun; nobody follows it, so it stays empty",
    ]
    assert shown(show_cleared, []) == ["nothing to clear: the source has vanished meanwhile"]


def test_a_line_is_wrapped_at_words() -> None:
    cleared = [Cleared(stream="a:1#1", epoch=10, owner="")]

    assert shown(show_cleared, cleared, width=60) == [
        "a:1#1: its blocks are hidden, epoch 10 has begun; nobody",
        "follows it, so it stays empty",
    ]
