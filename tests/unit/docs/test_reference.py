"""The generated parts of docs/ are what `make reference` writes; the Redis page has every key of the code."""

import re
from pathlib import Path

import pytest

from tools.docs_site import DOCS, REPOSITORY
from tools.reference import PART, written_anew

PAGES = [page for page in sorted(DOCS.rglob("*.md")) if PART.search(page.read_text(encoding="utf-8"))]


def test_some_pages_are_generated() -> None:
    assert {"cli.md", "metrics.md", "inference-policy.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_generated_parts_are_up_to_date(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == written_anew(page), "run: make reference"


def test_the_redis_page_has_every_key_that_the_code_makes() -> None:
    sources = [*REPOSITORY.glob("k*/**/*.lua"), *REPOSITORY.glob("extproc/**/*.py"), *REPOSITORY.glob("k*/**/*.py")]
    made = set()
    for text in (source.read_text(encoding="utf-8") for source in sources):
        made |= set(re.findall(r"\bP \.\. '([a-z:]+)'|\bPREFIX \+ b\"([a-z:]+)\"", text))
        made |= {("picker:" + name, "") for name in re.findall(r"\bPICKERS \+ b\"([a-z:]+)\"", text)}
    table = (DOCS / "reference" / "redis.md").read_text(encoding="utf-8").partition("## Keys")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {re.sub(r"<.*", "", name) for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert {lua or python for lua, python in made} - {"picker:"} == documented
