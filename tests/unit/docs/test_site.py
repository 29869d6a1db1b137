"""Every page of docs/ is in the navigation of the site; every link and anchor works on GitHub and on the site."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tools.docs_site import DOCS, REPOSITORY, anchors, links

PAGES = [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md"))]


def named(part: object) -> Iterator[str]:
    if isinstance(part, str) and ":" not in part:
        yield part
    elif isinstance(part, dict):
        for each in part.values():
            yield from named(each)
    elif isinstance(part, list):
        for each in part:
            yield from named(each)


class Configuration(yaml.SafeLoader):
    """Reads mkdocs.yml without building the Python objects that it names."""


Configuration.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def test_every_page_is_in_the_navigation_once() -> None:
    text = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    nav = yaml.load(text, Loader=Configuration)["nav"]
    assert sorted(named(nav)) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_every_test_that_a_page_names_or_links_to_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"\btests/[\w/-]+(?:\.\w+)?", text))
    assert [name for name in sorted(named) if not (REPOSITORY / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_lists_are_read_alike_everywhere(page: Path) -> None:
    """GitHub begins a list below a line of text and nests by two spaces, Python-Markdown does neither."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    lines = ["", *text.splitlines()]
    for before, line in pairwise(lines):
        if re.match(r"([*-]|\d+\.) ", line):
            assert not before or re.match(r"([*-]|\d+\.| ) ?|#", before), line
        assert not re.match(r" {1,3}([*-]|\d+\.) ", line), line


def test_the_code_names_only_pages_that_are_there() -> None:
    pages = {page.relative_to(REPOSITORY).as_posix() for page in PAGES}
    for folder in ("extproc", "kv_indexer", "kvmesh", "bench", "tests", "tools", "envoy", "manifests"):
        for path in (REPOSITORY / folder).rglob("*"):
            if path.suffix in {".py", ".js", ".yaml", ".json", ".md"} and path.is_file():
                for name in re.findall(r"\bdocs/[a-z0-9/-]+\.md", path.read_text(encoding="utf-8")):
                    assert name in pages, f"{path} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_every_row_of_a_table_has_as_many_cells_as_its_head(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for table in re.findall(r"(?:^\|.*\n)+(?=.?)", text, re.MULTILINE):
        rows = [re.sub(r"\\\|", "", row) for row in table.splitlines()]
        assert all(row.endswith("|") and row.count("|") == rows[0].count("|") for row in rows), table[:200]
    assert not re.search(r"^\|.*\n[^|\n<]", text, re.MULTILINE), "a table ends with an empty line"
