"""Requests of each model are counted for themselves."""

from extproc.choosing.turns import Turns


def test_each_model_has_its_own_turns() -> None:
    turns = Turns()
    assert [turns(model) for model in ("a", "b", "a", None, "a", "b")] == [0, 0, 1, 0, 2, 1]


def test_of_too_many_models_the_one_not_asked_for_longest_begins_anew() -> None:
    turns = Turns(most_models=2)
    assert [turns(model) for model in ("a", "b", "a", "c", "a", "b")] == [0, 0, 1, 0, 2, 0]
