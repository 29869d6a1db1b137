"""Counts texts whose nouns are made of relative clauses: `python -m tools.dialect [-v] FOLDER_OR_FILE…`.

A text is a docstring or a comment of a Python file, or a sentence of a Markdown file. For each argument it prints the
share of texts with at least one of the patterns, with `-v` the texts themselves. kopf's code has 1.2 %, h11's 0.7 %. A
pattern can be right in its place: the share counts, not the single line.
"""

import ast
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.unit.structure.imports import nodes_of

PATTERNS = (
    r"\bwhat (is|was|are|has|have|comes?|goes?|stays?|waits?|came|would|may|cannot)\b",
    r"\bwhat (it|they|no|a|an|the|clients|others)\b",
    r"\bso (many|much|long|few)\b",
    r"\b(of|in|from|by|with|for|to) (which|whom)\b",
    r"\bthose (that|of|who)\b",
    r"\blikewise\b",
    r"\b(nobody|somebody|whoever|anybody)\b",
    r"None: ",
    r"\b(is|are|was|were) to be\b",
    r"\b(by itself|by themselves|of its own|of their own|anew)\b",
)
DIALECT = re.compile("|".join(PATTERNS))
LEAST_WORDS = 4  # of a sentence: headings and cells of tables are none
INLINE_CODE = re.compile(r"`[^`]*`")
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+|\s*\|\s*")  # or the end of a table's cell
DOCUMENTED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


class Text(NamedTuple):
    """A docstring, a comment or a sentence."""

    line: int
    words: str

    @property
    def is_dialect(self) -> bool:
        """Tell whether it has one of the patterns."""
        return DIALECT.search(self.words) is not None


@cache  # `tools.structure` reads each file for several counts
def cached_nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of a file's syntax tree."""
    return tuple(nodes_of(path))


def python_texts(path: Path) -> Iterator[Text]:
    """Return the docstrings, each in one line, then the comments."""
    for node in cached_nodes(path):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield Text(getattr(node, "lineno", 1), " ".join(docstring.split()))
    with tokenize.open(path) as source:
        for token in tokenize.generate_tokens(source.readline):
            if token.type == tokenize.COMMENT:
                yield Text(token.start[0], token.string)


def markdown_texts(path: Path) -> Iterator[Text]:
    """Return the sentences outside of blocks of code, as far as they stand in one line."""
    is_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            sentences = SENTENCE_END.split(INLINE_CODE.sub("x", line))
            yield from (Text(number, each) for each in sentences if len(each.split()) >= LEAST_WORDS)


READERS = {".py": python_texts, ".md": markdown_texts}


def texts(paths: Iterable[Path]) -> Iterator[tuple[Path, Text]]:
    """Return the texts of files, and of those in folders."""
    for path in paths:
        files = sorted(each for each in path.rglob("*") if each.suffix in READERS) if path.is_dir() else [path]
        for file in files:
            yield from ((file, text) for text in READERS[file.suffix](file))


def share(*paths: Path) -> float:
    """Return the percentage of the texts with a pattern, to one decimal."""
    found = [text.is_dialect for _, text in texts(paths)]
    return round(100 * sum(found) / max(len(found), 1), 1)


def main(arguments: list[str]) -> None:
    """Print the shares of files and folders; `-v` also lists the texts with a pattern."""
    if not arguments or not all(name == "-v" or Path(name).exists() for name in arguments):
        sys.exit("usage: python -m tools.dialect [-v] FILE|FOLDER…")
    for name in arguments:
        if name == "-v":
            continue
        path = Path(name)
        print(f"{name}: {share(path)} %")
        for file, text in texts([path]) if "-v" in arguments else ():
            if text.is_dialect:
                print(f"  {file}:{text.line}: {text.words[:160]}")


if __name__ == "__main__":
    main(sys.argv[1:])
