"""Runs pip and says how far it is: `python tools/install_progress.py WHAT pip-arguments…`; for `make`.

On a terminal one line is written over; anywhere else each step is a line. Runs before anything is installed, so that it
knows the standard library alone. Ends with pip's exit status, and shows what pip said where that is none of success.
"""

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
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines: list[str] = []
    progress = Progress()

    def read() -> None:
        nonlocal progress
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            progress = progress.after(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()

    def steps() -> Iterator[str]:
        while reader.is_alive():
            yield progress.words(installed() - before) if is_terminal else progress.step
            reader.join(LOOK_SECONDS)
        yield progress.step if not is_terminal else ""

    for step in shown_lines(steps()):
        if is_terminal:
            print(f"\r{f'{what}: {step}'[:WIDTH]:<{WIDTH}}" if step else f"\r{'':<{WIDTH}}\r", end="", flush=True)
        else:
            print(f"{what}: {step}", flush=True)
    status = process.wait()
    if status:
        print("\n".join(lines[-LAST_LINES:]), file=sys.stderr)
    else:
        print(f"{what}: done in {time.monotonic() - began:.0f} s", flush=True)
    return status


def count_installed() -> int:
    """How many packages the environment has."""
    return sum(1 for _ in Path(sysconfig.get_path("purelib")).glob("*.dist-info"))


def main() -> None:
    """Install what the arguments say, into the environment that runs this."""
    what, *arguments = sys.argv[1:]
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", *arguments]
    sys.exit(run(pip, what=what, is_terminal=sys.stdout.isatty(), installed=count_installed))


if __name__ == "__main__":
    main()
