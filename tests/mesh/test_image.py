"""The image's file system, as far as it can be built without a daemon: its steps run, and its program starts."""

import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from operate.install.pod_parts import USER_ID
from tests.mesh.image import BUILD_SECONDS, Stage, build

pytestmark = pytest.mark.timeout(BUILD_SECONDS)  # the first test waits for the image


@pytest.fixture(scope="module")
def image() -> Iterator[Stage]:
    folder = Path(tempfile.mkdtemp(prefix="kvmesh-image-"))  # not pytest's own, which is closed to other users
    folder.chmod(0o755)
    try:
        yield build(folder)
    finally:
        shutil.rmtree(folder)


def test_the_program_starts_as_the_user_of_the_pods(image: Stage) -> None:
    assert image.user == f"{USER_ID}:{USER_ID}"
    done = image.command("version")
    assert done.returncode == 0, done.stderr
    assert f"kvmesh {version('kvmesh')}" in done.stdout


@pytest.mark.parametrize("role", ["extproc", "indexer", "doctor", "install"])
def test_every_role_is_there(image: Stage, role: str) -> None:
    done = image.command(role, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_it_renders_an_installation_with_the_files_that_it_was_given(image: Stage) -> None:
    flags = ("--pool", "llm/vllm", "--gateway", "istio-ingress/g", "--hostname", "h", "--image", "x", "--monitoring")
    done = image.command("install", "--dry-run", *flags)
    assert done.returncode == 0, done.stderr
    kinds = {each["kind"] for each in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader)}
    assert {"CustomResourceDefinition", "PrometheusRule", "ConfigMap"} <= kinds


def test_nothing_is_written_where_it_is_read_only(image: Stage) -> None:
    before = set(image.root.rglob("*"))
    assert image.command("version").returncode == 0
    assert set(image.root.rglob("*")) == before
    assert not [path for path in (image.root / "opt").rglob("*") if path.lstat().st_uid == USER_ID]
