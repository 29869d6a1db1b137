"""Whom `kvmesh load` asks, by what the command line says and what runs."""

import json
from pathlib import Path

import pytest

from extproc.errors import ConfigError
from extproc.settings.running_mesh import READY_NAME, RUN_PREFIX
from kvmesh.pods.pod_access import PodAccess
from operate.load.play import Arm
from operate.local.run_load import Wanted, choose_arms


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def _running(tmp_path: Path) -> None:
    folder = tmp_path / f"{RUN_PREFIX}x"
    folder.mkdir()
    facts = {"gateway": "http://127.0.0.1:20000", "model": "tiny", "endpoints": ["127.0.0.1:1", "127.0.0.1:2"]}
    (folder / READY_NAME).write_text(json.dumps(facts | {"admin": "http://127.0.0.1:3"}), encoding="utf-8")


def arms(**given: str | None) -> tuple[Arm, ...]:
    return choose_arms(Wanted(**given), headers={"x-a": "b"}, salt="s")  # type: ignore[arg-type]


def told(each: Arm) -> tuple[str, tuple[str, ...], str]:
    return each.name, tuple(each.target.urls), each.target.model


def test_without_anything_the_demos_usual_port_is_asked() -> None:
    assert [told(each) for each in arms()] == [("kvmesh", ("http://127.0.0.1:10000",), "")]


@pytest.mark.usefixtures("_running")
def test_the_running_mesh_is_asked_and_its_pods_in_turn() -> None:
    ours, other = arms(beside="round-robin")

    assert told(ours) == ("kvmesh", ("http://127.0.0.1:20000",), "tiny")
    assert told(other) == ("round-robin", ("http://127.0.0.1:1", "http://127.0.0.1:2"), "tiny")
    assert ours.salt != other.salt
    assert ours.target.headers == other.target.headers == {"x-a": "b"}
    assert arms(server="127.0.0.1:20000", beside="round-robin") == (ours, other)


@pytest.mark.usefixtures("_running")
def test_a_server_of_ones_own_has_its_own_model() -> None:
    assert [told(each) for each in arms(server="https://llm.example/v1/", beside="http://10.0.0.9:8000")] == [
        ("llm.example", ("https://llm.example",), ""),
        ("10.0.0.9:8000", ("http://10.0.0.9:8000",), ""),
    ]
    _, other = arms(server="llm.example", beside="round-robin", endpoints="127.0.0.1:8,127.0.0.1:9", model="m")
    assert told(other) == ("round-robin", ("http://127.0.0.1:8", "http://127.0.0.1:9"), "m")


def test_round_robin_needs_pods_and_another_arm_needs_a_url() -> None:
    with pytest.raises(ConfigError, match="--beside round-robin: no `kvmesh up` with this gateway runs here"):
        arms(beside="round-robin")
    with pytest.raises(ConfigError, match="--beside least-request: round-robin, or a URL"):
        arms(beside="least-request")
    with pytest.raises(ConfigError, match=r"--endpoints: endpoint '10\.0\.0\.1' is not HOST:PORT"):
        arms(beside="round-robin", endpoints="10.0.0.1")


def test_a_key_is_shown_to_both_and_is_in_no_repr(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-planted\n", encoding="utf-8")
    wanted = Wanted(access=PodAccess(key_file=key), beside="http://127.0.0.1:9")

    chosen = choose_arms(wanted, headers={}, salt="s")

    assert [each.target.headers for each in chosen] == [{"authorization": "Bearer sk-planted"}] * 2
    assert "sk-planted" not in repr(chosen)
