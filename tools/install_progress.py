"""Runs pip and says how far it is: `python tools/install_progress.py WHAT pip-arguments…`; for `make`.

On a terminal one line is written over; anywhere else each step is a line. Runs before anything is installed, so that it
knows the standard library alone. Ends with pip's exit status, and shows what pip said where that is none of success.
Ctrl-C ends pip, too, and is told in one line.
"""

import os
import re
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

LOOK_SECONDS = 0.2
WIDTH = 79
LAST_LINES = 20
STOP_SECONDS = 10.0  # pip removes what it has half done
AGAIN = "INSTALL_AGAIN"  # the variable that has the command to go on with
INTERRUPTED = 130  # as a shell has it for SIGINT
FETCHED = re.compile(r"\s*(?:Collecting|Requirement already satisfied:) ([A-Za-z0-9._-]+)")
INSTALLING = "Installing collected packages: "


@dataclass(frozen=True, slots=True)
class Progress:
    """How far pip is, as it says itself."""

    fetched: int = 0
    name: str = ""  # of the package fetched last
    wanted: int = 0  # packages to install; 0: still fetching

    def after(self, line: str) -> "Progress":
        """What is known once pip has written the line."""
        if line.startswith(INSTALLING):
            return replace(self, wanted=len(line.removeprefix(INSTALLING).split(",")))
        if found := FETCHED.match(line):
            return replace(self, fetched=self.fetched + 1, name=found[1])
        return self

    @property
    def step(self) -> str:
        """The step, without numbers that change."""
        return f"installing {self.wanted} packages" if self.wanted else "fetching packages"

    def words(self, installed: int) -> str:
        """The step and how far it is."""
        if self.wanted:
            return f"{self.step}: {min(installed, self.wanted)} done"
        return f"{self.step}: {self.fetched} ({self.name})" if self.fetched else self.step


def shown_lines(steps: Iterator[str]) -> Iterator[str]:
    """Each step once."""
    last = ""
    for step in steps:
        if step != last:
            yield step
        last = step


def run(command: list[str], *, what: str, is_terminal: bool, installed: Callable[[], int]) -> int:
    """Run pip, show how far it is, and return its exit status; `installed` counts the packages that are there."""
    began, before = time.monotonic(), installed()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    problems: list[str] = []  # held back to the end: they would tear the line apart, and Ctrl-C makes some
    progress = Progress()

    def read() -> None:
        nonlocal progress
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            progress = progress.after(line)

    def read_problems() -> None:
        assert process.stderr is not None
        problems.extend(line.rstrip() for line in process.stderr)

    reader = threading.Thread(target=read, daemon=True)
    problem_reader = threading.Thread(target=read_problems, daemon=True)
    reader.start()
    problem_reader.start()

    def steps() -> Iterator[str]:
        while reader.is_alive():
            yield progress.words(installed() - before) if is_terminal else progress.step
            reader.join(LOOK_SECONDS)
        yield progress.step if not is_terminal else ""

    try:
        for step in shown_lines(steps()):
            _show(what, step, is_terminal=is_terminal)
        status = process.wait()
        problem_reader.join()
    except KeyboardInterrupt:
        _stop(process)
        raise
    if status:
        problems[:0] = lines[-LAST_LINES:]
    else:
        print(f"{what}: done in {time.monotonic() - began:.0f} s", flush=True)
    for line in problems:
        print(line, file=sys.stderr)
    return status


def _show(what: str, step: str, *, is_terminal: bool) -> None:
    if is_terminal:
        print(f"\r{f'{what}: {step}'[:WIDTH]:<{WIDTH}}" if step else f"\r{'':<{WIDTH}}\r", end="", flush=True)
    else:
        print(f"{what}: {step}", flush=True)


def _stop(process: subprocess.Popen[str]) -> None:
    """Wait for pip, which has met the same Ctrl-C; end it where it goes on. A second Ctrl-C waits for nothing."""
    try:
        process.wait(STOP_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()


def count_installed() -> int:
    """How many packages the environment has."""
    return sum(1 for _ in Path(sysconfig.get_path("purelib")).glob("*.dist-info"))


def main() -> None:
    """Install what the arguments say, into the environment that runs this."""
    what, *arguments = sys.argv[1:]
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", *arguments]
    try:
        status = run(pip, what=what, is_terminal=sys.stdout.isatty(), installed=count_installed)
    except KeyboardInterrupt:
        print(end="\n" if sys.stdout.isatty() else "", flush=True)
        print(f"stopped; run {os.environ.get(AGAIN, 'the same command')} again to go on", file=sys.stderr)
        status = INTERRUPTED
    sys.exit(status)


if __name__ == "__main__":
    main()
