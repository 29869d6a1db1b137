"""What a command prints for programs."""

import json
from dataclasses import dataclass
from io import StringIO

import pytest
import yaml
from rich.console import Console
from rich.text import Text

from kvmesh.output.forms import OutputForm, in_form, people_console, print_below


@dataclass(frozen=True)
class Row:
    """Something that is printed."""

    name: str
    blocks: int | None


ROWS = [Row(name="10.0.0.1:8000 – é: yes", blocks=3), Row(name="no", blocks=None)]


@pytest.mark.parametrize(("form", "read"), [(OutputForm.JSON, json.loads), (OutputForm.YAML, yaml.safe_load)])
def test_both_documents_say_the_same(form: OutputForm, read: object) -> None:
    assert callable(read)
    assert read(in_form(ROWS, form)) == [{"name": row.name, "blocks": row.blocks} for row in ROWS]


def test_yaml_keeps_the_order_and_breaks_no_line() -> None:
    assert in_form({"b": "x " * 200, "a": 1}, OutputForm.YAML).splitlines()[1] == "a: 1"


def test_a_line_for_a_program_is_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    people_console().print("word " * 500)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_long_line_is_wrapped_at_words_below_its_beginning() -> None:
    console = Console(file=StringIO(), width=30)
    print_below(console, Text("error  "), Text("the pod's template and ours differ: see chatTemplate"))
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue().splitlines() == [
        "error  the pod's template and",
        "       ours differ: see",
        "       chatTemplate",
    ]
