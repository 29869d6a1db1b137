"""The dialect measure finds nouns made of relative clauses in docstrings, comments and sentences, not in code."""

from pathlib import Path

import pytest

from tools.dialect import Text, markdown_texts, python_texts, share

PYTHON = '''"""Forget what is gone."""

NAME = "what is gone"  # those that wait


def expire() -> None:
    """Drop expired entries."""
'''
MARKDOWN = """# Expiry

Expired entries are dropped. Nobody has to be told, `what is gone` is not kept. It is
likewise for pods.

```
those that wait, whoever they are
```

| field | meaning |
|---|---|
| age | so many seconds have passed |
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    path = tmp_path / "expiry.py"
    path.write_text(PYTHON, encoding="utf-8")
    return path


@pytest.fixture
def markdown(tmp_path: Path) -> Path:
    path = tmp_path / "expiry.md"
    path.write_text(MARKDOWN, encoding="utf-8")
    return path


def test_docstrings_and_comments_are_texts(python: Path) -> None:
    texts = list(python_texts(python))
    assert [(each.words, each.is_dialect) for each in texts] == [
        ("Forget what is gone.", True),
        ("Drop expired entries.", False),
        ("# those that wait", True),
    ]
    assert texts[2].line == 3


def test_sentences_of_pages_are_texts_without_their_code(markdown: Path) -> None:
    assert [each.words for each in markdown_texts(markdown) if each.is_dialect] == ["so many seconds have passed"]
    assert [each.words for each in markdown_texts(markdown)][:2] == [
        "Expired entries are dropped.",
        "Nobody has to be told, x is not kept.",
    ]


def test_the_share_is_of_all_texts_of_a_folder(python: Path, markdown: Path, tmp_path: Path) -> None:
    assert share(python) == 66.7
    assert share(markdown) == 33.3
    assert share(tmp_path) == 50.0
    assert share() == 0.0


@pytest.mark.parametrize("words", ["None: not observed", "its pods are to be counted", "in which it waits"])
def test_patterns(words: str) -> None:
    assert Text(1, words).is_dialect
