"""The pages about `kvmesh load` and the demo: their commands are understood, and the fields are those of the result."""

import re
import shlex
from collections.abc import Iterator

import pytest

from operate.cli import build
from operate.load.summary import ArmSummary, LoadReport
from tools.docs_site import DOCS, REPOSITORY

GUIDE = (DOCS / "guides" / "load.md").read_text(encoding="utf-8")
DEMO = (DOCS / "start" / "demo.md").read_text(encoding="utf-8")
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def commands() -> Iterator[list[str]]:
    """Return the calls of `kvmesh load` and `explain` in the pages' blocks of code, without what stands before."""
    for text in (GUIDE, DEMO, README):
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            for line in block.splitlines() if not language else ():
                words = shlex.split(line, comments=True)
                if len(words) > 1 and words[0].endswith("kvmesh") and words[1] in ("load", "explain"):
                    yield words[1:]


def test_the_pages_have_commands() -> None:
    assert len(list(commands())) > 6


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_each_command_is_understood(words: list[str]) -> None:
    command = build().commands[words[0]]
    # a file of the example need not be there; anything that is no option fails
    shown = [word for word in words[1:] if word not in ("--pod-key-file", "key")]
    assert command.make_context(words[0], shown).params


def test_the_guide_names_each_field_of_the_result() -> None:
    section = GUIDE.partition("`-o json` prints")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)(?:\[\])?`", section))
    assert named == {*LoadReport.__struct_fields__, *ArmSummary.__struct_fields__, "p50", "p95", "p99"}
