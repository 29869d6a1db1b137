"""Links of the pages in docs/: a hook of mkdocs, and what a test checks without it.

Pages link to files of the repository by relative paths, so that they work on GitHub and in an editor. The site holds
docs/ alone: there such a link leads to the file on GitHub.
"""

import os
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)


def links(page: Path) -> list[tuple[Path, str]]:
    """Return the relative links of a page: absolute path of the target, and its anchor or ""."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    found = [target.partition("#") for target in LINK.findall(text) if not re.match(r"[a-z]+:", target)]
    return [(Path(os.path.normpath(page.parent / path)) if path else page, anchor) for path, _, anchor in found]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page; the site gives the same."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    shown = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in shown}


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    r"""Point links that leave docs/ at the repository on GitHub; called by mkdocs for each page.

    In code within tables, GitHub reads `\|` as a bar, Python-Markdown does not need the backslash and shows it.
    """
    folder = (DOCS / page.file.src_uri).parent

    def absolute(match: re.Match[str]) -> str:
        target = match[1]
        path = Path(os.path.normpath(folder / target))
        if ":" in target or target.startswith("#") or path.is_relative_to(DOCS):
            return match[0]
        kind = "tree" if path.is_dir() else "blob"
        return f"]({config.extra['repository']}/{kind}/main/{path.relative_to(REPOSITORY).as_posix()})"

    rows = re.compile(r"^\|.*$", re.MULTILINE)
    code = re.compile(r"`[^`]*`")
    markdown = rows.sub(lambda row: code.sub(lambda span: span[0].replace(r"\|", "|"), row[0]), markdown)
    return LINK.sub(absolute, markdown)
