"""The terminal view of `kvmesh up`, rendered without a terminal."""

from datetime import UTC
from io import StringIO

from rich.console import Console

from extproc.local.live_view import decision_line, new_decisions, render
from extproc.local.picker_state import DecisionState, EndpointState, IndexState, PickerState

PICKED = DecisionState(
    at=1_700_000_000.0,
    path="/v1/chat/completions",
    endpoint="127.0.0.1:8101",
    matched_tokens=96,
    prompt_tokens=120,
    reasons=("prefix 0.80", "queue-depth 1.00"),
)
SHED = DecisionState(at=1_700_000_001.0, path="/v1/completions", status=503, degraded=("prefix-index-timeout",))
STATE = PickerState(
    now=1_700_000_002.0,
    endpoints=(
        EndpointState(
            address="127.0.0.1:8101", state="ready", cached_blocks=1234, running=2, waiting=1,
            kv_usage=0.5, hit_rate=0.75, picks=9, share=0.9,
        ),
        EndpointState(address="127.0.0.1:8102", state="unreachable", picks=1, share=0.1),
    ),
    index=IndexState(state="ok", sources=2),
    decisions=(SHED, PICKED),
)  # fmt: skip


def text_of(state: PickerState | str) -> list[str]:
    console = Console(file=StringIO(), width=160)
    with console.capture() as capture:
        console.print(render(state, zone=UTC))
    return capture.get().splitlines()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]


def test_each_pod_is_a_row_with_its_cache_load_and_share() -> None:
    rows = [cells(line) for line in text_of(STATE) if "127.0.0.1:8102" in line or "1,234" in line]

    assert rows == [
        ["127.0.0.1:8101", "ready", "1,234", "2", "1", "50%", "75%", "90% (9)"],
        ["127.0.0.1:8102", "unreachable", "0", "-", "-", "-", "-", "10% (1)"],
    ]


def test_each_decision_is_a_row_with_its_reasons_and_what_was_missing() -> None:
    rows = [cells(line) for line in text_of(STATE) if "/v1/" in line]

    assert rows == [
        ["22:13:21", "/v1/completions", "503", "0/0", "degraded: prefix-index-timeout"],
        ["22:13:20", "/v1/chat/completions", "127.0.0.1:8101", "96/120", "prefix 0.80, queue-depth 1.00"],
    ]


def test_a_picker_that_does_not_answer_is_shown_as_such() -> None:
    assert text_of("GET http://x/state: refused") == ["GET http://x/state: refused"]


def test_a_decision_is_one_plain_line_where_there_is_no_terminal() -> None:
    assert [decision_line(decision, zone=UTC) for decision in (PICKED, SHED)] == [
        "22:13:20 /v1/chat/completions -> 127.0.0.1:8101 96/120 prefix 0.80 queue-depth 1.00",
        "22:13:21 /v1/completions -> 503 0/0 degraded=prefix-index-timeout",
    ]


def test_only_decisions_that_were_not_printed_yet_are_new_oldest_first() -> None:
    assert new_decisions((SHED, PICKED), after=0) == [PICKED, SHED]
    assert new_decisions((SHED, PICKED), after=PICKED.at) == [SHED]
