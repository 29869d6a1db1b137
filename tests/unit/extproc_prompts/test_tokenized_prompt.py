"""Images and the like enter the keys of the blocks that they touch, as the engine's events say it."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from extproc.prompts.tokenized_prompt import Feature, TokenizedPrompt
from kvmesh.blocks.block_keys import block_keys, fold_features

CASES = json.loads((Path(__file__).parents[2] / "data" / "vllm_media_extra_keys.json").read_text())["cases"]


def prompt(tokens: int, *features: tuple[str, int, int]) -> TokenizedPrompt:
    return TokenizedPrompt(
        tokens=array("I", range(tokens)).tobytes(),
        features=tuple(Feature(identifier=name, first_token=first, length=length) for name, first, length in features),
    )


def test_a_prompt_of_text_has_nothing_beside_its_tokens() -> None:
    assert prompt(64).extra(16) is None


def test_every_block_that_an_image_touches_has_it_with_its_place_relative_to_the_block() -> None:
    # vLLM's own entries for an image at tokens 20..51 and one at 52..55, blocks of 16, the last block not full
    assert prompt(70, ("cat", 20, 32), ("dog", 52, 4)).extra(16) == [
        None,
        fold_features([("cat", 4)]),
        fold_features([("cat", -12)]),
        fold_features([("cat", -28), ("dog", 4)]),
    ]


def test_an_image_that_ends_with_a_block_is_not_in_the_next_one() -> None:
    assert prompt(48, ("cat", 0, 32)).extra(16) == [fold_features([("cat", 0)]), fold_features([("cat", -16)]), None]


def test_an_image_in_the_partial_last_block_changes_no_key() -> None:
    assert prompt(40, ("cat", 33, 4)).extra(16) == [None, None]


def test_the_same_placeholders_with_another_image_have_other_keys_from_there_on() -> None:
    cat, dog = prompt(64, ("cat", 20, 8)), prompt(64, ("dog", 20, 8))
    keys = [block_keys(p.tokens, block_size=16, parent=b"r" * 8, extra=p.extra(16)) for p in (cat, dog)]
    assert keys[0][:8] == keys[1][:8]
    assert keys[0][8:16] != keys[1][8:16]
    assert keys[0][24:] != keys[1][24:]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['tokens']} tokens, blocks of {case['block_size']}")
def test_every_block_has_what_vllm_publishes_for_it(case: dict[str, Any]) -> None:
    entries = case["extra_keys"] or [None] * (case["tokens"] // case["block_size"])
    published = [fold_features(entry or ()) for entry in entries]
    assert prompt(case["tokens"], *case["features"]).extra(case["block_size"]) == published
