"""The image's recipe: checked by its linter, pinned by hash, and the same user as the pods'."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from operate.install.pod_parts import USER_ID

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
LOCK = (ROOT / "requirements-image.lock").read_text(encoding="utf-8")
LINTER = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!; ]", name)[0]).lower()


@pytest.mark.skipif(LINTER is None, reason="hadolint is not installed")
def test_the_linter_has_nothing_to_say() -> None:
    assert LINTER is not None
    done = subprocess.run([LINTER, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_package_is_pinned_by_version_and_hash() -> None:
    entries = re.split(r"\n(?=\S)", LOCK.partition("\n")[2].strip())
    assert len(entries) > 40
    assert [each for each in entries if not re.match(r"^[\w.-]+==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", each)] == []


def test_what_is_pinned_is_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = {canonical(each) for each in project["project"]["dependencies"]}
    for extra in ("models", "mistral", "harmony", "otel"):
        needed |= {canonical(each) for each in project["project"]["optional-dependencies"][extra]}
    needed |= {canonical(each) for each in project["build-system"]["requires"]}
    pinned = {canonical(line) for line in LOCK.splitlines() if re.match(r"^[\w.-]+==", line)}
    assert needed - pinned == set()


def test_the_image_installs_nothing_unpinned_and_runs_as_the_user_of_the_pods() -> None:
    assert f"\nUSER {USER_ID}:{USER_ID}\n" in DOCKERFILE
    installs = [line for line in DOCKERFILE.splitlines() if "pip install" in line]
    assert len(installs) == 2
    assert all("--require-hashes" in line or "--no-index" in line for line in installs)


def test_the_base_image_is_what_the_build_is_given_in_every_stage() -> None:
    """So that a digest, which the build is given, holds for all of the image."""
    argument = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert argument is not None
    stages = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert stages == ["${PYTHON_IMAGE}"] * 2


def test_only_what_is_copied_reaches_the_build() -> None:
    copied = {
        source.removeprefix("./")
        for line in DOCKERFILE.splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert lines[1] == "*"
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == copied
