"""The init container `fetch-models` as it is rendered: the real `hf`, on a hub that speaks the real protocol."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.models.learned_models import learned_models
from extproc.models.models import TokensFrom
from extproc.pods.endpoint import EndpointModels
from operate.install.model_volume import fetching_containers
from tests.integration.hub_server import HubState, away, hub_server, large_list, other_content
from tests.unit.operate_install.sample_plans import plan

TOKENIZER = b'{"model": "' + b"x" * 2000 + b'"}'  # large: it is on the CDN
FILES = {
    "tokenizer.json": TOKENIZER,
    "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast"}',
    "config.json": b'{"model_type": "llama"}',
    "additional_chat_templates/tool_use.jinja": b"{{ messages }}",
    "onnx/tokenizer.json": b"{}",
    "model.safetensors": b"w" * 5000,
    "modeling_own.py": b"raise SystemExit",
    "README.md": b"# A model",
}
KEPT = ["additional_chat_templates/tool_use.jinja", "config.json", "tokenizer.json", "tokenizer_config.json"]
MISTRAL = {"tekken.json": b"{}", "tokenizer.model.v3": b"v3"}


@pytest.fixture
def hub() -> Iterator[HubState]:
    with hub_server() as state:
        state.repository("org/llama", FILES)
        yield state


def start(hub: HubState, folder: Path, *models: str, token: str | None = None) -> subprocess.Popen[str]:
    secret = "hub" if token else None
    [container] = fetching_containers(plan(fetch_models=models, hub_endpoint=hub.endpoint, hub_token_secret=secret))
    folder.mkdir(exist_ok=True)
    token_file = Path(f"{folder}.token")
    token_file.write_text(token or "")
    places = {"/models": str(folder), "/dev/termination-log": f"{folder}.log"}
    variables: list[dict[str, Any]] = container["env"]
    environment = {each["name"]: each["value"] for each in variables} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HOME": f"{folder}.home",
        **({"HF_TOKEN_PATH": str(token_file)} if token else {}),
    }
    command = [*container["command"], *(places.get(each, each) for each in container["args"])]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def fetch(hub: HubState, folder: Path, *models: str, token: str | None = None) -> str:
    """Return what it says; whatever becomes of the models, it ends well."""
    process = start(hub, folder, *models, token=token)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    return said


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_picker_finds_the_files_of_the_tokenizer_and_no_others(hub: HubState, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    hub.repositories["org/llama"].refs["v1"] = hub.repositories["org/llama"].refs["main"]
    hub.repositories["org/llama"].commit({"tokenizer.json": b"{}"})
    assert fetch(hub, folder, "org/llama@v1", "chat=org/llama") == "fetched org/llama@v1\nfetched chat=org/llama\n"
    assert files(folder / "org" / "llama") == KEPT
    assert (folder / "org" / "llama" / "tokenizer.json").read_bytes() == TOKENIZER
    assert files(folder / "chat") == ["tokenizer.json"]
    assert {path.stat().st_mode & 0o444 for path in folder.resolve().rglob("*")} == {0o444}, "other users read it"
    [model] = learned_models([EndpointModels(first="chat", models=frozenset({"chat"}), adapters={})], folders=folder)
    assert (model.tokens_from, model.tokenizer_folder) == (TokensFrom.TOKENIZER, folder / "chat")
    asked = len(hub.requests)
    fetch(hub, folder, "org/llama@v1", "chat=org/llama")
    assert len(hub.requests) == asked, "what is there is not fetched again"


def test_files_of_mistral_are_kept_where_vllm_goes_by_them(hub: HubState, tmp_path: Path) -> None:
    hub.repository("org/copied", FILES | MISTRAL)
    hub.repository("org/mistral", FILES | MISTRAL | {"consolidated-00001.safetensors": b"w"})
    fetch(hub, tmp_path / "models", "org/copied", "org/mistral")
    assert files(tmp_path / "models" / "org" / "copied") == KEPT
    assert files(tmp_path / "models" / "org" / "mistral") == sorted([*KEPT, *MISTRAL])


def test_a_failure_is_told_and_leaves_what_was_there(hub: HubState, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    fetch(hub, folder, "org/llama")
    hub.repository("org/bare", {"config.json": b"{}"})
    hub.repository("org/changed", {"tokenizer.json": TOKENIZER + b" "})
    hub.faults.append(other_content)
    said = fetch(hub, folder, "org/bare", "org/changed", "llama=org/llama@v9")
    assert Path(f"{folder}.log").read_text() == said
    assert "failed org/bare: " in said
    assert "it has no tokenizer" in said
    assert "failed org/changed: " in said
    assert "Checksum verification failed" in said
    assert "failed llama=org/llama@v9: " in said
    hub.faults.append(away)
    fetch(hub, folder, "org/llama@v2")
    assert files(folder / "org" / "llama") == KEPT
    assert {path.name for path in folder.iterdir()} == {".fetched", "org"}


def test_a_list_too_large_for_the_container_ends_one_fetch(hub: HubState, tmp_path: Path) -> None:
    hub.faults.append(large_list)
    failed, fetched = fetch(hub, tmp_path / "models", "org/large", "org/llama").rstrip().rsplit("\n", 1)
    assert "MemoryError" in failed
    assert fetched == "fetched org/llama"


def test_the_token_goes_to_the_hub_and_not_to_the_cdn(hub: HubState, tmp_path: Path) -> None:
    hub.repositories["org/llama"].gated = True
    assert "failed org/llama: " in fetch(hub, tmp_path / "without", "org/llama")
    hub.requests.clear()
    assert fetch(hub, tmp_path / "with", "org/llama", token=hub.token) == "fetched org/llama\n"
    assert {each.token for each in hub.requests if each.place == "cdn"} == {None}


def test_pickers_may_fetch_into_one_folder_at_once(hub: HubState, tmp_path: Path) -> None:
    pickers = [start(hub, tmp_path / "models", "org/llama") for _ in range(3)]
    said = [each.communicate()[0] for each in pickers]
    assert said == ["fetched org/llama\n"] * 3
    assert files(tmp_path / "models" / "org" / "llama") == KEPT
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [".fetched", "org"]


def test_a_folder_of_somebody_else_is_left_alone(hub: HubState, tmp_path: Path) -> None:
    own = tmp_path / "models" / "org" / "llama"
    own.mkdir(parents=True)
    (own / "tokenizer.json").write_bytes(b"{}")
    assert "failed org/llama: " in fetch(hub, tmp_path / "models", "org/llama")
    assert files(own) == ["tokenizer.json"]
