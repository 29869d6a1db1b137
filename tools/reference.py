"""Writes the generated parts of docs/: `python -m tools.reference`; `cli` or `configuration` prints one part.

A part stands between `<!-- python -m MODULE … -->`, which prints it, and `<!-- end -->` or the end of the page. A test
compares every page with what its modules print.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extproc.cli import ENVIRONMENT_PREFIX, build
from tools.docs_site import DOCS, REPOSITORY

PART = re.compile(r"(<!-- (?:\w+: )?python -m ([\w. -]+) -->\n)(.*?)(<!-- end -->|\Z)", re.DOTALL)
SHARED = ("config", "log_format", "log_level")  # options of every command
DETAILS = re.compile(r"\s*\[([^\[\]]+(?:\[[^\]]*\])?[^\[\]]*)\]$")  # what --help adds to an option's sentence


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
        flags=re.sub(r"\s{2,}", " ", flags),
        default=str(parameter.default).lower() if isinstance(parameter.default, bool) else "".join(default),
        limits=", ".join(limits),
        help=text if details is None else text[: details.start()],
        is_argument=is_argument,
    )


def cli() -> str:
    """Return a section for each command: its help and its options."""
    root = build()
    found = list(commands(root))
    parts = ["## Options of every command", "", *_table([each for each in options(*found[0]) if each.name in SHARED])]
    for words, command in found:
        own = [each for each in options(words, command) if each.name not in SHARED]
        parts += ["", f"## {words}", "", *_paragraphs(command.help or command.callback.__doc__ or "")]
        if own:
            parts += ["", *_table(own)]
    return "\n".join(parts) + "\n"


def _paragraphs(text: str) -> list[str]:
    return [line.strip() for line in text.replace("\b", "").replace("\f", "\n").strip().splitlines()]


def _table(listed: list[Option]) -> list[str]:
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for each in listed:
        meaning = each.help + (f" ({each.limits})" if each.limits else "")
        rows.append(f"| {_code(each.flags)} | {_code(each.default)} | {_cell(meaning)} |")
    return rows


def configuration() -> str:
    """Return every setting once: its key in the file, its variable, its default, and the commands that take it."""
    settings: dict[str, list[tuple[str, Option]]] = {}
    for words, command in commands(build()):
        for each in options(words, command):
            if not each.is_argument and each.name != "config":
                settings.setdefault(each.name, []).append((words.removeprefix("kvmesh "), each))
    count = len(list(commands(build())))
    rows = ["| key | environment variable | default | commands |", "|---|---|---|---|"]
    for name, uses in sorted(settings.items()):
        defaults = dict.fromkeys(option.default for _, option in uses)
        taken = "all" if len(uses) == count else ", ".join(_code(words) for words, _ in uses)
        shown = " or ".join(_code(default) or "none" for default in defaults) if any(defaults) else ""
        rows.append(f"| `{name}` | `{ENVIRONMENT_PREFIX}{name.upper()}` | {shown} | {taken} |")
    return "\n".join(rows) + "\n"


def _code(text: str) -> str:
    return f"`{_cell(text)}`" if text else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PARTS = {"cli": cli, "configuration": configuration}


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
