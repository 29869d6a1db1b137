"""The `models` setting: what it may say, and that an error names the place."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.errors import ConfigError
from extproc.models.models import ModelRule, ModelTable, ModelTarget, ServedModel, StickyBy, TokensFrom
from extproc.models.models_document import parse_models

DOCUMENT = """
only_listed: true
served:
  - name: org/llama
    aliases: [llama]
    adapters: [sql-lora]
    tokenizer: /models/llama
    chat_template: /models/llama.jinja
    chat_template_kwargs: {enable_thinking: false}
    max_model_len: 8192
  - name: org/vision
    tokens: render
  - name: org/other
rules:
  - model: gpt-x
    targets: [org/llama]
    fallbacks: [org/other]
  - model: chat
    targets:
      - {model: llama, weight: 9}
      - {model: org/other}
    sticky_by: header
    sticky_header: X-Tenant
"""


def test_the_whole_document_is_read() -> None:
    assert parse_models(yaml.safe_load(DOCUMENT)) == ModelTable(
        served=(
            ServedModel(
                name="org/llama",
                aliases=frozenset({"llama"}),
                adapters=frozenset({"sql-lora"}),
                tokens_from=TokensFrom.TOKENIZER,
                tokenizer_folder=Path("/models/llama"),
                chat_template=Path("/models/llama.jinja"),
                chat_template_kwargs={"enable_thinking": False},
                max_model_len=8192,
            ),
            ServedModel(name="org/vision", tokens_from=TokensFrom.RENDER),
            ServedModel(name="org/other", tokens_from=TokensFrom.TEXT),
        ),
        rules=(
            ModelRule(model="gpt-x", targets=(ModelTarget(model="org/llama"),), fallbacks=("org/other",)),
            ModelRule(
                model="chat",
                targets=(ModelTarget(model="llama", weight=9.0), ModelTarget(model="org/other", weight=1.0)),
                sticky_by=StickyBy.HEADER,
                sticky_header="x-tenant",
            ),
        ),
        only_listed=True,
    )


def test_no_document_is_an_empty_table() -> None:
    assert parse_models(None) == parse_models({}) == ModelTable()


def test_the_table_knows_its_names_and_the_headers_that_its_rules_read() -> None:
    table = parse_models(yaml.safe_load(DOCUMENT))
    assert table.names() == {"org/llama", "llama", "sql-lora", "org/vision", "org/other", "gpt-x", "chat"}
    assert table.sticky_headers() == {"x-tenant"}


def rule(**changes: Any) -> dict[str, Any]:
    return {"rules": [{"model": "chat", "targets": ["a"], **changes}]}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "models must be an object"),
        ({"serving": []}, "models.serving is not a setting; there are served, rules, only_listed"),
        ({"only_listed": "yes"}, "models.only_listed must be true or false"),
        ({"served": {}}, "models.served must be a list"),
        ({"served": ["a"]}, r"models.served\[0\] must be an object, not 'a'"),
        ({"served": [{}]}, r"models.served\[0\].name is missing"),
        ({"served": [{"name": ""}]}, r"models.served\[0\].name must be a text"),
        ({"served": [{"name": "a", "folder": "x"}]}, r"models.served\[0\].folder is not a setting"),
        ({"served": [{"name": "a", "aliases": ["b", 3]}]}, r"models.served\[0\].aliases\[1\] must be a text, not 3"),
        ({"served": [{"name": "a", "tokens": "magic"}]}, r"tokens must be one of tokenizer, render, text, not 'magic'"),
        ({"served": [{"name": "a", "tokens": ["text"]}]}, r"tokens must be one of tokenizer, render, text"),
        ({"served": [{"name": "a", "tokens": "tokenizer"}]}, r"models.served\[0\].tokenizer is missing"),
        ({"served": [{"name": "a", "max_model_len": 0}]}, r"models.served\[0\].max_model_len must be a whole number"),
        ({"served": [{"name": "a", "max_model_len": True}]}, r"models.served\[0\].max_model_len must be a whole"),
        ({"served": [{"name": "a", "chat_template_kwargs": []}]}, r"chat_template_kwargs must be an object"),
        (
            {"served": [{"name": "a"}, {"name": "b", "adapters": ["a"]}]},
            r"models.served\[1\]: the name 'a' is already that of models.served\[0\]",
        ),
        ({"rules": [{"targets": ["a"]}]}, r"models.rules\[0\].model is missing"),
        (rule(targets=[]), r"models.rules\[0\].targets is missing: name the models that serve 'chat'"),
        (rule(targets=["a", {"model": "a"}]), r"models.rules\[0\].targets: a model is named twice"),
        (rule(targets=[{"model": "a", "weight": 0}]), r"models.rules\[0\].targets: at least one weight"),
        (rule(targets=[{"model": "a", "weight": -1}]), r"models.rules\[0\].targets\[0\].weight must be a number >= 0"),
        (rule(targets=[{"model": "a", "weight": float("nan")}]), r"targets\[0\].weight must be a number >= 0, not nan"),
        (rule(targets=[{"model": "a", "weight": True}]), r"targets\[0\].weight must be a number >= 0, not True"),
        (rule(targets=[""]), r"models.rules\[0\].targets\[0\] must be a text"),
        (rule(sticky_by="header"), r"models.rules\[0\].sticky_header is needed with sticky_by: header"),
        (rule(sticky_by="user", sticky_header="x"), r"models.rules\[0\].sticky_header is needed with"),
        (rule(fallbacks=["b", "b"]), r"models.rules\[0\].fallbacks: a model is named twice"),
        ({"rules": [*rule()["rules"], *rule()["rules"]]}, r"models.rules\[1\].model: 'chat' has a rule already"),
        ({"only_listed": True, **rule()}, r"models.rules\[0\]: 'a' is neither a served model nor an adapter"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_place(document: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_models(document)


def test_the_path_is_the_callers() -> None:
    with pytest.raises(ConfigError, match=r"policy\.models must be an object"):
        parse_models(3, path="policy.models")
