"""Options are read as typer reads them, without what typer reads them with."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from kvmesh.plain_options import plain_value, read_plainly


class Colour(StrEnum):
    """A choice."""

    RED = "red"
    BLUE = "blue"


def command() -> Any:
    """A command with an option of each kind."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def main(
        text: str = "a",
        count: Annotated[int, typer.Option(min=0, max=9)] = 5,
        seconds: Annotated[float, typer.Option(min=0)] = 5,
        switch: bool = False,
        colour: Colour = Colour.RED,
        file: Annotated[Path | None, typer.Option(dir_okay=False)] = None,
        folder: Annotated[Path | None, typer.Option(exists=True, file_okay=False)] = None,
        many: Annotated[list[str] | None, typer.Option()] = None,
    ) -> Any:
        return text, count, seconds, switch, colour, file, folder, many

    return typer.main.get_command(app)


def answer(reader: Any, *words: str) -> Any:
    """What the command got, with types, or what it said was wrong."""
    try:
        got = reader(list(words), standalone_mode=False)
    except Exception as error:
        return type(error).__name__, str(error)
    return got if isinstance(got, int) else [(type(each), each) for each in got]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--text= --count 9 --seconds 0.25 --switch --colour blue",
        "--count 09 --seconds 7 --no-switch --many a --many b",
        "--count -0 --seconds 1e3",
        "--count 10",
        "--count -1",
        "--count 1_0",
        "--count x",
        "--count 1.0",
        "--count 99999999999999999999",
        "--seconds -0.5",
        "--seconds nan",
        "--seconds .5",
        "--colour RED",
        "--colour green",
        "--file /dev/null",
        "--file /nowhere/at/all",
        "--file /",
        "--folder /",
        "--folder /dev/null",
        "--folder /nowhere",
        "--unknown 1",
    ],
)
def test_what_is_read_plainly_is_what_typer_reads(words: str) -> None:
    plain, usual = command(), command()
    read_plainly(plain, ())
    assert answer(plain, *words.split()) == answer(usual, *words.split())


def test_of_the_usual_values_none_is_left_to_typer() -> None:
    options = {each.name: each.type_descriptor for each in command().params}
    usual = {"text": "a", "count": "7", "seconds": "0.5", "switch": True, "colour": "blue", "file": "/dev/null"}
    usual |= {"folder": "/"}
    for name, value in usual.items():
        assert plain_value(value, options[name].annotation, options[name].parameter_info) is not None, name
