"""What another command finds of a running mesh, among whatever else lies in the folder for temporary files."""

from pathlib import Path

import pytest

from extproc.settings.running_mesh import READY_NAME, RUN_PREFIX, running_meshes


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[]", b'{"admin": 1}', b'{"admin": "\xff"}', b'{"admin": ' + b"[" * 100_000]
)
def test_what_is_no_ready_file_is_passed_over(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for number, each in enumerate((content, b'{"admin": "http://127.0.0.1:9090"}')):
        (tmp_path / f"{RUN_PREFIX}{number}").mkdir()
        (tmp_path / f"{RUN_PREFIX}{number}" / READY_NAME).write_bytes(each)

    assert running_meshes() == [{"admin": "http://127.0.0.1:9090"}]
