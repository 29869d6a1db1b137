"""What `kvmesh up` takes from a pod where the flags leave it open."""

from dataclasses import replace
from pathlib import Path

import pytest

from operate.local.envoy_config import SocketAddress
from operate.local.errors import UnnamedModelError
from operate.local.service import PODS_ARE_ASKED, ModelCard, ServedModels, fill_in_model
from tests.unit.operate_local.local_settings import settings

POD = SocketAddress(host="10.0.0.1", port=8000)
OPEN = settings(endpoints=(POD,), model=None, tokenizer=None)
WITHOUT_TOKENIZER = f"no tokenizer: {PODS_ARE_ASKED}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def served(*cards: ModelCard) -> ServedModels:
    return ServedModels(pod=str(POD), data=cards)


def test_model_and_tokenizer_are_those_of_the_pod_if_its_folder_is_here(folder: Path) -> None:
    filled = fill_in_model(OPEN, served(ModelCard(id="big", root=str(folder)), ModelCard(id="adapter", root="/x")))

    assert filled == (
        replace(OPEN, model="big", tokenizer_folder=folder),
        ("model big, as 10.0.0.1:8000 says", f"tokenizer {folder}, as 10.0.0.1:8000 says"),
    )


def test_a_folder_that_needs_what_is_not_installed_is_left_and_that_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.prompts.tokenizer_folder.is_installed", lambda: False)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    filled, notes = fill_in_model(OPEN, served(ModelCard(id="big", root=str(folder))))
    assert filled == replace(OPEN, model="big")
    assert notes[1].endswith("not used, because its tokenizer_class is LlamaTokenizer: pip install 'kvmesh[models]'")
    assert notes[2] == WITHOUT_TOKENIZER


def test_a_folder_with_mistrals_file_alone_is_a_tokenizer_if_it_says_whose_weights_the_pods_have(
    tmp_path: Path,
) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    _, notes = fill_in_model(OPEN, served(ModelCard(id="big", root=str(tmp_path))))
    assert "not used, because the pods read it with mistral-common only if its weights are Mistral's own" in notes[1]
    (tmp_path / "consolidated.safetensors").touch()
    filled, _ = fill_in_model(OPEN, served(ModelCard(id="big", root=str(tmp_path))))
    assert filled == replace(OPEN, model="big", tokenizer_folder=tmp_path)


@pytest.mark.parametrize("root", [None, "org/model", "/nonexistent", "", "\0", "x" * 5000])
def test_a_model_that_is_no_folder_here_is_served_without_prefix_routing_and_that_is_said(root: str | None) -> None:
    assert fill_in_model(OPEN, served(ModelCard(id="big", root=root))) == (
        replace(OPEN, model="big"),
        ("model big, as 10.0.0.1:8000 says", WITHOUT_TOKENIZER),
    )


def test_a_model_that_is_given_gets_the_folder_of_its_own_card(folder: Path) -> None:
    given = replace(OPEN, model="second")
    cards = (ModelCard(id="first", root="/x"), ModelCard(id="second", root=str(folder)))

    assert fill_in_model(given, served(*cards)) == (
        replace(given, tokenizer_folder=folder),
        (f"tokenizer {folder}, as 10.0.0.1:8000 says",),
    )
    assert fill_in_model(replace(given, model="third"), served(*cards))[1] == (WITHOUT_TOKENIZER,)


def test_what_is_given_is_not_changed_and_needs_no_pod() -> None:
    assert fill_in_model(replace(OPEN, model="mine", tokenizer_folder=Path("/mine")), None) == (
        replace(OPEN, model="mine", tokenizer_folder=Path("/mine")),
        (),
    )
    assert fill_in_model(replace(OPEN, model="mine"), None) == (replace(OPEN, model="mine"), (WITHOUT_TOKENIZER,))


def test_a_model_that_nobody_names_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(UnnamedModelError) as raised:
        fill_in_model(OPEN, None)

    assert raised.value.message == (
        "no pod of --endpoints says which model it serves (GET /v1/models of 10.0.0.1:8000); start one, give --model, "
        "or --pod-key-file where the pods run with --api-key"
    )
