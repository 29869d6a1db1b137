"""Standard output that is no terminal: it is taken as it is, and nothing is left half made."""

import gc
import sys
from pathlib import Path

import pytest

from operate.local.unread_terminal import standard_output


def test_a_file_is_taken_as_it_is_and_nothing_complains_when_it_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.13 reports what fails while an object is forgotten; older ones hide it."""
    complaints: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    with (tmp_path / "output").open("w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert standard_output() is output
    gc.collect()
    assert complaints == []
