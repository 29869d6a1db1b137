"""axe-core as npm has it, in the version of `package-lock.json`: fetched once into the cache and checked by npm."""

import json
import shutil
from functools import cache
from pathlib import Path

from tests.required_programs import lacks
from tests.vllm.environment import cache_folder, exclusive, run

HERE = Path(__file__).parent
FILES = ("package.json", "package-lock.json")
DEADLINE_SECONDS = 120.0


@cache
def axe_script() -> str:
    """Return its text; skip where npm is not installed, but fail where programs are demanded."""
    lock = json.loads((HERE / "package-lock.json").read_text(encoding="utf-8"))
    folder = cache_folder() / f"axe-{lock['packages']['node_modules/axe-core']['version']}"
    script = folder / "node_modules" / "axe-core" / "axe.min.js"
    with exclusive(folder.with_name(folder.name + ".lock"), deadline_seconds=DEADLINE_SECONDS):
        if not script.exists():
            _fetch(folder)
    return script.read_text(encoding="utf-8")


def _fetch(folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        lacks("needs npm, which fetches axe-core (Debian: npm)")
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copy(HERE / name, folder / name)
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder)]
    run(command, deadline_seconds=DEADLINE_SECONDS)
