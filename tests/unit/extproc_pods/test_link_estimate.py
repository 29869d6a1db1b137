"""What moving caches takes, learned from the pods' counters."""

import pytest

from extproc.pods.link_estimate import LinkEstimates
from tests.unit.extproc_choosing.pick_candidates import load


def fetched(at: float, tokens: int, moved: float, seconds: float) -> dict[str, float]:
    return {"reported_at": at, "fetched_tokens": tokens, "fetched_bytes": moved, "fetch_seconds_sum": seconds}


def test_bytes_a_token_and_a_second_are_those_of_the_fetches_since_the_first_report() -> None:
    links = LinkEstimates()
    assert (links.bytes_per_token(declared=7.0), links.bytes_per_second("a", declared=9.0)) == (7.0, 9.0)
    links.report("a", load(**fetched(0.0, 100, 100.0, 100.0)))
    assert links.bytes_per_token(declared=7.0) == 7.0
    links.report("a", load(**fetched(1.0, 300, 20_100.0, 102.0)))
    assert links.bytes_per_token(declared=7.0) == pytest.approx(100.0)
    assert links.bytes_per_second("a", declared=9.0) == pytest.approx(10_000.0)
    assert links.bytes_per_second("b", declared=9.0) == pytest.approx(10_000.0)  # as the pool's
    assert links.seen() == {"a": pytest.approx(10_000.0)}


def test_newer_fetches_count_more_and_a_new_process_begins_anew() -> None:
    links = LinkEstimates()
    for at, tokens, moved, seconds in ((0, 1, 1.0, 0.0), (1, 101, 10_001.0, 1.0), (601, 201, 20_001.0, 1.1)):
        links.report("a", load(**fetched(at, tokens, moved, seconds)))
    assert links.bytes_per_second("a", declared=9.0) == pytest.approx(100_000.0, rel=0.02)
    links.report("a", load(**fetched(602, 0, 0.0, 0.0)))
    assert links.bytes_per_second("a", declared=9.0) == 9.0
    links.report("a", load(**fetched(603, 10, 50.0, 1.0)))
    assert links.bytes_per_token(declared=7.0) == 5.0
    links.forget("a")
    assert links.bytes_per_token(declared=7.0) == 7.0
