"""The output format of a command: for people, as JSON, or as YAML.

A command takes `output: Output = OutputForm.TABLE` and `json:"""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kvmesh.plain_text import plain_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

WIDE_ENOUGH = 100_000  # columns: a line for a program is not broken


class OutputForm(StrEnum):
    """The output format."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Output = Annotated[
    OutputForm,
    typer.Option("--output", "-o", help="Output format: table for people, JSON or YAML with stable field names."),
]


def in_form(value: Any, form: OutputForm) -> str:
    """Return data as a document for programs, ending without a line break."""
    if form is OutputForm.YAML:
        import yaml  # noqa: PLC0415  rarely used

        plain = msgspec.to_builtins(value)
        return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=float("inf"))).rstrip("\n")
    return plain_json(msgspec.json.format(msgspec.json.encode(value))).decode()


def print_data(value: Any, form: OutputForm) -> None:
    """Print data as a document for programs."""
    typer.echo(in_form(value, form))


def people_console() -> "Console":
    """Return a console for tables: as wide as the terminal, or without one as wide as the table."""
    from rich.console import Console  # noqa: PLC0415  heavy

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE_ENOUGH
    return console


def print_below(console: "Console", head: "Text", text: "Text") -> None:
    """Print `text` to the right of `head`, wrapped at words, with all lines aligned."""
    margin = len(head.plain)
    for number, line in enumerate(text.wrap(console, max(console.width - margin, margin))):
        line.rstrip()
        console.print((head if number == 0 else head.blank_copy(" " * margin)).append_text(line))
