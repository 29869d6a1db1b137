"""What `make` shows while pip installs: how far it is on a terminal, elsewhere a line for each step."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tools.install_progress import Progress, run, shown_lines

PIP = """\
Looking in indexes: https://example.org
Collecting aiohttp==3.14 (from -r lock)
  Downloading aiohttp-3.14-py3-none-any.whl (1 kB)
Requirement already satisfied: attrs==26 in /venv (from -r lock)
Installing collected packages: aiohttp, rich, kvmesh
Successfully installed aiohttp-3.14 rich-15 kvmesh-0.1
"""
Captured = pytest.CaptureFixture[str]


def test_the_steps_are_read_from_what_pip_says() -> None:
    progress, words = Progress(), []
    for line in PIP.splitlines():
        progress = progress.after(line)
        words.append(progress.words(installed=2))

    assert list(shown_lines(iter(words))) == [
        "fetching packages",
        "fetching packages: 1 (aiohttp)",
        "fetching packages: 2 (attrs)",
        "installing 3 packages: 2 done",
    ]


def pip(output: str, status: int = 0) -> list[str]:
    return [sys.executable, "-S", "-c", f"import sys; sys.stdout.write({output!r}); sys.exit({status})"]


def test_without_a_terminal_there_are_lines_and_no_control_characters(capsys: Captured) -> None:
    assert run(pip(PIP), what="kvmesh", is_terminal=False, installed=lambda: 0) == 0
    lines = capsys.readouterr().out.splitlines()

    assert lines[-2] == "kvmesh: installing 3 packages"
    assert lines[-1].startswith("kvmesh: done in ")
    assert all(line.isprintable() for line in lines)


def test_on_a_terminal_one_line_is_written_over(capsys: Captured) -> None:
    assert run(pip(PIP), what="kvmesh", is_terminal=True, installed=lambda: 0) == 0
    shown = capsys.readouterr().out

    assert shown.count("\n") == 1
    assert all(len(each) <= 79 for each in shown.split("\r"))


def test_what_pip_said_is_shown_where_it_fails(capsys: Captured) -> None:
    assert run(pip("Collecting nothing\nno space left\n", 3), what="x", is_terminal=False, installed=lambda: 0) == 3
    shown = capsys.readouterr()

    assert shown.err.splitlines() == ["Collecting nothing", "no space left"]
    assert "done" not in shown.out


PIP_THAT_IS_INTERRUPTED = """\
import sys, time
try:
    print("Installing collected packages: x", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit("ERROR: Operation cancelled by user")
"""


# a shell's background jobs, and with them these tests, ignore SIGINT
INSTALL = """\
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from tools.install_progress import main
main()
"""


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "pip.py").write_text(PIP_THAT_IS_INTERRUPTED)  # `python -m pip` finds it first
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(
            [sys.executable, "-c", INSTALL, "kvmesh", "x"],
            stdout=subprocess.PIPE,
            stderr=told,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}", "INSTALL_AGAIN": "make demo"},
            start_new_session=True,
        )
        assert process.stdout is not None
        assert any("installing" in line for line in process.stdout)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does

        assert process.wait() == 130
        process.stdout.close()
        told.seek(0)
        assert told.read() == "stopped; run make demo again to go on\n"
