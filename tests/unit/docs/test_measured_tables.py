"""Every table of measured figures is made from a recorded result, or names where its figures come from.

Tables between markers are made by `make reference` and compared by test_reference.py. The others are listed here with
their source: a recorded result or a command, which the page must name, or the reason why there is none. Decisions are
left out: they are records of what was measured when they were made.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs_commands.pages import name
from tools.docs_site import DOCS, REPOSITORY
from tools.reference import PART

PAGES = [page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "decisions"]
FIGURE = re.compile(r"[*+−-]*\d.*?(\d[.,]\d|\d (ms|µs|%|s|MB|GB|kB|cores)\b)|\**\d+\**$")
PLANNED = "what was planned, not what was measured"
BY_HAND = "Measured once, by hand"
# page and the beginning of the table's head -> its source
SOURCES = {
    ("evidence/first-hour.md", "| to | how"): BY_HAND,
    ("evidence/first-hour.md", "| fault | found"): BY_HAND,
    ("evidence/hybrid-models.md", "| model | groups"): "make test-vllm",
    ("evidence/overload-benchmark.md", "| class | prompt tokens"): PLANNED,
    ("evidence/scaling.md", "| mix | a prompt"): PLANNED,
    ("explanation/queue.md", "| load | order"): "python -m tests.unit.extproc_admission.queue_world",
    ("guides/pools.md", "| 200 pools, 2,000 pods, 1,000 policies, one picker"): (
        "python -m tests.integration.picker_fleet"
    ),
    ("guides/pools.md", "| 200 pools, 2,000 pods, one indexer"): "python -m tests.integration.kv_fleet",
    ("guides/priorities.md", "| `tolerance`"): PLANNED,
    ("guides/priorities.md", "| `targets`"): PLANNED,
    ("reference/doctor.md", "| severity"): PLANNED,
    ("reference/live-feed.md", "| what | cost"): BY_HAND,
}


def measured(page: Path) -> Iterator[str]:
    """Return the heads of the tables with at least three figures that no command makes."""
    text = PART.sub("", page.read_text(encoding="utf-8"))
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = table.splitlines()
        cells = [cell.strip() for row in rows for cell in row.strip("|").split("|")[1:]]
        if sum(FIGURE.match(cell) is not None for cell in cells) >= 3:
            yield head


def source(page: Path, head: str) -> tuple[str, str] | None:
    where = page.relative_to(DOCS).as_posix()
    return next((key for key in SOURCES if key[0] == where and head.startswith(key[1])), None)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_table_of_figures_is_made_or_has_a_source(page: Path) -> None:
    assert [head for head in measured(page) if source(page, head) is None] == [], (
        "make the table from its recorded result (tools/recorded.py, tools/recorded_parts.py), or list its source here"
    )


def test_every_source_is_of_a_table_that_is_there_and_is_named_on_its_page() -> None:
    found = {source(page, head) for page in PAGES for head in measured(page)}
    assert found == set(SOURCES)
    for (where, _), text in SOURCES.items():
        assert text == PLANNED or text in " ".join((DOCS / where).read_text(encoding="utf-8").split())
        assert not text.startswith("bench/") or (REPOSITORY / text).is_file()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_result_that_a_page_names_is_there(page: Path) -> None:
    named = set(re.findall(r"\d{4}-\d\d-\d\d-[a-z-]+\.json", page.read_text(encoding="utf-8")))
    assert [each for each in sorted(named) if not (REPOSITORY / "bench" / "results" / each).is_file()] == []
