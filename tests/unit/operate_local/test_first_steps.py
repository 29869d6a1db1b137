"""The load that the greeting offers finds the mesh that prints it, from the folder in which it was started."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.pods.pod_access import PodAccess
from operate.local.greeting import EXAMPLES, load_command, write_examples
from operate.local.ports import MeshPorts
from tests.unit.operate_local.local_settings import settings

LOAD = ["load", "--beside", "round-robin"]


@pytest.fixture(autouse=True)
def _as_in_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.argv", [".venv/bin/kvmesh", "up"])


def test_a_mesh_with_the_usual_port_is_found_by_itself() -> None:
    assert shlex.split(load_command(settings())) == [".venv/bin/kvmesh", *LOAD]


def test_beside_another_mesh_the_usual_port_is_named() -> None:
    assert shlex.split(load_command(settings(), others_run=True))[4:] == ["--server", "http://127.0.0.1:10000"]


def test_another_port_and_the_pods_key_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = replace(settings(), ports=MeshPorts.starting_at(12345), pod_access=PodAccess(key_file=Path("key")))
    assert shlex.split(load_command(made))[4:] == [
        *("--server", "http://127.0.0.1:12345"),
        *("--pod-key-file", str(tmp_path / "key")),
    ]


def test_an_installed_command_is_called_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "kvmesh"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load_command(settings()).startswith("kvmesh load ")


def test_each_example_is_a_file_with_its_body(tmp_path: Path) -> None:
    write_examples(tmp_path, model="m")
    written = [json.loads((tmp_path / each.file).read_text(encoding="utf-8")) for each in EXAMPLES]
    assert written == [each.body("m") for each in EXAMPLES]
