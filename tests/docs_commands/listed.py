"""Reads `listed.yaml`: what is done about each command that the pages show."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.docs_commands.pages import PAGES, Command, name, shown

# of these the commands may be parsed only: they take minutes, vLLM or a GPU
PARSED_FOLDERS = ("docs/evidence/", "docs/decisions/", "docs/explanation/")
TREATMENTS = ("run", "parse", "not")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """An entry: the beginning of a command, what is done about it, and what is expected of it or why it is not run."""

    page: str
    beginning: str
    treatment: str
    text: str = ""


def read_list() -> list[Listed]:
    """Return all entries."""
    pages: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "listed.yaml").read_text("utf-8"))
    return [
        Listed(page=page, beginning=beginning, treatment=treatment, text=texts[beginning] if texts else "")
        for page, treatments in pages.items()
        for treatment, entries in treatments.items()
        for texts in [entries if isinstance(entries, dict) else {}]
        for beginning in entries
    ]


def entry_of(command: Command, entries: list[Listed]) -> Listed | None:
    """Return the entry of a command, the one with the longest beginning."""
    fitting = [each for each in entries if each.page == command.page and command.line.startswith(each.beginning)]
    return max(fitting, key=lambda each: len(each.beginning), default=None)


def to_list() -> list[Command]:
    """Return the commands that must be in the list."""
    return [each for page in PAGES if not name(page).startswith(PARSED_FOLDERS) for each in shown(page)]
