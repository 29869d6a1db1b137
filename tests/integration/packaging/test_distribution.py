"""What a release publishes: the wheel, and the source archive from which the same wheel is built."""

import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from kvmesh import __version__

REPOSITORY = Path(__file__).parents[3]
PACKAGES = ("extproc", "kv_indexer", "kvmesh", "operate", "podsim")
CODE_SUFFIXES = {".py", ".lua", ".html", ".css", ".js", ".svg", ".typed"}
# shown on the package index; everything else of the archive is what git has
WHAT_THE_BUILD_ADDS = {"PKG-INFO"}


def run(*command: str | Path, cwd: Path, path: str | None = None) -> str:
    """Run a command and return what it prints; a failure shows all of it."""
    environment = os.environ | ({"PYTHONPATH": path} if path else {})
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built from the checkout."""
    folder = tmp_path_factory.mktemp("built")
    for target in ("sdist", "wheel"):
        run(sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", folder, cwd=REPOSITORY)
    return folder


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_has_all_code_and_nothing_else(built: Path) -> None:
    found = files_of(next(built.glob("*.whl")))
    code = {
        str(path.relative_to(REPOSITORY))
        for package in PACKAGES
        for path in (REPOSITORY / package).rglob("*")
        if path.suffix in CODE_SUFFIXES
    }
    assert code <= found
    assert {name.split("/")[0] for name in found} == {*PACKAGES, f"kvmesh-{__version__}.dist-info"}
    assert not [name for name in found if "__pycache__" in name]


def test_the_archive_has_what_git_has(built: Path) -> None:
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=REPOSITORY).splitlines()
    files = {name for name in tracked if (path := REPOSITORY / name).is_file() and not path.is_symlink()}
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        found = {member.name.split("/", 1)[1] for member in archive if member.isfile()}
    linked = {name for name in found if name.startswith("charts/kvmesh/monitoring/")}  # a link, followed
    assert found - linked - WHAT_THE_BUILD_ADDS == files


def test_the_archive_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / f"kvmesh-{__version__}"
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path, cwd=source)
    assert files_of(next(tmp_path.glob("*.whl"))) == files_of(next(built.glob("*.whl")))


def test_the_wheel_serves_without_the_checkout(built: Path, tmp_path: Path) -> None:
    wheel, folder = next(built.glob("*.whl")), tmp_path / "site"
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder, wheel),
        cwd=tmp_path,
    )
    where = run(sys.executable, "-c", "import extproc; print(extproc.__file__)", cwd=tmp_path, path=str(folder))
    assert where.startswith(str(folder))
    assert __version__ in run(sys.executable, "-m", "operate", "version", cwd=tmp_path, path=str(folder))
    where_to = ("--pool", "llm/llama", "--gateway", "llm/entry", "--hostname", "llm.example", "--image", "kvmesh:1")
    command = ("-m", "operate", "install", "--dry-run", *where_to)
    rendered = run(sys.executable, *command, cwd=tmp_path, path=str(folder))
    assert "kind: CustomResourceDefinition" in rendered


def test_the_package_index_is_told_what_it_shows(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        metadata = HeaderParser().parsestr(archive.read(f"kvmesh-{__version__}.dist-info/METADATA").decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert {entry.split(",")[0] for entry in metadata.get_all("Project-URL", [])} >= {"Homepage", "Changelog", "Issues"}
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
