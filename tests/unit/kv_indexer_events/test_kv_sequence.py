"""The rules of one event sequence."""

import pytest

from kv_indexer.events.sequence import (
    BatchAction,
    Probe,
    Restraint,
    is_another_process,
    is_same_process,
    judge,
    judge_probe,
)


@pytest.mark.parametrize(
    ("seq", "ts", "expected"),
    [
        (6, 11.0, BatchAction.APPLY),
        (6, 9.0, BatchAction.APPLY),  # a clock that steps back is no reason to lose a batch
        (5, 10.0, BatchAction.DUPLICATE),
        (0, 1.0, BatchAction.DUPLICATE),
        (7, 11.0, BatchAction.GAP),
        (0, 11.0, BatchAction.RESTART),
        (5, 10.5, BatchAction.RESTART),
    ],
)
def test_a_batch_is_judged_by_its_number_and_time(seq: int, ts: float, expected: BatchAction) -> None:
    assert judge(seq=seq, ts=ts, last_seq=5, last_ts=10.0) is expected


def test_a_fresh_stream_starts_at_zero() -> None:
    assert judge(seq=0, ts=5.0, last_seq=-1, last_ts=0.0) is BatchAction.APPLY
    assert judge(seq=3, ts=5.0, last_seq=-1, last_ts=0.0) is BatchAction.GAP


@pytest.mark.parametrize(
    ("first_seq", "first_crc", "last_crc", "expected"),
    [
        (5, 1, 1, Probe.SAME),
        (5, 1, None, Probe.SAME),  # nothing to compare with
        (5, 2, 1, Probe.RESTARTED),
        (None, None, 1, Probe.EMPTY),
        (8, 1, 1, Probe.UNKNOWN),
    ],
)
def test_a_replay_from_our_last_batch_shows_whether_the_publisher_is_the_same(
    first_seq: int | None, first_crc: int | None, last_crc: int | None, expected: Probe
) -> None:
    assert judge_probe(last_seq=5, last_crc=last_crc, first_seq=first_seq, first_crc=first_crc) is expected


@pytest.mark.parametrize(
    ("before", "now", "another", "same"),
    [
        (100.0, 100.4, False, True),  # the clock's rounding
        (100.0, 101.0, True, False),
        (100.0, 99.0, True, False),
        (None, 100.0, False, False),
        (100.0, None, False, False),
    ],
)
def test_start_times_tell_processes_apart_and_a_missing_one_tells_nothing(
    before: float | None, now: float | None, another: bool, same: bool
) -> None:
    assert (is_another_process(before, now), is_same_process(before, now)) == (another, same)


def test_disturbances_are_free_at_first_then_cost_ever_longer_waits() -> None:
    restraint = Restraint(free=2, first_seconds=1.0, limit_seconds=3.0, calm_seconds=10.0)

    assert [restraint.disturb(now=0.0) for _ in range(6)] == [0.0, 0.0, 1.0, 2.0, 3.0, 3.0]


def test_disturbances_are_forgiven_evenly_so_that_rare_ones_stay_free_for_ever() -> None:
    restraint = Restraint(free=2, first_seconds=1.0, limit_seconds=3.0, calm_seconds=10.0)

    assert [restraint.disturb(now=5.0 * step) for step in range(100)] == [0.0] * 100


def test_who_has_disturbed_us_a_thousand_times_is_forgiven_as_soon_as_who_did_so_often() -> None:
    restraint = Restraint(free=2, first_seconds=1.0, limit_seconds=3.0, calm_seconds=10.0)
    for _ in range(1000):
        restraint.disturb(now=0.0)

    assert restraint.disturb(now=20.0) == 0.0
