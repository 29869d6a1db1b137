"""Pods beside the mean: by Halfin and Whitt's formula, and by what the promise leaves for waiting."""

import pytest

from extproc.scaling.need import MOST_BETA, USUAL_BETA, beta_for, pods_for, waits


@pytest.mark.parametrize(("beta", "probability"), [(0.506, 0.5), (0.183, 0.79), (1.42, 0.1), (0.0, 1.0)])
def test_the_probability_to_wait_is_that_of_the_paper(beta: float, probability: float) -> None:
    assert waits(beta) == pytest.approx(probability, abs=0.01)


def test_long_patience_needs_less_than_short_patience() -> None:
    betas = [beta_for(4.0, slack_seconds=slack, own_seconds=0.5) for slack in (0.01, 0.1, 1.0, 10.0)]
    assert betas == sorted(betas, reverse=True)
    assert betas[0] < MOST_BETA
    assert betas[-1] < 0.2


def test_without_a_promise_beta_is_a_constant() -> None:
    assert beta_for(4.0, slack_seconds=None, own_seconds=0.5) == USUAL_BETA
    assert beta_for(4.0, slack_seconds=-1.0, own_seconds=0.5) == MOST_BETA


def test_pods_are_what_is_busy_and_the_root_of_it() -> None:
    assert pods_for(16.0, beta=1.0) == pytest.approx(20.0)
    assert pods_for(16.0, beta=1.0, streams=64.0) == pytest.approx(16.0 / 0.95)
    assert pods_for(0.0, beta=1.0) == 0.0
