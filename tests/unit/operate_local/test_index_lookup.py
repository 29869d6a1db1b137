"""What `kvmesh index lookup` makes of a file, and what it prints."""

import json
from array import array
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from extproc.errors import ConfigError
from operate.local.index_lookup import (
    EndpointHolding,
    LookupReport,
    PromptHolding,
    PromptTokenIds,
    read_token_ids,
    render,
)

HOLDING = EndpointHolding(
    endpoint="10.0.0.1:8000",
    matched_blocks=12,
    matched_tokens=192,
    share=0.96,
    block_size=16,
    tiers={"GPU": 9, "CPU": 3},
    state="live",
    reason="",
)
COLD = EndpointHolding(
    endpoint="[fe80::1]:8000",
    matched_blocks=0,
    matched_tokens=0,
    share=0.0,
    block_size=None,
    tiers={},
    state="lost",
    reason="unreachable",
)


def read(value: Any) -> PromptTokenIds:
    return read_token_ids(json.dumps(value).encode(), model="tiny", tokenizer=None)


def shown(report: LookupReport) -> list[str]:
    output = StringIO()
    render(report, console=Console(file=output, width=80, highlight=False))
    return [line.rstrip() for line in output.getvalue().splitlines()]


def test_a_list_of_token_ids_needs_no_tokenizer() -> None:
    assert read([1, 2, 151_643]) == PromptTokenIds(buffers=(array("I", [1, 2, 151_643]).tobytes(),), cache_salt=None)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ([1, -1], "integers from 0"),
        ([1, 1 << 32], "integers from 0"),
        ([1.5], "integers from 0"),
        ([True], "integers from 0"),
        ("text", "neither a request body"),
        ({"model": "other", "prompt": "hi"}, "'other', and --model is 'tiny'"),
        ({"model": "tiny", "prompt": "hi"}, "needs --tokenizer"),
        ({"model": "tiny", "messages": "hi"}, "no request body"),
        ({"model": "tiny", "prompt": None}, "tokens cannot be known"),
    ],
)
def test_a_file_that_cannot_be_looked_up_is_an_error_that_says_why(value: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(value)


def test_a_file_that_is_no_json_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no JSON"):
        read_token_ids(b"\xff{", model="tiny", tokenizer=None)


def test_holders_are_shown_with_their_tiers_and_what_is_wrong_with_them() -> None:
    report = LookupReport(
        model="tiny", prompts=(PromptHolding(tokens=200, endpoints=(HOLDING, COLD)),), indexer_alive=True
    )

    assert shown(report) == [
        "prompt: 200 tokens",
        "endpoint       blocks tokens share tiers        state",
        "10.0.0.1:8000      12    192   96% GPU 9, CPU 3 live",
        "[fe80::1]:8000      0      0    0% -            lost",
        "[fe80::1]:8000 is lost: unreachable",
    ]


def test_what_held_a_hit_back_is_said() -> None:
    prompt = PromptHolding(tokens=200, endpoints=(replace(HOLDING, held_back="a window has gone"),))
    report = LookupReport(model="tiny", prompts=(prompt,), indexer_alive=True)
    assert shown(report)[-1] == "10.0.0.1:8000: a window has gone"


def test_a_prompt_that_nobody_holds_and_an_empty_index_are_said_in_words() -> None:
    cold = PromptHolding(tokens=5, endpoints=(COLD,))
    empty = PromptHolding(tokens=5, endpoints=())

    lines = shown(LookupReport(model="tiny", prompts=(cold, empty), indexer_alive=False))

    assert lines[0] == "No indexer is alive: nothing keeps the index true."
    assert "Nobody holds its beginning, as the model tiny with this hash seed." in lines
    assert lines[-2:] == ["prompt 2: 5 tokens", "The index is empty: no indexer has registered a source yet."]
