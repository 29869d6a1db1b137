"""The ready file: complete or not there."""

import json
from pathlib import Path

import pytest

from operate.local.errors import UpError
from operate.local.mesh_view import ready_facts, remove_stale, temporary_path, write_ready_file
from tests.unit.operate_local.local_settings import settings


def test_it_tells_every_address_and_every_pid(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"

    write_ready_file(path, ready_facts(settings(), redis="redis://127.0.0.1:7000/0", pids={"redis": 1, "envoy": 2}))

    assert json.loads(path.read_text()) == {
        "gateway": "http://127.0.0.1:10000",
        "admin": "http://127.0.0.1:9090",
        "extproc": "127.0.0.1:9002",
        "indexer_admin": "http://127.0.0.1:9091",
        "redis": "redis://127.0.0.1:7000/0",
        "envoy_admin": "http://127.0.0.1:9901",
        "endpoints": ["127.0.0.1:8101", "127.0.0.1:8102"],
        "model": "tiny",
        "pids": {"redis": 1, "envoy": 2},
    }
    assert [entry.name for entry in tmp_path.iterdir()] == ["ready.json"]


def test_what_an_earlier_run_left_is_gone_before_this_one_is_ready(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    path.write_text("{}")

    remove_stale(path)

    assert not path.exists()


def test_a_place_that_cannot_be_written_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "ready.json"

    with pytest.raises(UpError, match=rf"^the ready file {path} cannot be written: No such file or directory$"):
        remove_stale(path)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    path, victim = tmp_path / "ready.json", tmp_path / "victim"
    victim.write_text("precious")
    for write in (remove_stale, lambda path: write_ready_file(path, {})):
        temporary_path(path).symlink_to(victim)
        write(path)
        assert victim.read_text() == "precious"
        temporary_path(path).unlink(missing_ok=True)
    assert json.loads(path.read_text()) == {}
