"""How models to fetch are written."""

from pathlib import Path

import pytest

from extproc.errors import ConfigError
from extproc.hub.wanted_models import WantedModel, parse_all, parse_wanted


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("org/llama", WantedModel(served="org/llama", repository="org/llama")),
        ("gpt2@v1.0", WantedModel(served="gpt2", repository="gpt2", revision="v1.0")),
        ("chat=org/llama@refs/pr/1", WantedModel(served="chat", repository="org/llama", revision="refs/pr/1")),
        ("a/b/c=org/llama", WantedModel(served="a/b/c", repository="org/llama")),
    ],
)
def test_name_model_and_revision(text: str, model: WantedModel) -> None:
    assert parse_wanted(text) == model


def test_its_folder_is_the_name_that_pods_serve() -> None:
    assert parse_wanted("chat/small=org/llama").folder(Path("/models")) == Path("/models/chat/small")


def test_several_with_commas_or_apart() -> None:
    assert [each.served for each in parse_all(["org/a,org/b@v1", " c=org/a "])] == ["org/a", "org/b", "c"]


@pytest.mark.parametrize(
    "text", ["", "../x", "org/../x", "a/b/c", "org/llama@", "org/llama@../x", "../up=org/llama", "=org/llama", "a b/c"]
)
def test_what_could_lead_elsewhere_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write \[NAME=\]MODEL\[@REVISION\]"):
        parse_wanted(text)


def test_two_models_cannot_have_one_folder() -> None:
    with pytest.raises(ConfigError, match="'org/a' is given twice"):
        parse_all(["org/a", "org/a@v2"])
