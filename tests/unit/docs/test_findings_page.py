"""docs/reference/findings.md is where alerts and messages lead to: it explains every reason."""

from pathlib import Path

from extproc.answers.realised import REMEDIES
from extproc.pools.pool_tokens import FACTS as TOKEN_FACTS
from kvmesh.blocks.findings import FindingReason

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "findings.md"


def test_every_finding_has_a_row_in_the_table_and_a_section_and_nothing_else_has() -> None:
    lines = PAGE.read_text().splitlines()
    reasons = [*(reason.value for reason in FindingReason), *REMEDIES, *TOKEN_FACTS]

    assert [line[3:] for line in lines if line.startswith("## ")] == reasons
    assert [line[4:].partition("`")[0] for line in lines if line.startswith("| [`")] == reasons
