"""A running mesh is found by what it leaves in the folder of its run."""

import json
import os
from pathlib import Path

import pytest

from extproc.errors import ConfigError
from extproc.settings.running_mesh import READY_NAME, RUN_PREFIX
from operate.local.mesh_view import ReadyMesh, running_mesh


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def write(tmp_path: Path, name: str, **facts: object) -> None:
    folder = tmp_path / f"{RUN_PREFIX}{name}"
    folder.mkdir()
    (folder / READY_NAME).write_text(
        json.dumps({"admin": "http://127.0.0.1:9090", "pids": {}} | facts), encoding="utf-8"
    )


def test_the_only_mesh_is_found_and_none_is_none(tmp_path: Path) -> None:
    assert running_mesh(None) is None
    write(tmp_path, "a", gateway="http://127.0.0.1:10000", model="tiny", endpoints=["127.0.0.1:8101"])
    mesh = ReadyMesh(gateway="http://127.0.0.1:10000", model="tiny", endpoints=("127.0.0.1:8101",))
    assert running_mesh(None) == running_mesh("http://127.0.0.1:10000") == mesh
    assert running_mesh("http://10.0.0.1") is None


def test_of_several_meshes_one_must_be_named(tmp_path: Path) -> None:
    write(tmp_path, "a", gateway="http://a")
    write(tmp_path, "b", gateway="http://b")
    with pytest.raises(ConfigError, match="several meshes run on this machine: choose with --server: http://"):
        running_mesh(None)
    assert running_mesh("http://b") == ReadyMesh(gateway="http://b")


def test_what_is_no_mesh_of_this_release_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, "a")
    write(tmp_path, "b", gateway=7)
    assert running_mesh(None) is None


def test_a_folder_of_another_user_is_not_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads a pipe that is called ready.json waits for ever."""

    def never(path: Path) -> bytes:
        raise AssertionError(f"{path} was read")

    write(tmp_path, "a", gateway="http://a")
    other = os.getuid() + 1
    monkeypatch.setattr("os.getuid", lambda: other)
    monkeypatch.setattr(Path, "read_bytes", never)
    assert running_mesh(None) is None


def test_a_link_to_a_mesh_is_no_second_mesh(tmp_path: Path) -> None:
    write(tmp_path, "a", gateway="http://a")
    (tmp_path / f"{RUN_PREFIX}b").symlink_to(tmp_path / f"{RUN_PREFIX}a")
    assert running_mesh(None) == ReadyMesh(gateway="http://a")
