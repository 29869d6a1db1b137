"""The tables of `kvmesh explain`, at 80 columns."""

from io import StringIO
from typing import Any

import msgspec
from rich.console import Console

from extproc.pages.picker_state import DecisionState
from kvmesh.blocks.cache_groups import CacheGroup
from kvmesh.index.group_match import HeldBack
from operate.local.explain import render

WINNER: dict[str, Any] = {
    "endpoint": "127.0.0.1:8101",
    "state": "ready",
    "full": None,
    "matched_tokens": 96,
    "matched_blocks": 6,
    "waiting": 1,
    "running": 2,
    "kv_usage": 0.25,
    "booked_since_report": 3,
    "scores": {"prefix": 0.8, "queue-depth": 1.0},
    "total": 4.4,
}
UNKNOWN: dict[str, Any] = {
    "endpoint": "[fe80::1]:8000",
    "state": "unknown",
    "full": "9 requests wait there",
    "matched_tokens": 0,
    "matched_blocks": 0,
    "waiting": None,
    "running": None,
    "kv_usage": None,
    "booked_since_report": 0,
    "scores": {"prefix": 0.0},
    "total": 0.0,
}
ROUTED: dict[str, Any] = {
    "endpoint": "127.0.0.1:8101",
    "status": 200,
    "fallbacks": ["[fe80::1]:8000"],
    "prompt_tokens": 120,
    "matched_tokens": 96,
    "degraded": [],
    "weights": {"prefix": 3.0, "queue-depth": 2.0},
    "candidates": [UNKNOWN, WINNER],
    "rejected": [],
}
REFUSED: dict[str, Any] = {"endpoint": None, "status": 503, "reason": "shed", "message": "all are [/busy]\nnow"}


def shown(answer: dict[str, Any], *, width: int = 80) -> list[str]:
    console = Console(file=StringIO(), width=width)
    render(msgspec.convert(answer, DecisionState), console=console)
    assert isinstance(console.file, StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def words(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines]


def test_a_decision_is_its_winner_its_prompt_and_a_line_for_each_candidate_best_first() -> None:
    lines = shown(ROUTED, width=100)

    assert lines[:2] == [
        "winner: 127.0.0.1:8101   fallbacks: [fe80::1]:8000",
        "prompt: 120 tokens, 96 expected in the winner's cache",
    ]
    assert words(lines[2:]) == [
        ["matched", "KV", "prefix", "queue-depth"],
        ["endpoint", "blocks", "waiting", "running", "use", "×", "3", "×", "2", "total"],
        ["127.0.0.1:8101", "6", "1+3", "2", "25%", "0.80", "1.00", "4.40"],
        ["[fe80::1]:8000", "(unknown,", "full)", "0", "?", "?", "?", "0.00", "-", "0.00"],
    ]


def test_an_expected_answer_is_shown_with_its_spread() -> None:
    request = {"class": "standard", "answer_tokens": 210.4, "answer_spread": 80.0}
    assert "answer: about 210 tokens (± 80)" in shown(ROUTED | {"request": request})
    assert not any(line.startswith("answer") for line in shown(ROUTED | {"request": {"class": "standard"}}))


def test_what_held_a_hit_back_is_said() -> None:
    words = HeldBack(tokens=160, by=CacheGroup(kind="sliding_window", block_size=16, sliding_window=128)).words
    lines = shown(ROUTED | {"candidates": [UNKNOWN, WINNER | {"held_back": words}]}, width=200)
    assert lines[-1] == (
        "127.0.0.1:8101: full attention holds 160 tokens, but what a longer hit needs of the sliding_window group's "
        "window of 128 tokens is gone or was never kept"
    )


def test_a_decision_with_three_scorers_fits_80_columns() -> None:
    weights = {"prefix": 3.0, "queue-depth": 2.0, "kv-usage": 1.0}
    candidate = WINNER | {"scores": dict.fromkeys(weights, 0.5)}

    lines = shown(ROUTED | {"weights": weights, "candidates": [candidate]})

    assert words(lines[-1:]) == [["127.0.0.1:8101", "6", "1+3", "2", "25%", "0.50", "0.50", "0.50", "4.40"]]


def test_a_degraded_decision_names_what_was_missing_and_the_pickers_notes() -> None:
    lines = shown(ROUTED | {"degraded": ["prefix-index-timeout"], "notes": ["the index [/x] took 21 ms", "and more"]})

    assert lines[2:5] == [
        "missing inputs: prefix-index-timeout",
        "note: the index [/x] took 21 ms",
        "note: and more",
    ]


def test_rejected_candidates_are_named_with_the_filter_and_its_words() -> None:
    rejected = [{"endpoint": "[fe80::2]:8000", "filter": "reachable: [/x] connection refused"}]

    assert shown(ROUTED | {"rejected": rejected})[-1] == (
        "[fe80::2]:8000 rejected by reachable: [/x] connection refused"
    )


def test_a_refusal_is_one_line() -> None:
    assert shown(REFUSED) == ["refused with 503 (shed): all are [/busy] now"]


def test_a_refusal_shows_its_candidates_and_why_others_were_rejected_where_the_picker_tells() -> None:
    candidate = {name: value for name, value in WINNER.items() if name not in ("scores", "total")}
    rejected = [{"endpoint": "127.0.0.1:8102", "filter": "reachable: timed out"}]

    lines = shown(REFUSED | {"candidates": [candidate | {"full": "9 requests wait there"}], "rejected": rejected})

    assert lines[0] == "refused with 503 (shed): all are [/busy] now"
    assert words(lines[1:]) == [
        ["matched", "KV"],
        ["endpoint", "blocks", "waiting", "running", "use", "total"],
        ["127.0.0.1:8101", "(full)", "6", "1+3", "2", "25%", "-"],
        ["127.0.0.1:8102", "rejected", "by", "reachable:", "timed", "out"],
    ]


def test_of_many_scorers_those_that_tell_the_candidates_apart_are_shown() -> None:
    weights = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0, "e": 1.0}
    same = dict.fromkeys(weights, 1.0)
    candidates = [WINNER | {"scores": same}, UNKNOWN | {"scores": same | {"d": 0.5}}]
    heading = " ".join(shown(ROUTED | {"weights": weights, "candidates": candidates}, width=100)[2:4]).split()
    assert [name for name in weights if name in heading] == ["d"]


def test_it_is_said_how_often_the_promise_of_the_class_was_kept() -> None:
    request = {"api": "chat-completions", "class": "critical", "class_by": "default"}
    admission = {"verdict": "go", "expected_ttft_ms": 90, "target_ttft_ms": 500, "attainment": 0.9876, "judged": 1234}
    lines = shown(ROUTED | {"request": request, "admission": admission}, width=200)
    assert (
        "class critical (default): would be sent at once; first token expected after 90 ms, promised within 500 ms; "
        "98.8% of its class's last 1,234 judged were within all targets"
    ) in lines
    assert not any("judged" in line for line in shown(ROUTED | {"request": request}, width=200))
