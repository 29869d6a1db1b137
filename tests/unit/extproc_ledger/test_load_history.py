"""Requests, refusals and tokens slice by slice, of the last minutes alone."""

from extproc.ledger.pool_history import LoadHistory


def test_only_slices_that_are_over_are_shown_and_quiet_ones_have_zeros() -> None:
    history = LoadHistory(slice_seconds=5.0, slices=3)
    history.routed(prompt_tokens=100, cached_tokens=40, now=1.0)
    history.routed(prompt_tokens=50, cached_tokens=0, now=4.9)
    history.refused(now=12.0)
    history.routed(prompt_tokens=9, cached_tokens=9, now=15.0)
    found = history.complete(now=15.1)
    assert [(each.requests, each.refused, each.prompt_tokens, each.cached_tokens) for each in found] == [
        (2, 0, 150, 40),
        (0, 0, 0, 0),
        (0, 1, 0, 0),
    ]


def test_what_is_older_is_forgotten_however_long_nothing_came() -> None:
    history = LoadHistory(slice_seconds=5.0, slices=3)
    history.routed(prompt_tokens=1, cached_tokens=0, now=1.0)
    assert [each.requests for each in history.complete(now=5.0)] == [0, 0, 1]
    assert [each.requests for each in history.complete(now=19.9)] == [1, 0, 0]
    assert [each.requests for each in history.complete(now=20.0)] == [0, 0, 0]
    for second in range(0, 1000, 5):
        history.routed(prompt_tokens=1, cached_tokens=0, now=float(second))
    assert [each.requests for each in history.complete(now=1000.0)] == [1, 1, 1]
