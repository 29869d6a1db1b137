"""What /v1/models tells of a pod."""

import json

import pytest

from extproc.pods.endpoint import EndpointModels, parse_served_models


def test_base_models_adapters_and_the_shortest_context_are_taken() -> None:
    page = {
        "object": "list",
        "data": [
            {"id": "llama", "parent": None, "max_model_len": 8192, "root": "/models/llama"},
            {"id": "llama-8b", "max_model_len": 8192},
            {"id": "sql", "parent": "llama", "max_model_len": None},
        ],
    }
    models = parse_served_models(json.dumps(page).encode())
    assert models == EndpointModels(
        models=frozenset({"llama", "llama-8b"}), adapters={"sql": "llama"}, max_model_len=8192, first="llama"
    )
    assert [models.serves(name) for name in ("llama-8b", "sql", "other")] == [True, True, False]


@pytest.mark.parametrize(("owner", "is_sglang"), [("sglang", True), ("vllm", False), (None, False), (3, False)])
def test_sglang_names_itself(owner: object, is_sglang: bool) -> None:
    models = parse_served_models(json.dumps({"data": [{"id": "llama", "owned_by": owner}]}).encode())
    assert models is not None
    assert models.is_sglang is is_sglang


@pytest.mark.parametrize("page", [b"", b"{}", b'{"data": []}', b'{"data": [{"id": 3}]}', b"<html>", b"[" * 100_000])
def test_a_page_that_tells_nothing_means_that_every_model_may_be_there(page: bytes) -> None:
    assert parse_served_models(page) is None
