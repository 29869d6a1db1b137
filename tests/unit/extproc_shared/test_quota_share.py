"""Shares are never more than the whole, whatever was heard and however many replicas there are."""

import math

from hypothesis import given
from hypothesis import strategies as st

from extproc.shared.quota import BucketTerms, QuotaShare

LEVELS = st.floats(min_value=-1e6, max_value=1e3)


@given(heard=st.none() | LEVELS, replicas=st.lists(st.integers(-1, 50), min_size=1, max_size=5))
def test_a_share_is_never_more_than_its_part_of_what_is_left(heard: float | None, replicas: list[int]) -> None:
    share, terms = QuotaShare(), BucketTerms(10.0, 1000.0)
    if heard is not None:
        share.note((heard,), (terms,), now=5.0)
    for count in replicas:
        (bucket,) = share.local((terms,), replicas=count, now=5.0)
        whole = 1000.0 if heard is None else heard
        assert bucket.level <= whole / max(count, 1) + 1e-6 or heard is None
        assert bucket.level <= bucket.terms.capacity
        assert math.isfinite(bucket.level)


@given(st.lists(st.tuples(st.floats(-1e3, 1e6), st.none() | st.integers(0, 10**6)), max_size=20))
def test_what_is_usual_stays_between_the_first_guess_and_what_was_seen(seen: list[tuple[float, int | None]]) -> None:
    share = QuotaShare()
    for seconds, tokens in seen:
        share.took(seconds)
        if tokens is not None:
            share.generated(tokens)
    tokens_seen = [256, *(tokens for _, tokens in seen if tokens is not None)]
    assert min(tokens_seen) - 1e-6 <= share.mean_generated <= max(tokens_seen) + 1e-6
    assert 0.0 <= share.wait_for_an_end() < math.inf
