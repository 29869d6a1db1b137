"""The cached environment: when it counts as whole, and that two builders do not meet."""

from pathlib import Path

import pytest

from tests.vllm.environment import (
    MARKER,
    EnvironmentBuildError,
    VllmEnvironment,
    cache_folder,
    exclusive,
    is_complete,
    run,
    without_torch,
)


def test_an_environment_without_its_marker_or_interpreter_is_not_whole(tmp_path: Path) -> None:
    environment = VllmEnvironment(folder=tmp_path)
    assert not is_complete(environment)
    (tmp_path / MARKER).write_text("{}")
    assert not is_complete(environment)


def test_the_built_environment_is_whole(vllm_environment: VllmEnvironment) -> None:
    assert is_complete(vllm_environment)


def test_a_second_builder_waits_and_then_says_who_holds_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "deep" / "environment.lock"
    with (
        exclusive(lock, deadline_seconds=1.0),
        pytest.raises(EnvironmentBuildError, match=r"environment\.lock"),
        exclusive(lock, deadline_seconds=0.0),
    ):
        pass
    with exclusive(lock, deadline_seconds=0.0):
        pass


def test_a_failing_step_shows_its_output() -> None:
    with pytest.raises(EnvironmentBuildError, match="no such luck"):
        run(["sh", "-c", "echo no such luck; exit 3"], deadline_seconds=10.0)


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVMESH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "kvmesh"
    monkeypatch.setenv("KVMESH_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_what_vllm_declares_is_installed_without_torchs_packages_and_without_extras() -> None:
    declared = [
        "numpy",
        "transformers!=5.0.*,>=4.56.0",
        'torch==2.13.0+cpu; platform_machine == "x86_64"',
        "torchvision",
        'torchcodec>=0.14; platform_machine != "riscv64"',
        'pandas; extra == "bench"',
        'tomli; python_version < "3.11"',
        'setuptools<81.0.0,>=77.0.3; python_version > "3.10"',
        "fastapi[standard]>=0.115.0",
    ]
    assert without_torch(declared) == [
        "numpy",
        "transformers!=5.0.*,>=4.56.0",
        "setuptools<81.0.0,>=77.0.3",
        "fastapi[standard]>=0.115.0",
    ]
