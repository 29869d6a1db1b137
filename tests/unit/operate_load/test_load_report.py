"""What a load comes to: numbers of what was measured, and words for what was not as it should be."""

from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console

from operate.load.script import Record
from operate.load.summary import ArmSummary, LoadReport, Spread, percentile, ratio, shown, summarise


def record(due: float = 5.0, **fields: Any) -> Record:
    given: dict[str, Any] = {"ready": due, "sent": due, "first": due + 0.1, "ended": due + 1.0, "error": None}
    given |= {"prompt_tokens": 1, "tells_cached": True} | fields
    return Record(session="a", turn=0, due=due, **given)


def judged(*records: Record, name: str = "kvmesh", **fields: Any) -> ArmSummary:
    return summarise(name, records, **({"measured_from": 0.0, "seconds": 10.0} | fields))


def test_hits_times_and_failures_are_of_what_was_measured() -> None:
    arm = judged(
        record(1.0, first=9.0, prompt_tokens=1000),  # of the warm-up
        record(prompt_tokens=100, cached_tokens=90, gaps=(0.010, 0.020), server="pod-a"),
        record(first=5.3, prompt_tokens=100, cached_tokens=50, server="pod-b"),
        record(error="the answer broke off", server="pod-b", prompt_tokens=100),
        record(refused="overload", first=None),
        record(refused="overload", first=None),
        measured_from=2.0,
    )

    assert (arm.requests, arm.answered, arm.refused, arm.failed, arm.warm_up) == (5, 2, 2, 1, 1)
    assert arm.ttft_ms == Spread(p50=100.0, p95=300.0, p99=300.0)
    assert arm.inter_token_ms == Spread(p50=10.0, p95=20.0, p99=20.0)
    assert arm.hit_rate == 0.7
    assert (arm.refusals, arm.errors) == ({"overload": 2}, {"the answer broke off": 1})
    assert (arm.failed_at, arm.servers) == ({"pod-b": 1}, {"pod-a": 1, "pod-b": 1})
    assert arm.answered_per_second == 2 / 8


def test_what_this_client_was_late_counts_as_waiting() -> None:
    arm = judged(record(), record(sent=5.4, first=5.5), record(ready=7.0, sent=7.0, first=7.2))

    assert (arm.late, round(arm.latest_ms), arm.held_back) == (1, 400, 1)
    assert (arm.ttft_ms.p50, arm.ttft_ms.p99) == (200.0, 500.0)


def test_nothing_has_no_percentiles() -> None:
    arm = judged(record(error="no connection: connection refused"))
    assert (arm.ttft_ms, arm.inter_token_ms, arm.hit_rate) == (Spread(), Spread(), None)


def test_a_server_that_tells_no_cached_tokens_has_no_hit_rate_and_the_flag_is_named() -> None:
    arm = judged(record(prompt_tokens=10, tells_cached=False), record(prompt_tokens=10, tells_cached=False))
    assert arm.hit_rate is None
    assert "kvmesh: no answer tells cached tokens; vLLM does with --enable-prompt-tokens-details" in printed(
        report(arm)
    )
    # vLLM leaves it out where nothing was cached
    one = record(prompt_tokens=10, cached_tokens=5)
    assert judged(one, record(prompt_tokens=10, tells_cached=False)).hit_rate == 0.25


def test_a_percentile_is_one_of_the_values() -> None:
    assert [percentile([4, 1, 3, 2], share) for share in (0.0, 0.5, 0.99)] == [1, 2, 4]
    hundred = [float(value) for value in range(100, 0, -1)]
    assert [percentile(hundred, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]


def test_a_ratio_of_nothing_says_nothing() -> None:
    assert (ratio(2.0, 6.0), ratio(0.0, 6.0), ratio(None, 6.0), ratio(2.0, None)) == (3.0, None, None, None)


def printed(report: LoadReport) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(shown(report))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def report(*arms: ArmSummary, interrupted: bool = False) -> LoadReport:
    return LoadReport(load="questions [/x]", model="m", seed=0, interrupted=interrupted, arms=arms)


def test_two_arms_stand_side_by_side_with_how_many_times_longer() -> None:
    slow = judged(record(first=7.0, prompt_tokens=10, gaps=(0.1,)), name="round-robin")
    page = printed(report(judged(record(prompt_tokens=10, cached_tokens=9, gaps=(0.1,))), slow))

    lines = [line.split() for line in page.splitlines()]
    assert lines[0] == ["questions", "[/x]"]
    assert lines[1] == ["kvmesh", "round-robin"]
    assert ["TTFT", "p50", "100", "ms", "2,000", "ms", "20", "times"] in lines
    assert ["inter-token", "p50", "100", "ms", "100", "ms", "1.0", "times"] in lines
    assert ["hit", "rate", "90.0%", "0.0%"] in lines
    assert ["answered", "1", "of", "1", "1", "of", "1"] in lines


def test_what_went_wrong_is_told_in_words() -> None:
    reasons = [record(error=f"problem {i}\x1b[31m", server="pod-a") for i in range(7)]
    page = printed(report(judged(record(), *reasons, record(refused="quota"), unfinished=3), interrupted=True))

    assert "kvmesh: refused 1: quota" in page
    assert "kvmesh: failed 1: problem 0[31m" in page
    assert "kvmesh: failed 2 for other reasons" in page
    assert "kvmesh: failed at pod-a 7" in page
    assert "not counted: 3 requests cut off in flight" in page
    assert "interrupted: this is what came so far" in page
    assert "\x1b" not in page


def test_a_warm_up_that_was_not_answered_is_told_and_does_not_end_well() -> None:
    early = record(1.0, error="no whole answer within 60 s", server="127.0.0.1:10000")
    one = report(judged(early, record(1.0, refused="quota"), record(1.0), record(), measured_from=2.0))

    page = printed(one)
    assert "kvmesh: not counted: 3 requests before, to warm the caches up" in page
    assert "kvmesh: warm-up: failed 1: no whole answer within 60 s at 127.0.0.1:10000" in page
    assert "kvmesh: warm-up: failed 1: refused: quota" in page
    assert not one.is_all_answered


@pytest.mark.parametrize(
    ("one", "is_fine"),
    [
        (report(judged(record())), True),
        (report(judged(record()), interrupted=True), False),
        (report(judged(record(), record(refused="quota"))), False),
        (report(judged(record(), record(error="x"))), False),
        (report(judged()), False),
    ],
)
def test_only_a_load_that_was_answered_whole_ends_well(one: LoadReport, is_fine: bool) -> None:
    assert one.is_all_answered is is_fine


def test_json_has_the_fields_of_the_guide() -> None:
    told = msgspec.json.decode(msgspec.json.encode(report(judged(record()))))
    assert list(told) == ["load", "model", "seed", "interrupted", "arms"]
    assert told["arms"][0]["ttft_ms"] == {"p50": 100.0, "p95": 100.0, "p99": 100.0}
