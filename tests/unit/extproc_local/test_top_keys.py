"""Keys of `kvmesh top` change what is shown, and nothing else."""

import pytest

from extproc.local.top_keys import HELP, KEYS, ORDER, TopChoice, chosen, pressed, status
from extproc.pages.picker_state import DecisionState, EndpointState, PickerState

STATE = PickerState(
    now=1.0,
    endpoints=[
        EndpointState(address="10.0.0.1:8000", state="ready", waiting=2, cached_blocks=5),
        EndpointState(address="10.0.0.2:8000", state="unreachable", waiting=None, cached_blocks=9),
        EndpointState(address="10.0.0.3:8000", state="ready", waiting=7, cached_blocks=1, role="prefill"),
    ],
    decisions=[
        DecisionState(endpoint="10.0.0.1:8000", path="/v1/completions", model="qwen"),
        DecisionState(endpoint=None, path="/v1/chat/completions", reason="quota"),
    ],
)


def after(keys: str) -> TopChoice:
    """Return the choice after these keys."""
    choice = TopChoice()
    for key in keys:
        choice = pressed(choice, key)
    return choice


def pods(keys: str) -> list[str]:
    """Return the last part of the pods' addresses in the order in which they are shown."""
    return [pod.address.split(".")[3].split(":")[0] for pod in chosen(STATE, after(keys)).endpoints]


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ("", ["1", "2", "3"]),
        ("r", ["3", "2", "1"]),
        ("s", ["2", "1", "3"]),
        ("sss", ["3", "1", "2"]),  # what waits is not known of the second
        ("sssr", ["2", "1", "3"]),
        ("s" * len(ORDER), ["1", "2", "3"]),
        ("/prefill\r", ["3"]),
        ("/PREFILL", ["3"]),
        ("/unreach\x1b", ["1", "2", "3"]),
        ("/readyX\x7f\n", ["1", "3"]),
        ("/ready\n\x1b", ["1", "2", "3"]),
        ("/sq\n", []),
        ("x\t", ["1", "2", "3"]),
    ],
)
def test_pods_are_filtered_and_sorted(keys: str, shown: list[str]) -> None:
    assert pods(keys) == shown


@pytest.mark.parametrize(("text", "count"), [("qwen", 1), ("quota", 1), ("/v1", 2), ("10.0.0.1", 1), ("nothing", 0)])
def test_decisions_are_filtered_by_what_they_say(text: str, count: int) -> None:
    assert len(chosen(STATE, after(f"/{text}\n")).decisions) == count


def test_what_is_chosen_is_said() -> None:
    assert status(after("")) == ""
    assert status(after("psr/ab")) == "paused    sorted by blocks, turned round    with /ab_"
    assert status(after("psr/ab\npr")) == "sorted by blocks    with /ab"


def test_only_q_quits_and_not_while_a_filter_is_typed() -> None:
    assert after("q").has_quit
    assert not after("/q").has_quit
    assert not after("?spr\x1b").has_quit


def test_the_help_names_each_key() -> None:
    assert {key for key, _ in HELP} == KEYS.keys() - {"\x1b"}
    assert after("?").shows_help
    assert not after("??").shows_help
