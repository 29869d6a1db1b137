"""The index of decisions has every decision once, with the title and the state of its page."""

import re

import pytest

from tools.docs_site import DOCS

FOLDER = DOCS / "decisions"
PAGES = sorted(FOLDER.glob("[0-9]*.md"))
ROW = re.compile(r"^\| \[(\d{4})\]\(([\w-]+\.md)\) \| (.+?) \| .+ \| (.+?) \|$", re.MULTILINE)
ROWS = ROW.findall((FOLDER / "README.md").read_text(encoding="utf-8"))


def test_the_index_has_every_decision_once_in_order() -> None:
    assert [name for _, name, _, _ in ROWS] == [page.name for page in PAGES]


@pytest.mark.parametrize(("number", "name", "title", "state"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_has_the_title_and_the_state_of_its_page(number: str, name: str, title: str, state: str) -> None:
    heading, _, status = (FOLDER / name).read_text(encoding="utf-8").splitlines()[:3]
    assert heading.lower() == f"# {number}: {title}".lower()
    assert status.startswith(f"Status: {state.partition(';')[0]}")
