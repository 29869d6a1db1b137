"""How the code is built gets no worse: each measure of `tools.structure` keeps within budgets.toml, and close to it."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.unit.structure.imports import REPOSITORY

BUDGETS = Path(__file__).with_name("budgets.toml")
# how far a measure may fall below its budget before the budget must follow: so much of it, or the least
MARGIN = 0.01
LEAST_MARGIN, LEAST_MARGIN_OF_SHARES = 1, 0.2


def wrong_budgets(budgets: Mapping[str, float], measures: Mapping[str, float]) -> list[str]:
    """Return a sentence for each budget that is exceeded, or higher than needed."""
    found = []
    for name, budget in budgets.items():
        least = LEAST_MARGIN_OF_SHARES if name.endswith("%") else LEAST_MARGIN
        measure = measures.get(name)
        if measure is None:
            found.append(f"{name}: not measured: take its budget away")
        elif measure > budget + (MARGIN * budget if name.startswith("one chat") else 0):  # a busy machine adds a call
            found.append(f"{name}: {measure:,} > budget {budget:,}: cut before you add")
        elif measure < budget - max(least, MARGIN * budget):
            found.append(f"{name}: {measure:,}, its budget is still {budget:,}: lower it to {measure:,}")
    return found


@pytest.mark.parametrize(
    ("measure", "complaints"),
    [
        (62_148, ["lines of extproc: 62,148 > budget 62,147: cut before you add"]),
        (62_147, []),
        (61_600, []),  # an ordinary change need not touch the file
        (60_000, ["lines of extproc: 60,000, its budget is still 62,147: lower it to 60,000"]),
    ],
)
def test_a_budget_is_neither_exceeded_nor_left_high(measure: float, complaints: list[str]) -> None:
    assert wrong_budgets({"lines of extproc": 62_147}, {"lines of extproc": measure}) == complaints


def test_a_share_has_a_margin_of_its_own() -> None:
    name = "dialect of docs, %"
    assert wrong_budgets({name: 1.5}, {name: 1.4}) == []
    assert wrong_budgets({name: 1.5}, {name: 0.9}) == [f"{name}: 0.9, its budget is still 1.5: lower it to 0.9"]


def test_a_budget_of_a_measure_that_is_gone_goes_too() -> None:
    assert wrong_budgets({"lines of gone": 1}, {}) == ["lines of gone: not measured: take its budget away"]


def test_all_measures_keep_their_budgets() -> None:
    # in a process of its own: the traced chat starts a picker, and its calls depend on what is cached
    command = (sys.executable, "-m", "tools.structure", "--json")
    printed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=150)
    budgets = tomllib.loads(BUDGETS.read_text(encoding="utf-8"))
    wrong = wrong_budgets(budgets, json.loads(printed.stdout))
    assert not wrong, "\n" + "\n".join(wrong)
