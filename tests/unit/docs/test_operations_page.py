"""docs/guides/operations.md says what to do about everything that findings and doctor can say."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
WORDS = re.compile(r"`([a-z0-9-]+)`")


def _headings(page: str, level: str) -> list[str]:
    return re.findall(rf"^{level} ([a-z0-9-]+)$", (DOCS / page).read_text(), re.MULTILINE)


def _first_cells(section: str) -> list[str]:
    text = (DOCS / "guides" / "operations.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [word for cell in cells for word in WORDS.findall(cell)]


def test_every_finding_has_a_row() -> None:
    assert _first_cells("A pod's findings") == _headings("reference/findings.md", "##")


def test_every_check_of_the_doctor_is_in_a_row() -> None:
    assert _first_cells("Doctor's checks") == _headings("reference/doctor.md", "###")
