"""What the order of waiting requests does to their waiting, in virtual time."""

import pytest

from tests.unit.extproc_admission.queue_world import play, prompts


@pytest.mark.parametrize("seed", [1, 2])
def test_while_a_queue_comes_and_goes_least_work_first_halves_the_mean_and_nobody_starves(seed: int) -> None:
    arrivals = prompts(load=0.95, seconds=60.0, seed=seed)
    in_turn = play(arrivals, age_seconds=0.0)
    shortest = play(arrivals, age_seconds=5.0)
    assert shortest.requests == in_turn.requests == len(arrivals)
    assert shortest.mean < 0.6 * in_turn.mean
    assert shortest.longest < in_turn.longest + 5.0 + 32_000 / 8000.0
