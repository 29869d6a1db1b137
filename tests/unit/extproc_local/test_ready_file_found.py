"""The ready file of a running mesh is found by the user who started it, and nobody else's is believed."""

import json
from pathlib import Path

import pytest

from extproc.errors import ConfigError
from extproc.local.ready_file import ReadyMesh, make_folder, running_mesh, usual_ready_file

FACTS = {"gateway": "http://127.0.0.1:10000", "model": "tiny", "endpoints": ["127.0.0.1:8101"], "pids": {"envoy": 1}}
MESH = ReadyMesh(gateway="http://127.0.0.1:10000", model="tiny", endpoints=("127.0.0.1:8101",))


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


def write(port: int) -> Path:
    file = usual_ready_file(port)
    assert make_folder(file)
    file.write_text(json.dumps(FACTS), encoding="utf-8")
    return file


def test_the_only_mesh_is_found_and_none_is_none() -> None:
    assert running_mesh(None) is None
    file = write(10000)
    assert running_mesh(None) == MESH
    file.unlink()
    assert running_mesh(None) is None


def test_of_several_meshes_one_must_be_named() -> None:
    one, other = write(10000), write(20000)
    with pytest.raises(ConfigError, match=f"several meshes run: name one with --ready-file.*{one}, {other}"):
        running_mesh(None)
    assert running_mesh(other) == MESH


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "x.json"
    with pytest.raises(ConfigError, match=f"--ready-file: {broken}: No such file"):
        running_mesh(broken)
    broken.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"--ready-file: {broken} is no ready file"):
        running_mesh(broken)


def test_a_folder_that_others_may_write_is_not_believed(tmp_path: Path) -> None:
    file = write(10000)
    file.parent.chmod(0o777)
    assert not make_folder(file)
    assert running_mesh(None) is None


def test_without_a_folder_there_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("not a folder", encoding="utf-8")
    assert not make_folder(usual_ready_file(10000))
