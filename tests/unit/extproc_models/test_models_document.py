"""The list of a pool's models, as clients of vLLM read it."""

import json

from extproc.models.models import ModelRule, ModelTable, ModelTarget, ServedModel, models_document


def test_models_their_other_names_adapters_and_rules_are_listed_once_each() -> None:
    table = ModelTable(
        served=(
            ServedModel(name="big", aliases=frozenset({"large"}), adapters=frozenset({"sql"}), max_model_len=4096),
            ServedModel(name="small"),
        ),
        rules=(
            ModelRule(model="best", targets=(ModelTarget(model="big"),)),
            ModelRule(model="small", targets=(ModelTarget(model="big"),)),
            ModelRule(model="*", targets=(ModelTarget(model="small"),)),
        ),
    )
    document = models_document(table, {"sql": "big", "chat": "small"}, created=7)
    assert document is not None
    data = json.loads(document)["data"]
    assert {card["id"]: (card["root"], card["parent"], card.get("max_model_len")) for card in data} == {
        "big": ("big", None, 4096),
        "large": ("big", None, 4096),
        "sql": ("sql", "big", 4096),
        "small": ("small", None, None),
        "chat": ("chat", "small", None),
        "best": ("big", None, None),
    }
    assert len(data) == 6


def test_without_a_known_model_the_pods_answer() -> None:
    assert models_document(ModelTable(), {}, created=7) is None
