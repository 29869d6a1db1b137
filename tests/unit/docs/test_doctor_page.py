"""docs/reference/doctor.md explains every check, in the order in which they are made."""

from pathlib import Path

from operate.doctor.checks import CHECKS

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "doctor.md"


def test_every_check_has_a_section_and_nothing_else_has() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()

    assert [line[4:] for line in lines if line.startswith("### ")] == list(CHECKS)
