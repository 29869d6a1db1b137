"""Requests of each model are counted for themselves."""

from extproc.choosing.round_robin import RoundRobin


def test_each_model_has_its_own_turns() -> None:
    turns = RoundRobin()
    assert [turns(model) for model in ("a", "b", "a", None, "a", "b")] == [0, 0, 1, 0, 2, 1]


def test_of_too_many_models_the_one_not_asked_for_longest_begins_anew() -> None:
    turns = RoundRobin(most_models=2)
    assert [turns(model) for model in ("a", "b", "a", "c", "a", "b")] == [0, 0, 1, 0, 2, 0]
