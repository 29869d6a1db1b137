"""Selectors as the API server writes them."""

import pytest

from extproc.external_metrics.label_selector import SelectorError, parse_selector

LABELS = ("pool", "role")
OF_A = {"pool": "a", "role": "both"}


@pytest.mark.parametrize(
    ("text", "selects"),
    [
        ("", True),
        (" ", True),
        ("pool=a", True),
        ("pool==a", True),
        ("pool = a , role = both", True),
        ("pool=a,role=prefill", False),
        ("pool!=a", False),
        ("pool!=b", True),
        ("role in (prefill, both)", True),
        ("role in (prefill)", False),
        ("role notin (prefill,decode),pool in (a,b)", True),
        ("role notin (both)", False),
        ("role", True),
        ("!role", False),
        ("pool=", False),
    ],
)
def test_all_conditions_are_to_be_met(text: str, selects: bool) -> None:
    assert parse_selector(text, known=LABELS).selects(OF_A) is selects


def test_a_label_that_is_not_there_is_unequal_to_everything() -> None:
    assert parse_selector("role!=both", known=LABELS).selects({"pool": "a"})
    assert parse_selector("role notin (both),!role", known=LABELS).selects({"pool": "a"})
    assert not parse_selector("role=", known=LABELS).selects({"pool": "a"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pol=a", "there is no label 'pol'; there are pool, role"),
        ("pool=llm/a", "'pool=llm/a' is no condition"),
        ("pool>3", "'pool>3' is no condition"),
        ("pool=a,", "'' is no condition"),
        ("role in both", "'role in both' is no condition"),
        ("role in (both", "'role in (both' is no condition"),
        ("role in (bo th)", "has a value that no label may have"),
        ("pool=" + "a" * 5000, "longer than 4096 characters"),
    ],
)
def test_what_is_no_selector_is_said(text: str, words: str) -> None:
    with pytest.raises(SelectorError) as raised:
        parse_selector(text, known=LABELS)
    assert words in str(raised.value)
