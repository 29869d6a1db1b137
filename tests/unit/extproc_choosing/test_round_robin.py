"""Requests of each model are counted for themselves."""

from extproc.choosing.choose import RoundRobin


def count(turns: RoundRobin, model: str | None) -> int:
    turn = turns.turn(model)
    turns.count(model)
    return turn


def test_each_model_has_its_own_turns() -> None:
    turns = RoundRobin()
    assert [count(turns, model) for model in ("a", "b", "a", None, "a", "b")] == [0, 0, 1, 0, 2, 1]


def test_to_look_whose_turn_it_is_changes_nothing() -> None:
    turns = RoundRobin()
    assert [turns.turn("a"), turns.turn("a")] == [0, 0]


def test_of_too_many_models_the_one_not_asked_for_longest_begins_anew() -> None:
    turns = RoundRobin(most_models=2)
    assert [count(turns, model) for model in ("a", "b", "a", "c", "a", "b")] == [0, 0, 1, 0, 2, 0]
