"""The workflows that test and release kvmesh are what GitHub would run."""

import re
import subprocess
from pathlib import Path

from tests.mesh.go_programs import go_program

REPOSITORY = Path(__file__).parents[2]
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
MAKE = re.compile(r"\bmake (?:PYTHON=python )?([a-z-]+)")


def test_actionlint_finds_nothing() -> None:
    done = subprocess.run(
        [go_program("actionlint"), *WORKFLOWS], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_actionlint_finds_what_is_wrong(tmp_path: Path) -> None:
    wrong = tmp_path / "test.yml"
    wrong.write_text(WORKFLOWS[-1].read_text(encoding="utf-8").replace("runs-on:", "runs-of:"), encoding="utf-8")
    done = subprocess.run([go_program("actionlint"), wrong], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "runs-of" in done.stdout


def test_what_the_workflows_run_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for path in WORKFLOWS:
        text = path.read_text(encoding="utf-8")
        assert set(MAKE.findall(text)) <= targets
        assert ".ci/run" not in text or (REPOSITORY / ".ci" / "run").is_file()


def test_actions_are_named_by_commit() -> None:
    for path in WORKFLOWS:
        used = re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))
        assert used
        assert not [each for each in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", each)]
