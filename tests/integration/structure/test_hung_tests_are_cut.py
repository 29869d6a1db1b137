"""A test that hangs fails with its stack, leaves no process, and costs the run no more than its limit."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
DEADLINE_SECONDS = 60.0
HEAD = """
import asyncio, subprocess, threading
from pathlib import Path
import pytest, uvloop

PID = Path(__file__).with_name("pid")

def start():
    child = subprocess.Popen(["sleep", "600"])
    PID.write_text(str(child.pid))
    return child

async def hang():
    child = start()
    try:
        await asyncio.Event().wait()
    finally:
        child.kill()
        child.wait(5)

def test_later():
    pass
"""
HANGS = {
    "pytest-asyncio": "async def test_hung(): await hang()",
    "asyncio": "def test_hung(): asyncio.run(hang())",
    "fixture": """
@pytest.fixture
def child():
    child = start()
    yield child
    child.kill()
    child.wait(5)
def test_hung(child): child.wait()
""",
}
HANG_FOR_GOOD = {
    "cleaning up": """
def test_hung():
    start()
    try:
        threading.Event().wait()
    finally:
        threading.Event().wait()
""",
    "uvloop": "def test_hung(): uvloop.run(hang())",  # waits in C and never looks at the alarm
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    code: int
    output: str


def run(folder: Path, test: str) -> Run:
    """Run a file with this test, then one that passes, in a pytest of its own, with limits of a second."""
    file = folder / "test_it.py"
    before, later = HEAD.split("def test_later")
    file.write_text(f"{before}\n{test}\ndef test_later{later}", encoding="utf-8")
    ini = folder / "pytest.ini"
    ini.write_text("[pytest]\nasyncio_mode = auto\ntimeout = 1\ntimeout_method = signal\nhang_cleanup_seconds = 1\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.hang_guard", "-p", "no:cacheprovider", "-c", str(ini)]
    done = subprocess.run(
        [*command, str(file)],
        cwd=REPOSITORY,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    return Run(code=done.returncode, output=done.stdout + done.stderr)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def ends(pid: int) -> bool:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_gone(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("where", HANGS)
def test_a_hung_test_fails_with_its_stack_and_cleans_up_and_the_run_goes_on(where: str, tmp_path: Path) -> None:
    done = run(tmp_path, HANGS[where])

    assert "Timeout (>1.0s)" in done.output
    assert "test_it.py" in done.output
    assert "1 failed, 1 passed" in done.output
    assert ends(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("where", HANG_FOR_GOOD)
def test_a_test_that_hangs_for_good_ends_the_run_with_all_stacks_and_without_its_children(
    where: str, tmp_path: Path
) -> None:
    done = run(tmp_path, HANG_FOR_GOOD[where])

    assert done.code == 70
    assert "test_it.py::test_hung has not ended within 2 s" in done.output
    assert "in test_hung" in done.output.split("the run ends")[1]
    assert ends(int((tmp_path / "pid").read_text()))
