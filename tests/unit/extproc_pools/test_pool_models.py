"""The names under which a pool's models are looked up, declared or told by its pods."""

from pathlib import Path

import pytest

from extproc.models.learned_models import MOST_MODELS, learned_models
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.pods.endpoint import EndpointModels
from extproc.policy.values import PoolConfig
from extproc.pools.pool_models import as_indexed, declared_models


def told(first: str, *others: str) -> EndpointModels:
    return EndpointModels(models=frozenset({first, *others}), adapters={}, first=first)


def test_a_model_is_looked_up_by_the_name_that_its_blocks_are_indexed_with() -> None:
    served = ServedModel(name="gpt", aliases=frozenset({"llama", "other"}))
    indexed = ServedModel(name="llama", aliases=frozenset({"gpt", "other"}))
    assert as_indexed(served, "llama") == indexed
    assert as_indexed(served, None) is as_indexed(served, "gpt") is as_indexed(served, "strange") is served


def test_pods_tell_models_by_their_first_names_and_the_others_are_aliases() -> None:
    pods = [told("qwen", "chat"), None, told("qwen", "chat", "qwen-8b"), told("code")]
    assert learned_models(pods, folders=None) == (
        ServedModel(name="code"),
        ServedModel(name="qwen", aliases=frozenset({"chat", "qwen-8b"})),
    )


def test_a_model_that_pods_tell_has_the_tokenizer_of_the_folder_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "org" / "qwen").mkdir(parents=True)
    (tmp_path / "org" / "qwen" / "tokenizer.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    assert learned_models([told("org/qwen"), told("empty")], folders=tmp_path) == (
        ServedModel(name="empty"),
        ServedModel(
            name="org/qwen", tokens_from=TokensFrom.TOKENIZER, tokenizer_folder=tmp_path.joinpath("org", "qwen")
        ),
    )


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer.model", "tekken.json"])
def test_a_folder_may_have_any_other_name_of_its_model(tmp_path: Path, file: str) -> None:
    (tmp_path / "org" / "qwen").mkdir(parents=True)
    (tmp_path / "org" / "qwen" / file).touch()
    [model] = learned_models([told("chat", "org/qwen", "qwen")], folders=tmp_path)
    assert (model.name, model.tokenizer_folder) == ("chat", tmp_path / "org" / "qwen")


def test_declared_models_find_their_folders_unless_something_else_is_said_of_their_tokens(tmp_path: Path) -> None:
    for name in ("auto", "render", "own", "text"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").touch()
    said = (
        ServedModel(name="render", tokens_from=TokensFrom.RENDER),
        ServedModel(name="own", tokens_from=TokensFrom.TOKENIZER, tokenizer_folder=Path("/own")),
        ServedModel(name="text", tokens_from=TokensFrom.TEXT),
        ServedModel(name="none"),
    )
    config = PoolConfig(name="llm/a", models=ModelTable(served=(ServedModel(name="auto"), *said)), model="auto")
    found = ServedModel(name="auto", tokens_from=TokensFrom.TOKENIZER, tokenizer_folder=tmp_path / "auto")
    assert declared_models(config, (), folders=tmp_path).served == (found, *said)


@pytest.mark.parametrize("name", ["../secret", "/etc", "a/../../secret", "a//b", "", ".", "a\0b", "a/b/c/d"])
def test_a_pods_name_never_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    for folder in (tmp_path / "secret", tmp_path / "a" / "b" / "c" / "d"):
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text("{}")
    (tmp_path / "models").mkdir()
    found = learned_models([told(name)], folders=tmp_path / "models")
    assert {model.tokenizer_folder for model in found} <= {None}
    assert [model.tokenizer_folder for model in learned_models([told("a/b/c/d")], folders=tmp_path)] == [None]


def test_pods_that_invent_names_do_not_fill_the_table() -> None:
    assert len(learned_models([told(f"m{i}") for i in range(100)], folders=None)) == MOST_MODELS


def test_what_pods_tell_gives_a_declared_model_its_indexed_name_and_aliases_and_adds_what_nobody_declares() -> None:
    declared = ServedModel(name="qwen", tokens_from=TokensFrom.TOKENIZER, tokenizer_folder=Path("/qwen"))
    learned = learned_models([told("qwen-prod", "qwen", "chat"), told("code")], folders=None)
    config = PoolConfig(name="llm/a", models=ModelTable(served=(declared,)), learned=learned)
    assert declared_models(config, ()).served == (
        ServedModel(
            name="qwen-prod",
            aliases=frozenset({"qwen", "chat"}),
            tokens_from=TokensFrom.TOKENIZER,
            tokenizer_folder=Path("/qwen"),
        ),
        ServedModel(name="code"),
    )


def test_a_policy_that_lists_all_models_learns_no_further_ones() -> None:
    config = PoolConfig(
        name="llm/a",
        models=ModelTable(served=(ServedModel(name="qwen"),), only_listed=True),
        learned=learned_models([told("code")], folders=None),
    )
    assert declared_models(config, ()).served == (ServedModel(name="qwen"),)


def test_declared_models_that_are_one_in_the_pods_are_one() -> None:
    learned = learned_models([told("base", "one", "two")], folders=None)
    models = ModelTable(served=(ServedModel(name="one"), ServedModel(name="two")))
    assert [
        model.name for model in declared_models(PoolConfig(name="p", models=models, learned=learned), ()).served
    ] == ["base"]
