"""The form in which a command prints what it has found: for people, as JSON, or as YAML.

A command takes `output: Output = OutputForm.TABLE` and `json: AsJson = False`, the name from before there were forms.
"""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kvmesh.errors import SettingError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

WIDE_ENOUGH = 100_000  # columns: a line for a program is not broken


class OutputForm(StrEnum):
    """How something is printed."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Output = Annotated[
    OutputForm,
    typer.Option("--output", "-o", help="How it is printed: for people, or as JSON or YAML with stable field names."),
]
AsJson = Annotated[bool, typer.Option("--json", hidden=True, help="As -o json.")]


def chosen_form(output: OutputForm, *, json: bool) -> OutputForm:
    """Return the form that two options ask for. Raise SettingError where they differ."""
    if json and output is OutputForm.YAML:
        raise SettingError("--json means -o json: leave it out beside -o yaml")
    return OutputForm.JSON if json else output


def in_form(value: Any, form: OutputForm) -> str:
    """Return data as a document for programs, ending without a line break."""
    if form is OutputForm.YAML:
        import yaml  # noqa: PLC0415  few ask for it

        plain = msgspec.to_builtins(value)
        return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=float("inf"))).rstrip("\n")
    return msgspec.json.format(msgspec.json.encode(value)).decode()


def print_data(value: Any, form: OutputForm) -> None:
    """Print data as a document for programs."""
    typer.echo(in_form(value, form))


def people_console() -> "Console":
    """Return what prints tables: as wide as the terminal, and where there is none, as wide as the table."""
    from rich.console import Console  # noqa: PLC0415  heavy

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE_ENOUGH
    return console


def print_below(console: "Console", head: "Text", text: "Text") -> None:
    """Print a text beside what it belongs to, wrapped at words, each line below the one before."""
    margin = len(head.plain)
    for number, line in enumerate(text.wrap(console, max(console.width - margin, margin))):
        line.rstrip()
        console.print((head if number == 0 else head.blank_copy(" " * margin)).append_text(line))
