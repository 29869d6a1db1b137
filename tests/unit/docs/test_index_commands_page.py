"""docs/reference/index-commands.md explains every kind of difference and every field that `-o json` prints."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kv_indexer.inspect.index_audit import KINDS, Difference
from kv_indexer.inspect.inspect_index import Cleared, SizeReport, SlotSize, SourceLine, SourcesReport
from kv_indexer.inspect.verify_index import Audit
from kvmesh.blocks.findings import Finding
from operate.local.index_lookup import EndpointHolding, LookupReport, PromptHolding

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "index-commands.md"


def test_every_kind_has_a_row_with_its_meaning() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)

    assert dict(rows) == KINDS


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("sources", (SourcesReport, SourceLine, Finding)),
        ("lookup", (LookupReport, PromptHolding, EndpointHolding)),
        ("verify", (Audit, Difference)),
        ("size", (SizeReport, SlotSize)),
        ("clear", (Cleared,)),
    ],
)
def test_every_field_is_named_in_its_section(section: str, values: tuple[Any, ...]) -> None:
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)(?:\[\])?`", text))

    assert {field.name for value in values for field in fields(value)} <= named
