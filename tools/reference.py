"""Writes the generated parts of docs/: `python -m tools.reference`; `cli` prints one part.

A part stands between `<!-- python -m MODULE … -->`, which prints it, and `<!-- end -->` or the end of the page. A test
compares every page with what its modules print.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from operate.cli import build
from tools.docs_site import DOCS, REPOSITORY

PART = re.compile(r"(<!-- (?:\w+: )?python -m ([\w. -]+) -->\n)(.*?)(<!-- end -->|\Z)", re.DOTALL)
SHARED = ("config", "log_format", "log_level")  # options of every command
SEVERAL = 2  # commands with the same option that are listed together
DETAILS = re.compile(r"\s*\[([^\[\]]+(?:\[[^\]]*\])?[^\[\]]*)\]$")  # what --help adds to an option's sentence

OF_TYPER = re.compile(r" <(str|path|file|dir|list\[\w+\]|(int|float)( range)?)>")  # types; the help says the unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a command, as --help shows it."""

    name: str
    flags: str
    default: str
    limits: str
    help: str
    is_argument: bool


def commands(command: Any, path: tuple[str, ...] = ("kvmesh",)) -> Iterator[tuple[str, Any]]:
    """Return the commands that do something, sorted, each with the words that call it."""
    if not hasattr(command, "commands"):
        yield " ".join(path), command
        return
    for name, inner in sorted(command.commands.items()):
        yield from commands(inner, (*path, name))


def options(words: str, command: Any) -> list[Option]:
    """Return the options of a command, in the order of its help."""
    context = command.make_context(words, [], resilient_parsing=True)
    return [_option(each, context) for each in command.params if each.name != "help" and not each.hidden]


def _option(parameter: Any, context: Any) -> Option:
    is_argument = parameter.param_type_name == "argument"
    flags, text = parameter.get_help_record(context) or (parameter.name.upper(), "")
    details = DETAILS.search(text)
    parts = [] if details is None else details[1].split("; ")
    default = [part.removeprefix("default: ") for part in parts if part.startswith("default: ")]
    limits = [part for part in parts if not part.startswith(("default: ", "env var: "))]
    return Option(
        name=parameter.name,
        flags=re.sub(r"\s{2,}", " ", OF_TYPER.sub("", flags)),
        default=str(parameter.default).lower() if isinstance(parameter.default, bool) else "".join(default),
        limits=", ".join(limits),
        help=text if details is None else text[: details.start()],
        is_argument=is_argument,
    )


def cli() -> str:
    """Return the shared options, and a section for each command: its help and its own options."""
    found = [(words, command, options(words, command)) for words, command in commands(build())]
    uses = Counter(each for _, _, listed in found for each in listed)
    common = [each for each in found[0][2] if each.name in SHARED]
    mostly: dict[str, Option] = {}  # by name: an option may mean something else to another command
    for each, count in uses.most_common():
        if count >= SEVERAL and each not in common:
            mostly.setdefault(each.name, each)
    shared = sorted(mostly.values(), key=_flags)
    parts = ["## Options of every command", "", *_table(common)]
    parts += ["", "## Options of several commands", "", "A command lists the names of its own among these.", ""]
    parts += _table(shared)
    for words, command, listed in found:
        own = [each for each in listed if each not in common and each not in shared]
        also = [_code(each.flags.split()[0].strip(",")) for each in listed if each in shared]
        parts += ["", f"## {words}", "", *_paragraphs(command.help or command.callback.__doc__ or "")]
        if own:
            parts += ["", *_table(own)]
        if also:
            parts += ["", f"{'Also' if own else 'Options'}: {', '.join(also)}."]
    return "\n".join(parts) + "\n"


def _flags(option: Option) -> str:
    return option.flags


def _paragraphs(text: str) -> list[str]:
    return [line.strip() for line in text.replace("\b", "").replace("\f", "\n").strip().splitlines()]


def _table(listed: list[Option]) -> list[str]:
    rows = ["| option | meaning |", "|---|---|"]
    for each in listed:
        meaning = each.help + (f" ({each.limits})" if each.limits else "")
        default = f" Default: {_code(each.default)}." if each.default not in ("", "false") else ""
        rows.append(f"| {_code(each.flags)} | {_cell(meaning)}{default} |")
    return rows


def _code(text: str) -> str:
    return f"`{_cell(text)}`" if text else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PARTS = {"cli": cli}


def part(command: str) -> str:
    """Return what a part's command prints."""
    module, *arguments = command.split()
    if module == "tools.reference":
        return PARTS[arguments[0]]()
    line = [sys.executable, "-m", module, *arguments]
    return subprocess.run(line, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout


def written_anew(page: Path) -> str:
    """Return a page with its generated parts as they are to be."""

    def fresh(match: re.Match[str]) -> str:
        return match[1] + part(match[2]) + (f"\n{match[4]}" if match[4] else "")

    return PART.sub(fresh, page.read_text(encoding="utf-8"))


def main() -> None:
    """Print a part, or write all of them."""
    if len(sys.argv) > 1:
        sys.stdout.write(PARTS[sys.argv[1]]())
        return
    for page in sorted(DOCS.rglob("*.md")):
        page.write_text(written_anew(page), encoding="utf-8")


if __name__ == "__main__":
    main()
