"""Writes requirements-image.lock: what the image installs, by version and by the SHA-256 of its wheels.

`python manifests/lock_image.py`, in an environment with pip, from the repository's root. Versions are those of
requirements-dev.lock, which is what the tests run with; wheels are those for Linux on x86-64 and on ARM.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

PYTHON = "3.11"
PLATFORMS = ("x86_64", "aarch64")
HEADER = f"# Made by `python manifests/lock_image.py`: CPython {PYTHON}, Linux, {' and '.join(PLATFORMS)}.\n"


def requirements(root: Path) -> list[str]:
    """What the image needs: the package's dependencies, models' tokenizers, traces, and what builds its wheel."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    optional: dict[str, list[str]] = project["project"]["optional-dependencies"]
    extras = [*optional["models"], *optional["otel"]]
    return [*project["project"]["dependencies"], *extras, *project["build-system"]["requires"]]


def resolve(wanted: list[str], *, constraints: Path, machine: str, folder: Path) -> dict[str, tuple[str, str]]:
    """Ask pip what it would install on a machine: name -> version and SHA-256."""
    report = folder / f"{machine}.json"
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in range(36, 16, -1)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", report]
    command += ["--only-binary=:all:", f"--python-version={PYTHON}", *platforms, f"--platform=manylinux2014_{machine}"]
    command += ["--target", folder / machine, "--constraint", constraints, *wanted]
    subprocess.run([str(part) for part in command], check=True, timeout=1800)
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return {
        each["metadata"]["name"].lower().replace("_", "-"): (
            each["metadata"]["version"],
            each["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for each in found["install"]
    }


def main() -> None:
    """Resolve for each machine and write one lock for all."""
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        by_machine = [
            resolve(
                requirements(root), constraints=root / "requirements-dev.lock", machine=machine, folder=Path(folder)
            )
            for machine in PLATFORMS
        ]
    lines = [HEADER]
    for name in sorted(set().union(*by_machine)):
        versions = {found[name][0] for found in by_machine if name in found}
        if len(versions) != 1:
            sys.exit(f"{name}: not the same version on every machine: {sorted(versions)}")
        hashes = sorted({found[name][1] for found in by_machine if name in found})
        pins = "".join(f" \\\n    --hash=sha256:{each}" for each in hashes)
        lines.append(f"{name}=={versions.pop()}{pins}\n")
    (root / "requirements-image.lock").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
