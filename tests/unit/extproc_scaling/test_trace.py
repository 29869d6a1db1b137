"""Recorded requests in both formats, and lines that cannot be used."""

import json
from typing import Any

import pytest

from extproc.scaling.plan import Demand
from extproc.scaling.trace import Slot, TraceError, read_trace, trace_of


def lines(*given: dict[str, Any], more: int = 10) -> list[bytes]:
    rest = [{"timestamp": 0, "input_length": 1, "output_length": 1} for _ in range(more)]
    return [json.dumps(each).encode() for each in (*given, *rest)]


def test_what_began_like_a_request_before_is_cached() -> None:
    first = {"timestamp": 1000, "input_length": 1300, "output_length": 10, "hash_ids": [0, 1, 2]}
    again = {"timestamp": 3000, "input_length": 2000, "output_length": 20, "hash_ids": [0, 1, 7, 8]}
    same = {"timestamp": 4000, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}
    *_, one, two, three = read_trace(lines(first, again, same), where="t")
    assert (one.at, one.uncached, one.cached, one.output) == (1.0, 1300.0, 0.0, 10.0)
    assert (two.uncached, two.cached) == (2000.0 - 1024.0, 1024.0)
    assert three.uncached == 1.0  # an engine computes the last token in any case


def test_the_access_log_counts_what_was_realised_and_a_sample_for_all() -> None:
    log = {"kind": "decision", "at": 100.5, "fate": "routed", "prompt_tokens": 900, "predicted_cached_tokens": 100}
    found = read_trace(
        lines(
            {**log, "realised_cached_tokens": 300, "output_tokens": 40, "share": 0.25},
            log,
            {"kind": "gap", "at": 100.6},
            {**log, "prompt_tokens": 0},
        ),
        where="t",
    )
    assert found[-2:] == [(100.5, 600.0, 300.0, 40.0, 4.0), (100.5, 800.0, 100.0, None, 1.0)]


def test_slots_have_what_comes_a_second_and_the_rest_counts_with_the_last() -> None:
    requests = read_trace(
        lines(*({"timestamp": 1000 * i, "input_length": 100, "output_length": 10} for i in range(126)), more=0),
        where="t",
    )
    trace = trace_of(requests, times=2.0, slot_seconds=50.0)
    assert [slot.at for slot in trace.slots] == [0.0, 50.0]
    assert trace.slots[0] == Slot(at=0.0, demand=Demand(input=200.0, cached=0.0, output=20.0))
    assert trace.slots[1].demand.input == pytest.approx(2 * 100 * 76 / 75)
    assert trace.average.input == pytest.approx(2 * 100 * 126 / 125)
    assert trace.prompt_tokens == 100.0
    assert trace.busiest == trace.slots[1]


def test_answers_that_nobody_counted_are_as_long_as_the_others() -> None:
    log = [{"at": float(i), "prompt_tokens": 10, **({"output_tokens": 30} if i % 2 else {})} for i in range(20)]
    trace = trace_of(read_trace(lines(*log, more=0), where="t"))
    assert trace.average.output == pytest.approx(20 * 30 / 19)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "t:1: no JSON: "),
        (b"[1]", "t:1: a JSON object is needed"),
        (b'{"a": 1}', "t:1: 'timestamp' is missing"),
        (b'{"timestamp": 1, "output_length": 2}', "t:1: 'input_length' is missing"),
        (b'{"timestamp": 1, "input_length": -3, "output_length": 2}', "t:1: input_length must be a number from 0 on"),
        (b'{"timestamp": 1, "input_length": 1e30, "output_length": 2}', "more than any request has"),
        (b'{"timestamp": true, "input_length": 1, "output_length": 2}', "t:1: timestamp must be a number"),
        (b'{"timestamp": 1, "input_length": 1, "output_length": 2, "hash_ids": ["a"]}', "list of whole numbers"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(line: bytes, words: str) -> None:
    with pytest.raises(TraceError) as raised:
        read_trace([line], where="t")
    assert words in str(raised.value)


def test_three_requests_are_no_trace() -> None:
    with pytest.raises(TraceError, match="has 3 requests; 10 at least are needed to plan for"):
        read_trace(lines(more=3), where="t")
