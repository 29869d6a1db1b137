"""Finds the commands of the pages: lines of shell blocks, and those named in a sentence.

A block without a language is a shell block if it begins with a program and has no columns; else it was printed. In one
with lines that begin with `$ `, so were the others.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tools.docs_site import DOCS, REPOSITORY

TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [*(REPOSITORY / name for name in TOP), *sorted(DOCS.rglob("*.md"))]
SHELL = ("", "sh", "console")
OTHER = ("yaml", "json", "promql", "redis", "toml", "python", "text")
PROGRAM = re.compile(
    r"\(|\w+=|((\.venv/bin/)?(kvmesh|make|python|pip|vllm|kubectl|helm|istioctl|docker|git|curl|jq|yq|redis-cli)(\s|$))"
)
COLUMNS = re.compile(r"\S {3,}[^\s#]")
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
COMMENT = re.compile(r"\s+# .*$|^# .*$")
NAMED = re.compile(r"(\.venv/bin/)?(kvmesh (?!picker)[a-z]|make [a-z]|python -m )")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of a page, on one line, without a comment."""

    page: str
    line: str


def name(page: Path) -> str:
    """Return a page's path in the repository."""
    return page.relative_to(REPOSITORY).as_posix()


def languages(page: Path) -> list[str]:
    """Return the language of each block, "" where none is given."""
    return [match[2] for match in BLOCK.finditer(page.read_text(encoding="utf-8"))]


def shown(page: Path) -> list[Command]:
    """Return the commands of a page's shell blocks."""
    blocks = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [
        Command(page=name(page), line=line)
        for match in blocks
        if match[2] in SHELL and (match[2] or is_shell(match[3]))
        for line in commands(match[3].removeprefix(match[1]).replace(f"\n{match[1]}", "\n"))
    ]


def is_shell(block: str) -> bool:
    """Tell whether a block without a language shows commands."""
    if re.match(r"\s*\$ ", block):
        return True
    return PROGRAM.match(block.lstrip()) is not None and COLUMNS.search(block) is None


def mentioned(page: Path) -> list[Command]:
    """Return the commands that a page's sentences name."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    spans = (" ".join(span.split()) for span in SPAN.findall(text))
    return [Command(page=name(page), line=span) for span in spans if NAMED.match(span)]


def flags_alone(page: Path) -> set[str]:
    """Return the flags that a page's sentences name without their command."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    return {found[0] for span in SPAN.findall(text) if (found := re.match(r"--[a-z][a-z0-9-]*", span))}


def commands(block: str) -> list[str]:
    """Return a block's commands; one goes on behind a backslash, a bar and in an open quotation."""
    prompted = re.search(r"^\$ ", block, re.MULTILINE) is not None
    found: list[str] = []
    open_line = ""
    for line in block.splitlines():
        if not open_line and prompted and not line.startswith("$ "):
            continue
        open_line += COMMENT.sub("", line.removeprefix("$ ") if prompted else line)
        if goes_on(open_line):
            open_line = open_line.removesuffix("\\") + " "
        elif open_line.strip():
            found.append(" ".join(open_line.split()))
            open_line = ""
        else:
            open_line = ""
    return found


def goes_on(line: str) -> bool:
    """Tell whether a shell would wait for the rest of a command."""
    if line.endswith(("\\", "|")):
        return True
    try:
        shlex.split(line)
    except ValueError:
        return True
    return False
