"""docs/glossary.md explains each word once, explains none that nobody uses, and the pages use its words."""

import re
from collections import Counter

import pytest

from tools.docs_site import DOCS, REPOSITORY

GLOSSARY = DOCS / "glossary.md"
TEXT = " ".join(GLOSSARY.read_text(encoding="utf-8").split())
TERMS = [
    term.strip(".") for found in re.findall(r"\*\*(.+?)\*\*", TEXT) for term in found.rstrip(".").lower().split(", ")
]
PAGES = {
    path.relative_to(REPOSITORY).as_posix(): " ".join(path.read_text(encoding="utf-8").split())
    for path in (REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md")))
    if path != GLOSSARY
}
# other people's words, where they are translated; the older sources of a figure
TRANSLATED = ("docs/start/coming-from.md", "docs/explanation/beside-others.md", "docs/guides/promises.md")
INSTEAD = {
    r"\bITL\b": "inter-token time",
    r"\bTPOT\b": "inter-token time",
    r"\btime between tokens\b": "inter-token time",
    r"\btime per (output )?token\b": "inter-token time",
    r"\bKV[- ](cache )?utili[sz]ation\b": "KV use",
    r"\bhit ratio\b": "hit rate",
    r"\bprompt cach(e|ing)\b": "prefix cache",
    r"\bgood ?put rate\b": "goodput",
    r"\bQoS\b": "request class",
    r"\bback-log\b": "backlog",
}


def test_no_word_is_explained_twice() -> None:
    assert [term for term, count in Counter(TERMS).items() if count > 1] == []
    assert len(TERMS) > 80


@pytest.mark.parametrize("term", TERMS)
def test_every_word_is_used_elsewhere(term: str) -> None:
    words = re.split(r"[\s-]+", term.removesuffix(" (code)"))
    used = re.compile(r"(?<![a-z])" + r"[\s_-]+".join(map(re.escape, words)), re.IGNORECASE)
    assert any(used.search(text) for text in PAGES.values())


@pytest.mark.parametrize(("other", "ours"), INSTEAD.items())
def test_pages_use_the_glossarys_word(other: str, ours: str) -> None:
    found = {name for name, text in PAGES.items() if re.search(other, text)} - set(TRANSLATED)
    assert not found, f"say {ours}"
