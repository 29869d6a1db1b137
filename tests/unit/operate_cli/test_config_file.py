"""The file of `--config` is for one command and the processes that it starts, not for the whole process."""

from pathlib import Path
from typing import Any

import pytest

from operate.cli import build
from operate.local import service
from operate.local.stack_settings import StackSettings


def test_up_has_its_children_read_its_file_and_leaves_the_environment_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[StackSettings] = []

    async def run(settings: StackSettings) -> None:
        started.append(settings)

    monkeypatch.setattr(service, "run", run)
    monkeypatch.chdir(tmp_path)
    Path("kvmesh.yaml").write_text("port_base: 9000\n", encoding="utf-8")
    root: Any = build()
    root(["up", "--config", "kvmesh.yaml"], prog_name="kvmesh", standalone_mode=False)
    (settings,) = started
    assert settings.ports.gateway == 9000
    # with its full path: a child may have another working directory
    assert settings.shared_flags[:2] == ("--config", str(tmp_path / "kvmesh.yaml"))
